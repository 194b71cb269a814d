"""The settings of a run with their defaults, validated before torch is imported.

Keys have the names of TRL's GRPOConfig and of the paper's code where those have the setting. A default marked "paper"
is that of AMIR-GRPO (arXiv 2601.03661) or of its released code.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from .errors import nearest
from .other_names import other_value

# Objectives of amir_kernels, and the default epsilon and epsilon_high by which each clips the ratio; None: it does not.
LOSS_TYPES: dict[str, tuple[float, float] | None] = {
    "grpo": (0.2, 0.2),
    "bnpo": (0.2, 0.2),
    "dr_grpo": (0.2, 0.2),
    "dapo": (0.2, 0.28),
    "gspo": (3e-4, 4e-4),
    "gspo_token": (3e-4, 4e-4),
    "luspo": (0.2, 0.2),
    "gmpo": (0.2, 0.2),
    "cispo": (0.2, 0.2),
    "sapo": None,
    "vespo": None,
    "gpg": None,
    "reinforce": None,
}


REWARDS = (
    "correctness",
    "integer",
    "strict_format",
    "soft_format",
    "xml_count",
    "calibrated_confidence",
    "cosine_length",
    "linear_length",
)
NEED_ANSWERS = {"correctness", "calibrated_confidence", "cosine_length"}
"""The shipped rewards that compare a completion with the example's answer."""


SYSTEM_PROMPTS = {
    "think": (
        "You solve the problem that the user gives. Work out the solution between <think> and </think>, then give it "
        "between <answer> and </answer>, with the final result in \\boxed{}."
    ),
    "calibrated": (
        "You solve the problem that the user gives. Work out the solution between <think> and </think>, then give it "
        "between <answer> and </answer>, with the final result in \\boxed{}. Then weigh, between <analysis> and "
        "</analysis>, what speaks for and against that result, and state between <confidence> and </confidence> the "
        "probability that it is right, a number from 0 to 1."
    ),
}
"""System prompts by name. `think` matches the default tags of the format rewards; `calibrated` also requests the
confidence that `calibrated_confidence` reads."""


class Settings(BaseModel):
    """Base of all settings. Unknown keys and wrong types are refused; text like 2e-4 is accepted as a number."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, validate_default=True)


def _not_bool(value: object) -> object:
    if value is True or value is False:
        raise ValueError("expected a number")
    return value


Number = Annotated[float, BeforeValidator(_not_bool), Field(strict=False, allow_inf_nan=False)]
Positive = Annotated[Number, Field(gt=0)]
NonNegative = Annotated[Number, Field(ge=0)]
Fraction = Annotated[Number, Field(ge=0, lt=1)]
Count = Annotated[int, Field(ge=1, lt=2**31)]
CountOrZero = Annotated[int, Field(ge=0, lt=2**31)]
Text = Annotated[str, Field(min_length=1)]


def _valid_path(text: str) -> str:
    if "\0" in text:
        raise ValueError("a path has no NUL character; remove it")
    try:
        Path(text).expanduser()
    except RuntimeError:
        raise ValueError(
            "there is no home folder of that user; expected an existing user, or a path without ~"
        ) from None
    return text


PathText = Annotated[Text, AfterValidator(_valid_path)]
"""A path, or a name that may be one; a leading `~` is the user's home folder."""

Paths = PathText | Annotated[list[PathText], Field(min_length=1)]
"""One path or several; `*`, `?`, `**` and `[...]` in a path match files."""


def _file_text(path: str) -> str:
    """The text of a file; ValueError if there is none, or it cannot be read."""
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"the file is not UTF-8 ({error}); save it as UTF-8") from None
    except (OSError, RuntimeError, ValueError) as error:
        raise ValueError(f"no readable file has this path ({getattr(error, 'strerror', None) or error})") from None
    if not text.strip():
        raise ValueError("the file is empty; write the text into it")
    return text


def _is_file(path: str) -> bool:
    try:
        return Path(path).expanduser().is_file()
    except (OSError, RuntimeError, ValueError):
        return False


def _resolved_template(text: str) -> str:
    """A Jinja template as it is; otherwise that in the file which the text names."""
    expected = "expected a Jinja template, which has {{ }} or {% %}, or the path of a file with one"
    try:
        template = text if _JINJA.search(text) else _file_text(text)
    except ValueError as error:
        raise ValueError(f"it is not a template, and {error}; {expected}") from None
    if not _JINJA.search(template):
        raise ValueError(f"the file is not a template; {expected}")
    return template


def _resolved_system_prompt(text: str) -> str:
    """The text, the shipped name, or the text of the file that is named; a misspelt name or path is refused."""
    if text in SYSTEM_PROMPTS or "\n" in text.strip():
        return text
    if _is_file(text):
        return _file_text(text)
    if re.search(r"\.(txt|md|jinja2?|j2)$", text):
        raise ValueError("there is no such file; expected an existing file, a shipped name, or the text of the prompt")
    near = nearest(text.strip().casefold(), SYSTEM_PROMPTS, cutoff=0.7)
    if near and re.fullmatch(r"\s*[\w-]+\s*", text):
        raise ValueError(
            f"expected the text of the prompt, or a shipped name ({', '.join(SYSTEM_PROMPTS)}), and this is one word "
            f"that resembles such a name{near}"
        )
    return text


def _server_address(url: str) -> str:
    if not re.match(r"https?://[^/\s]+", url):
        raise ValueError("expected an address such as http://localhost:8000")
    return url


_JINJA = re.compile(r"\{\{|\{%")


def by_name(value: object) -> object:
    """A name alone stands for the settings of that name: `gsm8k` for {name: gsm8k}."""
    return {"name": value} if isinstance(value, str) else value


def switched(value: object) -> object:
    """`true` stands for a group of settings with its defaults, `false` for none."""
    return ({} if value else None) if isinstance(value, bool) else value


def reward_list(value: object) -> object:
    """One reward without the brackets of a list; each by its name alone, or a function as file.py:function."""
    rewards = value if isinstance(value, list) else [value]
    return [{"function": r} if isinstance(r, str) and (":" in r or r.endswith(".py")) else by_name(r) for r in rewards]


def scaling(value: object) -> object:
    """TRL's `true` and `false`."""
    return ("group" if value else "none") if isinstance(value, bool) else value


SHORTHANDS: dict[str, Callable[[object], object]] = {
    "lora": switched,
    "task": by_name,
    "rewards": reward_list,
    "sampler": by_name,
    "dynamic_sampling": switched,
    "scale_rewards": scaling,
    "correction": switched,
}
"""What may be written for a setting in place of its whole value."""


class LoraSettings(Settings):
    """A LoRA adapter, with PEFT's names. There is no dropout: the scored policy must be the one that sampled."""

    r: Count = 16  # paper
    alpha: Positive = 16  # paper
    target_modules: str | Annotated[list[str], Field(min_length=1)] = "all-linear"  # names, or a regular expression
    adapter: PathText | None = None  # a PEFT folder to continue from; it is then also the reference policy


class ArithmeticTask(Settings):
    """Sums of two operands from 0 to `max_operand`; `held_out` is the share of unordered pairs used for evaluation.

    Above 198 a seeded choice of 20,000 pairs is used.
    """

    name: Literal["arithmetic"]
    max_operand: Annotated[int, Field(ge=4, lt=10**100)] = 9
    held_out: Annotated[Number, Field(gt=0, le=0.5)] = 0.3


class Gsm8kTask(Settings):
    """GSM8K questions: a JSONL file with `question` and `answer`, a folder with train.jsonl and test.jsonl, or the hub.

    Without `path`, openai/gsm8k is read from the hub; `path: sample` is the 50 questions shipped with the package.
    """

    name: Literal["gsm8k"]
    path: PathText | None = None


class DatasetTask(Settings):
    """Rows of .jsonl, .json, .csv, .tsv or .parquet files, or of the dataset that `datasets.load_dataset` reads.

    `path` and `held_out_path` are one path or a list; they may have wildcards, and text files may be compressed (.gz,
    .bz2, .xz). `prompt` is a template over columns, such as "{question}\\nAnswer:"; `messages` names a column of chat
    messages instead. A dot leads to a field of a column, as in `reward_model.ground_truth`. `answer_format`: "plain"
    takes the whole cell, "gsm8k" the text after the last ####, "boxed" the content of the last \\boxed{}. Held-out
    examples are a share of the rows (`held_out`), or another file (`held_out_path`), or another split of the same
    dataset (`held_out_split`); by default there are none.
    """

    name: Literal["dataset"]
    path: Paths
    subset: Text | None = None
    split: Text | None = None  # "train" by default where load_dataset is used
    prompt: Text | None = None
    messages: Text | None = None
    answer: Text | None = "answer"
    answer_format: Literal["plain", "gsm8k", "boxed"] = "plain"
    held_out: Fraction | None = None
    held_out_path: Paths | None = None
    held_out_split: Text | None = None

    @model_validator(mode="after")
    def _one_of_each(self) -> "DatasetTask":
        if (self.prompt is None) == (self.messages is None):
            state = "neither is" if self.prompt is None else "both are"
            raise ValueError(
                f"expected either prompt (a template) or messages (a column of chat messages), and {state} set"
            )
        sources = [k for k in ("held_out", "held_out_path", "held_out_split") if getattr(self, k) is not None]
        if len(sources) > 1:
            raise ValueError(f"{' and '.join(sources)} are set; expected only one of them")
        return self


CALL_SECONDS, JUDGE_SECONDS = 60.0, 10.0
"""Default time limits: of one call of a user's reward function, and of the comparison of one answer."""


class RewardSettings(Settings):
    """A shipped reward by `name`, or your own `function` as module:function or file.py:function.

    `timeout_seconds` limits one call of a function (60 by default) or, for `correctness`, the comparison of one answer
    (10). `arguments` are passed to the function as keywords. With `conversational`, prompts and completions are passed
    as lists of messages.
    """

    name: Text | None = None
    function: PathText | None = None
    weight: Annotated[Number, Field(ge=-1e6, le=1e6)] = 1.0
    timeout_seconds: Positive | None = None
    arguments: dict[str, Any] = {}
    conversational: bool = False

    @model_validator(mode="after")
    def _of_one_kind(self) -> "RewardSettings":
        if (self.name is None) == (self.function is None):
            state = "neither is" if self.name is None else "both are"
            raise ValueError(f"expected either name (a shipped reward) or function (your own), and {state} set")
        if self.name is not None and self.name not in REWARDS:
            raise ValueError(f"name {self.name!r}: expected one of {', '.join(REWARDS)}{nearest(self.name, REWARDS)}")
        if self.function is not None and not re.fullmatch(r".+:[A-Za-z_][\w.]*", self.function):
            raise ValueError(f"function {self.function!r}: expected module:function or file.py:function")
        if self.name is not None and self.conversational:
            raise ValueError(
                f"conversational: true is supported for your own functions only, and {self.name} reads text; leave "
                "it out"
            )
        if self.name not in (None, "correctness") and self.timeout_seconds is not None:
            raise ValueError(
                f"timeout_seconds = {self.timeout_seconds:g}: {self.name} has no time limit, only correctness and your "
                "own functions have one; leave it out"
            )
        return self

    @property
    def label(self) -> str:
        """The reward's name in metrics and records."""
        return self.name or (self.function or "").rpartition(":")[2]


class GenerateSampling(Settings):
    """Transformers' `generate` on the policy's own weights."""

    name: Literal["generate"] = "generate"


class PagedSampling(Settings):
    """Transformers' continuous batching (paged attention) on the policy's own weights.

    `cache_tokens` bounds the key-value cache; by default it holds the whole rollout. `batch_tokens` bounds the tokens
    of one forward; by default it is 512, or the number of completions if that is larger.
    """

    name: Literal["paged"]
    cache_tokens: Count | None = None
    batch_tokens: Count | None = None


class ServerSampling(Settings):
    """An OpenAI-compatible server, which gets the adapter after each update: vLLM, or `transformers serve`.

    `model` is the base model's name on the server, by default the run's `model`. Adapters are exchanged through
    `adapter_dir`, a folder that both machines can read, by default one in the run directory. If the server is down, the
    run retries for at most `wait_seconds`. After each adapter push, a few of the server's log-probs are compared with
    the trainer's: the run ends if their mean difference, weighted by the trainer's probabilities, exceeds `tolerance`
    nats.
    """

    name: Literal["server"]
    url: Annotated[str, AfterValidator(_server_address)]
    dialect: Literal["vllm", "transformers"] = "vllm"
    model: Text | None = None
    adapter_dir: PathText | None = None
    api_key_env: Text | None = None  # the environment variable that holds the key
    timeout_seconds: Positive = 600.0  # of one request
    wait_seconds: NonNegative = 600.0
    concurrent_requests: Annotated[int, Field(ge=1, le=512)] = 32
    tolerance: Positive = 0.15


Sampling = GenerateSampling | PagedSampling | ServerSampling


class CorrectionSettings(Settings):
    """Training-inference correction: the policy term is multiplied by w(c), c = exp(old - sampled), without gradient.

    `level`: one c per token, or one per completion from the sum of its differences. `mode`: "truncate" clamps c to
    [min, max]; "mask" sets w to 0 outside [min, max]. With a mean difference of 0.012 nats a token, c is 3.3 after 100
    tokens and 1.6e5 after 1,000: at sequence level "truncate" clamps long completions and "mask" drops them.
    """

    level: Literal["token", "sequence"] = "token"
    mode: Literal["truncate", "mask"] = "truncate"
    min: NonNegative = 0.0
    max: Positive = 2.0

    @model_validator(mode="after")
    def _around_one(self) -> "CorrectionSettings":
        if not self.min < 1 < self.max:
            raise ValueError(
                f"min = {self.min:g}, max = {self.max:g}: expected min < 1 < max, because 1 is no mismatch"
            )
        if self.mode == "mask" and self.min == 0:
            raise ValueError("min = 0: mode 'mask' does not filter low ratios then; expected min above 0, such as 0.5")
        return self


class DynamicSamplingSettings(Settings):
    """DAPO's dynamic sampling: groups whose rewards are all equal are replaced by groups of the next prompts.

    A step samples at most `max_rounds` rounds, and stops once `min_valid_share` of its groups have differing rewards: 1
    is DAPO's value, a smaller one is GPG's threshold. `by` names the reward that must differ within a group, by default
    the weighted sum of the rewards.
    """

    max_rounds: Annotated[int, Field(ge=2, le=100)] = 4
    min_valid_share: Annotated[Number, Field(gt=0, le=1)] = 1.0
    by: Text | None = None


class RunConfig(Settings):
    """All settings of one training run."""

    # model
    model: PathText
    lora: LoraSettings | None = LoraSettings()  # null trains every weight
    quantization: Literal["4bit", "8bit"] | None = None  # of the frozen weights: NF4 with double quantization, or int8
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    attn_implementation: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    liger_layers: bool = False  # uses Liger's kernels for norms, rotary embeddings and MLPs
    chat_template: Annotated[str, AfterValidator(_resolved_template)] | None = None  # a Jinja template, or its file
    # a text, a file with it, or the name of one of SYSTEM_PROMPTS
    system_prompt: Annotated[Text, AfterValidator(_resolved_system_prompt)] | None = None
    # data
    task: Annotated[ArithmeticTask | Gsm8kTask | DatasetTask, Field(discriminator="name")]
    overlong_prompts: Literal["drop", "refuse"] = "drop"
    min_prompt_length: Count = 1
    # rewards
    rewards: Annotated[list[RewardSettings], Field(min_length=1)] = [RewardSettings(name="correctness")]
    combine_rewards: Literal["sum", "normalize_then_sum"] = "sum"
    # rollouts
    prompts_per_step: Count = 4  # paper: 32 completions a step
    num_generations: Annotated[int, Field(ge=2)] = 8  # paper
    max_prompt_length: Count = 1024  # paper
    max_completion_length: Count = 1024  # paper
    temperature: Positive = 1.0
    top_p: Number = 1.0
    top_k: int = 0
    sampler: Annotated[Sampling, Field(discriminator="name")] = GenerateSampling()
    dynamic_sampling: DynamicSamplingSettings | None = None
    # objective
    loss_type: str = "grpo"
    epsilon: NonNegative | None = None
    epsilon_high: NonNegative | None = None
    baseline: Literal["mean", "leave_one_out", "none"] = "mean"  # subtracted from a reward; leave_one_out is RLOO's
    scale_rewards: Literal["group", "batch", "bernoulli", "none"] = "group"
    beta: NonNegative = 0.0
    entropy_coef: NonNegative = 0.0
    mask_truncated_completions: bool = False
    correction: CorrectionSettings | None = None  # importance weights when another engine than the trainer samples
    num_iterations: Count = 1
    # pair term
    lambda_reg: NonNegative = 0.01  # paper
    beta_dpo: Positive = 0.2  # paper
    reward_margin: NonNegative = 0.0  # for rewards of 0 and 1; the paper's 1.5 is for its sum of several rewards
    pair_mining: Literal["all", "topk"] = "all"
    max_pairs_per_group: Count | None = None
    ref_free: bool = False
    normalize: Literal["mean", "sum"] = "mean"
    # optimizer
    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"
    learning_rate: Positive = 5e-6  # paper
    lr_scheduler: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: CountOrZero = 0
    adam_beta1: Fraction = 0.9
    adam_beta2: Fraction = 0.99  # paper
    weight_decay: NonNegative = 0.0  # of matrices; norms and biases do not decay, as in TRL
    max_grad_norm: Positive = 1.0
    # run
    max_steps: CountOrZero = 1000  # paper; 0 evaluates only
    micro_batch_tokens: Count = 8192
    gradient_checkpointing: bool = False  # layers are recomputed in the backward
    offload_activations: bool = False  # the layer inputs that checkpointing saves are kept in CPU memory
    save_steps: Count = 50
    save_total_limit: Count | None = None  # keeps this many latest checkpoints and the best by evaluation; null all
    term_gradient_steps: CountOrZero = 0  # every N-th step measures each term's gradient of the trained parameters
    eval_prompts: CountOrZero = 0
    eval_samples: Count = 4
    eval_steps: CountOrZero = 0
    output_dir: PathText | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None

    @field_validator(*SHORTHANDS, mode="before")
    @classmethod
    def _written_out(cls, value: object, info: ValidationInfo) -> object:
        return SHORTHANDS[info.field_name or ""](value)

    @model_validator(mode="after")
    def _combinations(self) -> "RunConfig":
        for refusal in _refusals(self):
            raise ValueError(refusal)
        return self


def _refusals(c: RunConfig) -> Iterator[str]:
    if c.loss_type not in LOSS_TYPES:
        near = other_value("loss_type", c.loss_type) or nearest(c.loss_type.lower(), LOSS_TYPES)
        yield f"loss_type = {c.loss_type!r}: expected one of {', '.join(LOSS_TYPES)}{near}"
    if c.top_p != 1.0 or c.top_k != 0:
        key, value = ("top_p", c.top_p) if c.top_p != 1.0 else ("top_k", c.top_k)
        yield (
            f"{key} = {value!r}: expected top_p = 1.0 and top_k = 0, because log-probs are those of the unfiltered "
            "distribution; leave both out"
        )
    if c.loss_type in LOSS_TYPES and LOSS_TYPES[c.loss_type] is None:
        for key in ("epsilon", "epsilon_high"):
            if getattr(c, key) is not None:
                yield f"{key} = {getattr(c, key)!r}: loss_type {c.loss_type!r} does not clip; leave {key} unset"
    labels = [reward.label for reward in c.rewards]
    for label in sorted({label for label in labels if labels.count(label) > 1}):
        yield f"rewards: two are called {label!r}; expected different names, because metrics are recorded by name"
    if all(reward.weight == 0 for reward in c.rewards):
        yield "rewards: every weight is 0, so there would be no training signal; expected one weight other than 0"
    if isinstance(c.task, DatasetTask) and c.task.answer is None and NEED_ANSWERS & set(labels):
        name = min(NEED_ANSWERS & set(labels))
        yield f"task.answer = None: the reward {name} compares answers; set it to the column of the right answer"
    if c.combine_rewards == "normalize_then_sum" and (c.scale_rewards, c.baseline) != ("group", "mean"):
        yield (
            "combine_rewards = 'normalize_then_sum': it uses the mean and standard deviation of a group; expected "
            f"scale_rewards = 'group' and baseline = 'mean', got {c.scale_rewards!r} and {c.baseline!r}"
        )
    if c.min_prompt_length > c.max_prompt_length:
        yield f"min_prompt_length = {c.min_prompt_length}: expected at most max_prompt_length = {c.max_prompt_length}"
    yield from _memory_refusals(c)
    yield from _sampling_refusals(c)
    if c.max_steps == 0 and c.eval_prompts == 0:
        yield (
            "max_steps = 0: the run would neither train nor evaluate; set eval_prompts to the number of held-out "
            "examples to evaluate, or set max_steps"
        )
    if 0 < c.max_steps <= c.warmup_steps:
        yield f"warmup_steps = {c.warmup_steps}: expected fewer than max_steps = {c.max_steps}"
    if c.eval_steps and not c.eval_prompts:
        yield (
            f"eval_steps = {c.eval_steps}: eval_prompts is 0; set eval_prompts to the number of held-out examples to "
            "use"
        )


def _memory_refusals(c: RunConfig) -> Iterator[str]:
    if c.lora is None and c.quantization is not None:
        yield (
            f"quantization = {c.quantization!r}: quantized weights cannot be trained, and lora = None trains every "
            "weight; set quantization: null, or train a LoRA adapter (lora: {})"
        )
    if c.lora is None and c.dtype == "float16":
        yield (
            "dtype = 'float16': full fine-tuning (lora: null) in float16 would need loss scaling; expected 'bfloat16' "
            "or 'float32'"
        )
    if c.lora is not None and c.lora.adapter is not None and c.lora.target_modules != "all-linear":
        yield (
            f"lora.target_modules = {c.lora.target_modules!r}: the saved lora.adapter defines its own modules; leave "
            "target_modules out"
        )
    if c.offload_activations and not c.gradient_checkpointing:
        yield (
            "offload_activations = True: it offloads the layer inputs that gradient checkpointing saves, and "
            "gradient_checkpointing = False; set gradient_checkpointing: true"
        )
    if c.attn_implementation == "flash_attention_2" and c.dtype == "float32":
        yield (
            "attn_implementation = 'flash_attention_2': it supports 16-bit dtypes only, and dtype = 'float32'; set "
            "dtype: bfloat16, or attn_implementation: sdpa"
        )
    for setting in gpu_only_settings(c) if c.device == "cpu" else ():
        yield f"{setting}: this needs a GPU, and device = 'cpu'; leave the setting out, or set device: cuda"


def gpu_only_settings(c: RunConfig) -> list[str]:
    """The settings in use that work on a GPU only."""
    needs_gpu = {
        "attn_implementation = 'flash_attention_2'": c.attn_implementation == "flash_attention_2",
        "liger_layers": c.liger_layers,
        "offload_activations": c.offload_activations,
    }
    return [setting for setting, chosen in needs_gpu.items() if chosen]


def _sampling_refusals(c: RunConfig) -> Iterator[str]:
    paged = c.sampler if isinstance(c.sampler, PagedSampling) else None
    server = c.sampler if isinstance(c.sampler, ServerSampling) else None
    least = c.max_prompt_length + c.max_completion_length + 512
    if paged and paged.cache_tokens is not None and paged.cache_tokens < least:
        yield (
            f"sampler.cache_tokens = {paged.cache_tokens}: expected at least {least}, the room for one completion with "
            "its prompt (max_prompt_length + max_completion_length, and two pages)"
        )
    if server and c.lora is None:
        yield (
            "sampler.name = 'server': a server gets LoRA adapters only, and lora = None trains every weight; train a "
            "LoRA adapter (lora: {}), or use sampler 'generate'"
        )
    if c.correction and c.sampler.name == "generate":
        yield (
            "correction: with sampler 'generate' the trainer itself samples, so there is no mismatch to correct; leave "
            "correction out"
        )
    if c.correction and server and server.dialect == "transformers":
        yield (
            "correction: `transformers serve` returns no log-probs; leave correction out, or use vLLM with "
            "sampler.dialect: vllm"
        )
    labels = [reward.label for reward in c.rewards]
    if c.dynamic_sampling and c.dynamic_sampling.by not in (None, *labels):
        yield f"dynamic_sampling.by = {c.dynamic_sampling.by!r}: expected one of the run's rewards {', '.join(labels)}"

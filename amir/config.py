"""What a run is: every setting with its default, validated before torch is imported.

Keys keep the names that users of TRL's GRPOConfig and of the paper's code look for. A default marked "paper" is that of
AMIR-GRPO (arXiv 2601.03661) or its released code.
"""

import difflib
import re
from collections.abc import Iterable, Iterator
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

# Objectives of amir_kernels, and whether each clips the ratio by epsilon / epsilon_high.
LOSS_TYPES = {
    "grpo": True,
    "bnpo": True,
    "dr_grpo": True,
    "dapo": True,
    "gspo": True,
    "gspo_token": True,
    "luspo": True,
    "gmpo": True,
    "cispo": True,
    "sapo": False,
    "vespo": False,
    "gpg": False,
    "reinforce": False,
}


class ConfigError(ValueError):
    """A run that cannot be: names the key, the value, what was expected and, for an unknown key, the nearest one."""


class Settings(BaseModel):
    """Base of all settings: unknown keys and wrong types are refused (YAML reads 2e-4 as text: that is a number)."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, validate_default=True)


def _not_bool(value: object) -> object:
    if value is True or value is False:
        raise ValueError("expected a number")
    return value


Number = Annotated[float, BeforeValidator(_not_bool), Field(strict=False, allow_inf_nan=False)]
Positive = Annotated[Number, Field(gt=0)]
NonNegative = Annotated[Number, Field(ge=0)]
Fraction = Annotated[Number, Field(ge=0, lt=1)]
Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
Text = Annotated[str, Field(min_length=1)]


class LoraSettings(Settings):
    """LoRA adapter, PEFT's meaning of each name; no dropout, which would score another policy than was sampled."""

    r: Count = 16  # paper
    alpha: Positive = 16  # paper
    target_modules: str | Annotated[list[str], Field(min_length=1)] = "all-linear"  # names, or a regular expression
    adapter: Text | None = None  # a PEFT folder to go on from, with its own modules; it is then the reference as well


class ArithmeticTask(Settings):
    """Sums of two operands from 0 to `max_operand`; `held_out` is the share of unordered pairs kept for evaluation."""

    name: Literal["arithmetic"]
    max_operand: Annotated[int, Field(ge=4)] = 9
    held_out: Annotated[Number, Field(gt=0, le=0.5)] = 0.3


class Gsm8kTask(Settings):
    """GSM8K questions: a JSONL file with `question` and `answer`, a folder with train.jsonl and test.jsonl, or the hub.

    `path` unset reads openai/gsm8k from the hub; `sample` reads the 50 questions shipped with the package.
    """

    name: Literal["gsm8k"]
    path: str | None = None


class RunConfig(Settings):
    """One training run, fully resolved."""

    # model
    model: str
    lora: LoraSettings | None = LoraSettings()  # null trains every weight
    quantization: Literal["4bit", "8bit"] | None = None  # of the frozen weights: NF4 with double quantization, or int8
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    attn_implementation: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    liger_layers: bool = False  # Liger's kernels for norms, rotary embeddings and MLPs
    chat_template: str | None = None
    system_prompt: str | None = None
    # data
    task: Annotated[ArithmeticTask | Gsm8kTask, Field(discriminator="name")]
    # rollouts
    prompts_per_step: Count = 4  # paper: 32 completions a step
    num_generations: Annotated[int, Field(ge=2)] = 8  # paper
    max_prompt_length: Count = 1024  # paper
    max_completion_length: Count = 1024  # paper
    temperature: Positive = 1.0
    top_p: Number = 1.0
    top_k: int = 0
    # objective
    loss_type: str = "grpo"
    epsilon: NonNegative | None = None
    epsilon_high: NonNegative | None = None
    scale_rewards: Literal["group", "batch", "bernoulli", "none"] = "group"
    beta: NonNegative = 0.0
    entropy_coef: NonNegative = 0.0
    mask_truncated_completions: bool = False
    num_iterations: Count = 1
    # pair term
    lambda_reg: NonNegative = 0.01  # paper
    beta_dpo: Positive = 0.2  # paper
    reward_margin: NonNegative = 0.0  # rewards here are 0 or 1; the paper's 1.5 belongs to its summed shaping rewards
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
    weight_decay: NonNegative = 0.0
    max_grad_norm: Positive = 1.0
    # run
    max_steps: Count = 1000  # paper
    micro_batch_tokens: Count = 8192
    gradient_checkpointing: bool = False  # layers are computed again in the backward instead of kept
    offload_activations: bool = False  # what checkpointing keeps waits in CPU memory
    save_steps: Count = 50
    eval_prompts: CountOrZero = 0
    eval_samples: Count = 4
    eval_steps: CountOrZero = 0
    output_dir: Annotated[str, Field(min_length=1)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None

    @model_validator(mode="after")
    def _combinations(self) -> "RunConfig":
        for refusal in _refusals(self):
            raise ValueError(refusal)
        return self


def _refusals(c: RunConfig) -> Iterator[str]:
    if c.loss_type not in LOSS_TYPES:
        near = _nearest(c.loss_type, LOSS_TYPES)
        yield f"loss_type = {c.loss_type!r}: expected one of {', '.join(LOSS_TYPES)}{near}"
    if c.top_p != 1.0 or c.top_k != 0:
        key, value = ("top_p", c.top_p) if c.top_p != 1.0 else ("top_k", c.top_k)
        yield (
            f"{key} = {value!r}: expected top_p = 1.0 and top_k = 0, since a filter samples from another support than "
            "the one the log-probabilities are computed on"
        )
    if not LOSS_TYPES.get(c.loss_type, True):
        for key in ("epsilon", "epsilon_high"):
            if getattr(c, key) is not None:
                yield f"{key} = {getattr(c, key)!r}: loss_type {c.loss_type!r} does not clip; leave {key} unset"
    yield from _memory_refusals(c)
    if c.warmup_steps >= c.max_steps:
        yield f"warmup_steps = {c.warmup_steps}: expected fewer than max_steps = {c.max_steps}"
    if c.eval_steps and not c.eval_prompts:
        yield f"eval_steps = {c.eval_steps}: expected eval_prompts > 0 beside it"


def _memory_refusals(c: RunConfig) -> Iterator[str]:
    if c.lora is None and c.quantization is not None:
        yield (
            f"quantization = {c.quantization!r}: quantized weights cannot be trained, only adapters on them; expected "
            "quantization: null for full fine-tuning, or lora beside it"
        )
    if c.lora is None and c.dtype == "float16":
        yield "dtype = 'float16': full fine-tuning in it would need loss scaling; expected 'bfloat16' or 'float32'"
    if c.lora is not None and c.lora.adapter is not None and c.lora.target_modules != "all-linear":
        yield "lora.target_modules: lora.adapter has its own; leave it out"
    if c.offload_activations and not c.gradient_checkpointing:
        yield "offload_activations: it moves what checkpointing keeps; expected gradient_checkpointing: true beside it"
    if c.attn_implementation == "flash_attention_2" and c.dtype == "float32":
        yield "attn_implementation = 'flash_attention_2': computes in 16 bits only; expected dtype 'bfloat16' or 'auto'"
    on_gpu = {
        "attn_implementation = 'flash_attention_2'": c.attn_implementation == "flash_attention_2",
        "liger_layers": c.liger_layers,
        "offload_activations": c.offload_activations,
    }
    for option in (option for option, wanted in on_gpu.items() if wanted and c.device == "cpu"):
        yield f"{option}: is for GPUs only, and device = 'cpu'"


def recipe_names() -> list[str]:
    """Names of the shipped recipes."""
    return sorted(f.name.removesuffix(".yaml") for f in resources.files("amir.recipes").iterdir() if ".yaml" in f.name)


def load_config(run: str, overrides: list[str] | None = None) -> RunConfig:
    """Reads a YAML file or a shipped recipe, applies `key=value` overrides (values are YAML), validates.

    Raises ConfigError with one line for each thing that is wrong.
    """
    fields = _read(run)
    for override in overrides or []:
        _override(fields, override)
    try:
        return RunConfig.model_validate(fields)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(e) for e in error.errors())) from None


def config_yaml(config: RunConfig) -> str:
    """The resolved config as YAML, in the order of its definition; reading it back gives the same config."""
    return yaml.safe_dump(config.model_dump(exclude_unset=False, mode="json"), sort_keys=False)


def _read(run: str) -> dict[str, Any]:
    path = Path(run)
    if run in recipe_names():
        text = (resources.files("amir.recipes") / f"{run}.yaml").read_text()
    elif path.suffix.lower() in (".yaml", ".yml") and path.is_file():
        text = read_utf8(path)
    else:
        near = _nearest(run, recipe_names())
        raise ConfigError(f"run {run!r}: expected a YAML file or one of the recipes {', '.join(recipe_names())}{near}")
    try:
        fields = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{run}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(fields, dict):
        raise ConfigError(f"{run}: expected keys and values, got {type(fields).__name__}")
    return fields


def read_utf8(path: Path) -> str:
    """A file's text, a byte order mark left out; ConfigError where it is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8: {error}") from None


def _override(fields: dict[str, Any], override: str) -> None:
    key, equals, value = override.partition("=")
    if not equals:
        raise ConfigError(f"--set {override!r}: expected key=value")
    *parents, leaf = key.strip().split(".")
    for parent in parents:
        fields = fields.setdefault(parent, {})
        if not isinstance(fields, dict):
            raise ConfigError(f"--set {override!r}: {parent} holds a value, not keys")
    try:
        fields[leaf] = yaml.safe_load(value)
    except yaml.YAMLError:
        raise ConfigError(f"--set {override!r}: the value is not YAML") from None


_UNION_TAG = re.compile(r"arithmetic$|gsm8k$|str$|constrained|list\[")
"""Parts of an error's place that name a member of a union rather than a key."""


def _explain(error: Any) -> str:
    location = [str(part) for part in error["loc"] if not _UNION_TAG.match(str(part))]
    key, value = ".".join(location), error["input"]
    if error["type"] == "extra_forbidden":
        return f"unknown key {key!r} (value {value!r}){_nearest(key, [k for k in _known_keys() if k != key])}"
    if error["type"] == "missing":
        return f"{key}: missing; it has no default"
    if error["type"] == "value_error" and not key:
        return str(error["ctx"]["error"])
    return f"{key} = {value!r}: {error['msg'].replace('Input should be', 'expected').replace('Value error, ', '')}"


def _known_keys() -> list[str]:
    lora = [f"lora.{key}" for key in LoraSettings.model_fields]
    task = [f"task.{key}" for key in ArithmeticTask.model_fields | Gsm8kTask.model_fields]
    return [*RunConfig.model_fields, *lora, *task]


def _nearest(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; nearest: {close[0]!r}" if close else ""

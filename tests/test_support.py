"""Which models are served, and that what is served equals the model's own forward."""

import re
from pathlib import Path

import pytest
import torch
from peft import (
    PEFT_TYPE_TO_CONFIG_MAPPING,
    AdaLoraConfig,
    IA3Config,
    LoHaConfig,
    LoraConfig,
    PeftType,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    TaskType,
    XLoraConfig,
    get_peft_model,
)
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Cohere2Config,
    CohereConfig,
    FalconConfig,
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PhiConfig,
    Qwen2Config,
    Qwen3Config,
)

from amir.policy.load import wrap_policy
from amir.tokens import Tokens
from amir_kernels import linear_logprob, supports
from amir_kernels.support import FAMILIES
from tiny import model, policy, run_config, tokenizer

DOCUMENT = Path(__file__).parents[1] / "docs" / "own-loss.md"
SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GEMMA3 = {"head_dim": 8, "sliding_window": 16, "final_logit_softcapping": 30.0}
EYE = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
GPT2_SIZES = {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2}
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "llama-tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "mistral": MistralConfig(**SIZES),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, head_dim=8),
    "phi": PhiConfig(**SIZES),
    "phi3": Phi3Config(**SIZES),
    "gpt2": GPT2Config(**GPT2_SIZES),
    "gpt_neox": GPTNeoXConfig(**{k: v for k, v in SIZES.items() if k != "num_key_value_heads"}),
    "gemma2": Gemma2Config(**SIZES, head_dim=8),
    "gemma": GemmaConfig(**SIZES, head_dim=8),
    "gemma3-capped": Gemma3TextConfig(**SIZES, **GEMMA3),
    "gemma3-images": Gemma3Config(text_config=SIZES | GEMMA3, vision_config=EYE | {"patch_size": 14}),
    "granite": GraniteConfig(**SIZES, logits_scaling=8.0, embedding_multiplier=12.0),
    "cohere": CohereConfig(**SIZES, logit_scale=0.0625),
    "cohere2": Cohere2Config(**SIZES, head_dim=8, sliding_window=16, logit_scale=0.0625),
}


def scores(made, ids):
    """Log-probs of the next tokens: the model's own, and the op's from its hidden states."""
    found, target = supports(made), ids.roll(-1, dims=1)
    assert found.refusal is None
    own = made(ids).logits.log_softmax(-1).gather(2, target[..., None])[..., 0]
    return own, linear_logprob(found.body(ids).last_hidden_state, found.weight, target, **found.head_arguments)


def lively(name, dtype=torch.float32):
    """A model whose head is scaled up, and has a bias where there is one: a forgotten cap, scale or bias shows."""
    made = AutoModelForCausalLM.from_config(CONFIGS[name]).eval().to(dtype)
    head = made.get_output_embeddings()
    with torch.no_grad():
        head.weight *= 100
        if head.bias is not None:
            head.bias.normal_()
    return made


@pytest.mark.parametrize("name", CONFIGS)
def test_logprobs_from_hidden_states_equal_the_models_own(name: str) -> None:
    ids = torch.randint(3, 97, (2, 9))
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-11)):
        made = lively(name, dtype)
        with torch.no_grad():
            own, ours = scores(made, ids)
        # float32 rounds log-probs of hundreds to 1e-5 of their size, float64 far below it
        assert ((ours - own).abs() <= tolerance * (own.abs() if dtype == torch.float32 else 1)).all()
    found = supports(made)
    assert found.tied == (found.weight is made.get_input_embeddings().weight) == CONFIGS[name].tie_word_embeddings
    assert found.family == CONFIGS[name].model_type


@pytest.mark.parametrize("name", ["phi", "gemma2", "gemma3-capped", "granite", "cohere", "cohere2"])
def test_a_forgotten_cap_scale_or_bias_would_show(name: str) -> None:
    made, ids = lively(name), torch.randint(3, 97, (2, 9))
    found, target = supports(made), ids.roll(-1, dims=1)
    plain = {"bias": None, "softcap": None, "logit_scale": 1.0, "lora": None}
    (option,) = [key for key, value in found.head_arguments.items() if value is not None and value != plain[key]]
    assert option == {"phi": "bias", "gemma2": "softcap", "gemma3-capped": "softcap"}.get(name, "logit_scale")
    with torch.no_grad():
        own, _ = scores(made, ids)
        assert (linear_logprob(found.body(ids).last_hidden_state, found.weight, target) - own).abs().max() > 0.1


def test_every_family_that_is_served_was_tried_and_is_named_in_the_documents() -> None:
    assert {config.model_type for config in CONFIGS.values()} == set(FAMILIES)
    if DOCUMENT.exists():
        (served,) = re.findall(r"^Served model types: (.*?)\.\s", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
        assert set(re.findall(r"`(\w+)`", served)) == set(FAMILIES)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_prompt_computed_once_scores_and_trains_as_if_each_row_had_its_own(name: str) -> None:
    """Prompts of 3 and 20 tokens under a window of 16, completions of 1 to 12."""
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(CONFIGS[name]).eval()
    base.get_output_embeddings().weight.data *= 10
    made = wrap_policy(base, tokenizer(), run_config())
    for parameter in made.trainable().values():
        parameter.data += 0.1 * torch.randn(parameter.shape)
    prompt_mask = torch.arange(20) >= torch.tensor([[17], [0]])
    completion_mask = torch.arange(12) < torch.tensor([12, 1, 7, 12, 5])[:, None]
    prompt_index = torch.tensor([0, 0, 1, 1, 1])
    tokens = Tokens(
        torch.randint(3, 97, (2, 20)), prompt_mask, prompt_index, torch.randint(3, 97, (5, 12)), completion_mask
    )
    upstream = torch.randn(5, 12)

    ours = made.logprobs(tokens)
    ours.backward(upstream)
    reached = [p for name, p in made.trainable().items() if "vision_tower" not in name]
    gradients = [p.grad.clone() for p in reached]
    made.model.zero_grad()

    ids = torch.cat([tokens.prompt_ids[prompt_index], tokens.completion_ids], 1)
    mask = torch.cat([prompt_mask[prompt_index], completion_mask], 1).long()
    logits = base(input_ids=ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits
    scores = logits[:, 19:-1].log_softmax(-1).gather(2, tokens.completion_ids[..., None])[..., 0]
    expected = torch.where(completion_mask, scores, 0)
    expected.backward(upstream)
    assert torch.allclose(ours, expected, atol=1e-5, rtol=1e-5)
    for left, right in zip(gradients, [p.grad for p in reached], strict=True):
        assert (left - right).norm() <= 1e-4 * right.norm()


def test_the_wrapped_policy_is_served() -> None:
    found = policy().support
    assert (found.family, found.refusal, found.tied) == ("llama", None, True)


def adapted(made, **options):
    """The model under PEFT with its adapter's weights moved away from the base model's."""
    wrapped = get_peft_model(made, LoraConfig(task_type=TaskType.CAUSAL_LM, **options))
    with torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn(parameter.shape)
    return wrapped


ADAPTERS = {
    "LoRA on the head": {"r": 3, "target_modules": ["q_proj", "lm_head"]},
    "rsLoRA on the head": {"r": 3, "target_modules": ["lm_head"], "use_rslora": True},
    "a copied head": {"r": 3, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "LoRA on a head and its embeddings": {
        "r": 3,
        "target_modules": ["embed_tokens", "lm_head"],
        "ensure_weight_tying": True,
    },
    "DoRA in the body": {"r": 3, "target_modules": ["q_proj"], "use_dora": True},
    "dropout in the body": {"r": 3, "target_modules": ["q_proj"], "lora_dropout": 0.1},
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ADAPTERS)
def test_what_peft_does_to_the_head_is_served(name: str, tied: bool) -> None:
    """On, off, merged and switched: the op follows, its gradients too."""
    if "embeddings" in name and not tied:
        pytest.skip("tying needs a tied model")
    ids = torch.randint(3, 97, (2, 9))
    base = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, tie_word_embeddings=tied)).double()
    base.get_output_embeddings().weight.data *= 30
    made = adapted(base, **ADAPTERS[name]).double().eval()
    found = supports(made)
    own, ours = scores(made, ids)
    assert (ours - own).abs().max() < 1e-11
    trained = [p for p in made.parameters() if p.requires_grad]
    weights = torch.randn(2, 9, dtype=torch.float64)
    for left, right in zip(*(torch.autograd.grad((weights * x).sum(), trained) for x in (ours, own)), strict=True):
        assert (left - right).norm() <= 1e-10 * right.norm()
        assert right.norm() > 0
    with made.disable_adapter(), torch.no_grad():
        own_off, ours_off = scores(made, ids)
        target = ids.roll(-1, dims=1)
        held = linear_logprob(found.body(ids).last_hidden_state, found.weight, target, **found.head_arguments)
        assert (own_off - own).abs().max() > 1e-3
        assert (ours_off - own_off).abs().max() < 1e-11
        assert torch.equal(held, ours_off)  # what was found before the adapter went off
    if not tied and "copied" not in name:
        made.merge_adapter()
        with torch.no_grad():
            own_merged, ours_merged = scores(made, ids)
        assert (ours_merged - own).abs().max() < 1e-9
        assert (ours_merged - own_merged).abs().max() < 1e-11


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_active_adapter_of_the_head_is_the_one_that_serves() -> None:
    ids = torch.randint(3, 97, (2, 9))
    made = adapted(model().double(), r=3, target_modules=["lm_head"]).eval()
    made.add_adapter("second", LoraConfig(r=2, lora_alpha=7, target_modules=["lm_head"], task_type="CAUSAL_LM"))
    made.double().get_base_model().lm_head.lora_B["second"].weight.data.normal_()
    found = supports(made)
    results = []
    for name in ("default", "second"):
        made.set_adapter(name)
        own, ours = scores(made, ids)
        assert (ours - own).abs().max() < 1e-11
        results.append(ours)
    assert (results[0] - results[1]).abs().max() > 1e-3
    made.base_model.set_adapter(["default", "second"])
    refused(made, "add_weighted_adapter()")
    with pytest.raises(ValueError, match="activate one"):
        _ = found.weight
    made.set_adapter("default")
    made.merge_adapter()
    with made.disable_adapter():
        refused(made, "unmerge_adapter()")


def refused(made: torch.nn.Module, words: str) -> None:
    found = supports(made)
    assert found.refusal is not None
    assert words in found.refusal
    with pytest.raises(ValueError, match="not served"):
        _ = found.weight


class Sharded(torch.nn.Parameter):
    """A weight with the mark of a DTensor."""

    placements = ()


def test_unknown_families_and_strange_heads_are_refused_by_name() -> None:
    falcon = {k: v for k, v in SIZES.items() if k not in ("intermediate_size", "num_key_value_heads")}
    refused(AutoModelForCausalLM.from_config(FalconConfig(**falcon)), "'falcon' (FalconForCausalLM) is not one of")
    refused(torch.nn.Linear(2, 2), "Linear has no config.model_type; pass the causal LM itself")
    refused(torch.nn.Sequential(model()), "without a wrapper around it")

    class Wrapper(torch.nn.Module):
        """As DistributedDataParallel and DeepSpeed's engine hold a model."""

        def __init__(self, module):
            super().__init__()
            self.module = module

    refused(Wrapper(model()), "pass its .module, and call the ops inside a forward that the wrapper runs")
    refused(model().model, "LlamaModel has no output embeddings; pass the causal LM")
    classifier = AutoModelForSequenceClassification.from_config(LlamaConfig(**SIZES))
    refused(classifier, "LlamaForSequenceClassification has no output embeddings")
    nested = model()
    nested.base_model_prefix = "transformer"
    refused(nested, "no body under base_model_prefix")

    for weight, words in (
        (torch.nn.Parameter(torch.empty(0)), "sharded; gather it"),
        (Sharded(torch.empty(101, 32)), "process_group"),
        (torch.nn.Parameter(torch.empty(51, 32)), "51 of 101 rows (tensor parallelism?)"),
    ):
        made = model()
        made.lm_head.weight = weight
        refused(made, words)
    partitioned = model()
    partitioned.lm_head.weight.ds_id = 0  # ZeRO-3's mark
    refused(partitioned, "sharded; gather it")

    quantized = model()
    quantized.lm_head = type("Linear4bit", (torch.nn.Linear,), {})(32, 101, bias=False)
    refused(quantized, "Linear4bit, not a torch.nn.Linear; exclude the head")
    hooked = model()
    hooked.lm_head.register_forward_hook(lambda module, inputs, output: output * 2)
    refused(hooked, "forward hooks, which are skipped when only its weight is used; remove them")
    patched = model()
    plain = patched.lm_head.forward
    patched.lm_head.forward = lambda hidden: plain(hidden) * 2
    refused(patched, "a patched forward, which is skipped when only its weight is used; delete it")
    patched.lm_head._hf_hook = None  # Accelerate's mark: it moves data only
    assert supports(patched).refusal is None


def test_logits_in_the_place_of_hidden_states_are_a_shape_error() -> None:
    made = model()
    body = made.model.forward
    made.model.forward = lambda *args, **kwargs: (
        body(*args, **kwargs) | {"last_hidden_state": made.lm_head(body(*args, **kwargs).last_hidden_state)}
    )
    ids = torch.randint(3, 97, (2, 9))
    found = supports(made)
    with pytest.raises(ValueError, match=r"hidden must be \[\.\.\., H\] with H = 32 as in weight, got \[2, 9, 101\]"):
        linear_logprob(found.body(ids)["last_hidden_state"], found.weight, ids, **found.head_arguments)


LORA = {"r": 2, "task_type": TaskType.CAUSAL_LM}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("adapter", "words"),
    [
        (PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3), "(PROMPT_TUNING) adds virtual tokens"),
        (PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3), "(PREFIX_TUNING) adds virtual tokens"),
        (PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=3), "(P_TUNING) adds virtual tokens"),
        (LoraConfig(**LORA, target_modules=["q_proj"], alora_invocation_tokens=[5]), "activated LoRA"),
        (LoraConfig(**LORA, target_modules=["lm_head"], use_dora=True), "not plain LoRA (DoRA"),
        (AdaLoraConfig(**LORA, target_modules=["lm_head"], total_step=9), "not plain LoRA (DoRA, AdaLoRA"),
        (LoraConfig(**LORA, target_modules=["lm_head"], lora_bias=True), "set lora_bias=False"),
        (LoraConfig(**LORA, target_modules=["lm_head"], lora_dropout=0.1), "set lora_dropout=0"),
        (LoraConfig(**LORA, target_modules=["q_proj"], trainable_token_indices=[4]), "TrainableTokensWrapper"),
        (IA3Config(task_type="CAUSAL_LM", target_modules=["lm_head"], feedforward_modules=[]), "peft.tuners.ia3"),
    ],
)
def test_adapters_that_the_head_op_would_skip_are_refused(adapter, words) -> None:
    refused(get_peft_model(model(), adapter), words)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_dropout_on_the_head_is_served_where_nothing_drops_out() -> None:
    made = adapted(model().double(), r=2, target_modules=["lm_head"], lora_dropout=0.1).double()
    found = supports(made.eval())
    own, ours = scores(made, torch.randint(3, 97, (2, 9)))
    assert (ours - own).abs().max() < 1e-11
    made.train()
    with pytest.raises(ValueError, match="set lora_dropout=0"):
        _ = found.head_arguments


def test_a_disabled_dora_adapter_is_the_base_model() -> None:
    made = model().eval()
    ids = torch.randint(3, 97, (2, 9))
    with torch.no_grad():
        expected = made(ids).logits.clone()
        wrapped = get_peft_model(made, LoraConfig(r=2, target_modules=["q_proj"], use_dora=True, task_type="CAUSAL_LM"))
        for name, parameter in wrapped.named_parameters():
            if "magnitude" in name:
                parameter.mul_(1.5)
        assert not torch.allclose(wrapped(ids).logits, expected, atol=1e-3)
        with wrapped.disable_adapter():
            assert torch.equal(wrapped(ids).logits, expected)


VIRTUAL = {"num_virtual_tokens": 3}
UNPLACED = {  # kinds that are not put on layers by name
    "PROMPT_TUNING": VIRTUAL,
    "MULTITASK_PROMPT_TUNING": VIRTUAL,
    "P_TUNING": VIRTUAL,
    "PREFIX_TUNING": VIRTUAL,
    "CARTRIDGE": VIRTUAL,
    "CPT": {"cpt_token_ids": [3, 4], "cpt_mask": [1, 1], "cpt_tokens_type_mask": [1, 1]},
    "ADAPTION_PROMPT": {"adapter_len": 3, "adapter_layers": 1},
    "SHADOW": {},
    "TRAINABLE_TOKENS": {"token_indices": [3, 4]},
}
PLACED = {  # what a kind needs on layers of 32 x 32 and 32 x 96
    "ADALORA": {"total_step": 9},
    "C3A": {"block_size": 1},
    "GRALORA": {"r": 4, "gralora_k": 1},
    "IA3": {"feedforward_modules": []},
    "MISS": {"r": 4},
    "ROAD": {"group_size": 2},
    "SHIRA": {"r": 2},
    "VBLORA": {"vector_length": 4, "num_vectors": 8},
    "WAVEFT": {"n_frequency": 20},
}
AROUND_THE_BODY = ("POLY", "CARTRIDGE", "CPT", *(kind for kind in UNPLACED if kind.endswith("TUNING")))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("place", ["q_proj", "lm_head"])
@pytest.mark.parametrize("kind", sorted(kind.value for kind in PEFT_TYPE_TO_CONFIG_MAPPING))
def test_every_kind_of_adapter_is_served_or_refused(kind: str, place: str) -> None:
    """In the body served unless it acts around it, on the head refused but for LoRA; never other log-probs."""
    if kind == "XLORA" or (place == "lm_head" and kind in UNPLACED):
        pytest.skip("the kind has a test of its own, or no place")
    options = UNPLACED.get(kind, {"target_modules": [place], **PLACED.get(kind, {})})
    try:
        adapter = PEFT_TYPE_TO_CONFIG_MAPPING[PeftType(kind)](task_type="CAUSAL_LM", **options)
    except ImportError as error:
        pytest.skip(str(error))
    base = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES | {"vocab_size": 96}))
    base.lm_head.weight.data *= 30
    made = get_peft_model(base, adapter).eval()
    if kind in AROUND_THE_BODY or (place == "lm_head" and kind != "LORA"):
        refused(made, "")
        return
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.requires_grad and parameter.dim():
                parameter += 0.1 * torch.randn(parameter.shape)
        own, ours = scores(made, torch.randint(3, 96, (2, 9)))
    assert (ours - own).abs().max() <= 1e-5 * own.abs().max()


@pytest.mark.filterwarnings("ignore")
def test_xlora_and_mixed_adapters_are_refused(tmp_path: Path) -> None:
    adapted(model(), target_modules=["q_proj"]).save_pretrained(tmp_path)
    base = model()
    base.config.use_cache = False
    options = {"hidden_size": 32, "xlora_depth": 1, "adapters": {"0": str(tmp_path)}}
    refused(get_peft_model(base, XLoraConfig(task_type="CAUSAL_LM", **options)), "(XLORA) mixes its experts")

    mixed = get_peft_model(model(), LoraConfig(**LORA, target_modules=["q_proj"]), mixed=True)
    mixed.add_adapter("second", LoHaConfig(task_type="CAUSAL_LM", r=2, target_modules=["k_proj"]))
    mixed.set_adapter(["default", "second"])
    refused(mixed, "(of PEFT's mixed model: .base_model.model)")
    with torch.no_grad():
        own, ours = scores(mixed.base_model.model.eval(), torch.randint(3, 97, (2, 9)))
    assert (ours - own).abs().max() <= 1e-5 * own.abs().max()

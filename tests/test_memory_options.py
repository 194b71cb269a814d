"""What makes a run fit: quantized weights, 8-bit moments, checkpointed layers, smaller micro-batches. Full weights."""

import copy
import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from amir.config import RunConfig
from amir.config_reader import load_config
from amir.errors import ConfigError
from amir.policy import memory
from amir.policy.checkpoint import load_checkpoint, save_checkpoint, save_result
from amir.policy.load import load_policy, wrap_policy
from amir.policy.memory import apply_liger_layers, checkpoint_layers, refuse_unavailable
from amir.policy.policy import Policy
from amir.rollout.generate import sample
from amir.update.batch import make_batch
from amir.update.gradient import make_objective
from amir.update.micro_batches import TokenBudget, micro_batches
from amir.update.optimizer import apply_update, make_optimizer
from tiny import (
    PAD,
    VOCAB,
    backward,
    distance,
    gradients,
    model,
    padded,
    policy,
    run_config,
    sampled_batch,
    tokenizer,
    with_reference,
)

PROMPTS = [list(range(5, 17)), list(range(40, 46)), list(range(60, 80))]
REWARDS = torch.tensor([1.0, 0, 0, 0, 1, 1, 1, 1, 0, 1, 1, 0])  # the second group is dead
sampled = partial(sampled_batch, prompts=PROMPTS, rewards=REWARDS)
WHOLE, THREE_PARTS = 1000, 45
TOLERANCE = 1e-5

QUANTIZED = pytest.mark.parametrize("bits", ["4bit", "8bit"])


def step(made: Policy, config: RunConfig, budget: TokenBudget | None = None) -> tuple[list[Tensor], float]:
    """Gradient and loss of one step on a sampled batch."""
    make_optimizer(config, made.trainable())
    batch = sampled(made, config)
    _, sums = backward(made, batch, make_objective(config), config, budget)
    return gradients(made), float(sums["policy_loss"]) + config.lambda_reg * float(sums["preference_loss"])


def train(made: Policy, config: RunConfig, steps: int, optimizer: Any = None, first: int = 1) -> Any:
    """Some updates on one sampled batch; returns the optimizer."""
    optimizer = optimizer or make_optimizer(config, made.trainable())
    batch = sampled(made, config)
    for number in range(first, first + steps):
        backward(made, batch, make_objective(config), config)
        apply_update(optimizer, config, number)
    return optimizer


# ---- out of memory -------------------------------------------------------------------------------------------------


class NoRoom:
    """Raises like CUDA in the forward or in the middle of the backward of micro-batches above a number of rows."""

    def __init__(self, made: Policy, rows: int, *, forward: bool) -> None:
        self.made, self.rows, self.forward, self.failures = made, rows, forward, 0
        made.logprobs = partial(self.run, made.logprobs)
        made.logprobs_entropy = partial(self.run, made.logprobs_entropy)

    def run(self, forward_pass: Callable[[Any], Any], tokens: Any) -> Any:
        tight = len(tokens) > self.rows
        if tight and (self.forward or not torch.is_grad_enabled()):
            self.fail()
        first_layer = self.made.support.body.layers[0]
        hook = first_layer.register_forward_hook(lambda *call: call[2].register_hook(self.fail) and None)
        if not tight or self.forward:
            hook.remove()
        out = forward_pass(tokens)
        hook.remove()
        return out

    def fail(self, *_: Tensor) -> None:
        self.failures += 1
        if not self.forward and torch.is_grad_enabled():
            raise AssertionError("a hook runs without gradients")
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")


@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("forward", [True, False], ids=["forward", "mid-backward"])
def test_out_of_memory_gives_the_same_gradient_in_smaller_micro_batches(forward: bool, beta: float) -> None:
    config = run_config(micro_batch_tokens=WHOLE, beta=beta)
    expected, value = step(policy(config), config)
    made, messages = policy(config), []
    room = NoRoom(made, 3, forward=forward)
    budget = TokenBudget(WHOLE, packed=made.packed, log=messages.append)
    make_optimizer(config, made.trainable())
    rollout = sample(made, PROMPTS, 4, 9, seed=3)
    batch = with_reference(made, make_batch(rollout, REWARDS[:, None], config, pad_id=PAD), config, budget)
    _, sums = backward(made, batch, make_objective(config), config, budget)
    assert room.failures >= 2
    assert len(messages) == room.failures
    assert all("out of memory in a micro-batch of" in line for line in messages)
    assert str(budget.tokens) in messages[-1]
    assert distance(gradients(made), expected) < TOLERANCE
    assert float(sums["policy_loss"]) + config.lambda_reg * float(sums["preference_loss"]) == pytest.approx(
        value, rel=1e-4, abs=1e-6
    )

    fitted, failures = budget.tokens, room.failures
    assert fitted < WHOLE
    for parameter in made.trainable().values():
        parameter.grad.zero_()
    backward(made, batch, make_objective(config), config, budget)
    assert (budget.tokens, room.failures) == (fitted, failures)
    assert distance(gradients(made), expected) < TOLERANCE


def test_half_a_gradient_that_was_left_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    config = run_config(micro_batch_tokens=WHOLE)
    expected, _ = step(policy(config), config)
    made = policy(config)
    NoRoom(made, 3, forward=False)
    monkeypatch.setattr(Tensor, "zero_", lambda self: self)
    assert distance(step(made, config)[0], expected) > 100 * TOLERANCE


def test_one_completion_that_does_not_fit_is_refused_with_what_to_change() -> None:
    config = run_config(micro_batch_tokens=WHOLE)
    made = policy(config)
    NoRoom(made, 0, forward=True)
    with pytest.raises(ConfigError, match="one completion with its prompt") as refused:
        step(made, config)
    for way_out in (
        "set gradient_checkpointing: true",
        "quantization: 4bit",
        "max_completion_length",
        "CUDA out of memory",
    ):
        assert way_out in str(refused.value)


# ---- checkpointed layers -------------------------------------------------------------------------------------------

SHAPES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "initializer_range": 0.2,
}
FAMILIES = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPES, attention_dropout=0.5)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPES, attention_dropout=0.5)),
    "gemma3": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(**SHAPES, head_dim=8, sliding_window=8, layer_types=["sliding_attention", "full_attention"])
    ),
}


def made_of(family: str, config: RunConfig) -> Policy:
    torch.manual_seed(0)
    made = wrap_policy(FAMILIES[family](), tokenizer(), config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in made.trainable().values():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return made


@pytest.mark.parametrize("offload", [False, True], ids=["kept", "offloaded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_checkpointed_layers_give_the_same_loss_and_gradient(family: str, offload: bool, monkeypatch) -> None:
    config = run_config(micro_batch_tokens=THREE_PARTS)
    expected, value = step(made_of(family, config), config)
    made = made_of(family, config)
    moved: list[tuple[int, ...]] = []
    kept = memory._to_cpu
    # torch 2.11 also keeps an empty tensor of its own for each layer
    monkeypatch.setattr(memory, "_to_cpu", lambda t: (t.numel() and moved.append(tuple(t.shape)), kept(t))[1])
    checkpoint_layers(made.support.body, offload=offload)
    layers = made.support.body.layers
    runs = [0]
    layers[0].mlp.register_forward_pre_hook(lambda *_: runs.__setitem__(0, runs[0] + torch.is_grad_enabled()))
    got, again = step(made, config)
    assert distance(got, expected) < TOLERANCE
    assert again == pytest.approx(value, rel=1e-5)
    batches = len(list(micro_batches((batch := sampled(made, config)).tokens, batch.has_gradient, THREE_PARTS)))
    assert runs[0] == 2 * batches
    assert len(moved) == (batches * len(layers) if offload else 0)
    assert {shape[-1] for shape in moved} <= {32}
    assert not any(m.training for m in made.model.modules() if m not in list(layers))


def test_a_bfloat16_model_has_a_bfloat16_adapter_that_learns_in_float32(tmp_path: Path) -> None:
    config = run_config(dtype="bfloat16", learning_rate=1e-5, micro_batch_tokens=THREE_PARTS)
    made, resumed = (made_of_dtype("qwen2", config, "bfloat16") for _ in range(2))
    assert {p.dtype for p in made.trainable().values()} == {torch.bfloat16}
    first = train(made, config, 3)
    masters = [state["master"] for state in first.state.values()]
    assert {master.dtype for master in masters} == {torch.float32}
    assert all(torch.equal(m.bfloat16(), p) for m, p in zip(masters, made.trainable().values(), strict=True))
    path = save_checkpoint(tmp_path, 3, 9, made.model, first, made.trainable())
    second = make_optimizer(config, resumed.trainable())
    load_checkpoint(path, resumed.model, second, resumed.trainable())
    train(made, config, 1, first, 4)
    train(resumed, config, 1, second, 4)
    assert all(
        torch.equal(a["master"], b["master"]) for a, b in zip(*(o.state.values() for o in (first, second)), strict=True)
    )
    with made.reference():
        made.logprobs(sampled(made, config).tokens)


def test_checkpointed_layers_keep_less_for_the_backward() -> None:
    def kept(*, checkpointed: bool) -> int:
        made = policy(run_config(gradient_checkpointing=checkpointed))
        tokens = padded(sample(made, PROMPTS, 4, 9, seed=3))
        weights = {p.data_ptr() for p in made.model.parameters()}
        held: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            if tensor.data_ptr() not in weights:
                held[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            made.logprobs(tokens)
        return sum(held.values())

    assert kept(checkpointed=True) < kept(checkpointed=False) / 4


# ---- quantized weights ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved Llama of blocks large enough to quantize, and its tokenizer."""
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    shapes = SHAPES | {"hidden_size": 64, "intermediate_size": 128, "initializer_range": 0.1}
    LlamaForCausalLM(LlamaConfig(**shapes, tie_word_embeddings=True)).save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path


def dequantize(layer: Any) -> Tensor:
    """float32 `[out, in]` of a bitsandbytes layer, whose first call moves the scales of 8-bit weights to its state."""
    weight = layer.weight
    if weight.dtype == torch.int8:
        scales = layer.state.SCB if weight.SCB is None else weight.SCB
        return weight.data * (scales / 127)[:, None]
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(weight.data, weight.quant_state)


@QUANTIZED
def test_quantized_weights_score_alike_and_their_adapter_learns(folder: Path, bits: str) -> None:
    pytest.importorskip("bitsandbytes", reason="needs the extra `gpu`")
    config = run_config(model=str(folder), quantization=bits, learning_rate=1e-2, lambda_reg=0.1)
    whole, made = load_policy(run_config(model=str(folder))), load_policy(config)
    dequantized = load_policy(run_config(model=str(folder)))
    for name, module in dequantized.base.named_modules():
        if hasattr(module, "base_layer"):
            module.base_layer.weight.data = dequantize(made.base.get_submodule(name).base_layer)
    tokens = padded(sample(whole, PROMPTS, 4, 9, seed=3))
    with torch.no_grad():
        scores = [p.logprobs(tokens)[tokens.completion_mask] for p in (whole, dequantized, made)]
    assert 0 < (scores[2] - scores[0]).abs().mean() < 0.4 * scores[0].std()
    torch.testing.assert_close(scores[2], scores[1], rtol=1e-4, atol=1e-4)
    for moved in (made, dequantized):
        generator = torch.Generator().manual_seed(1)
        for parameter in moved.trainable().values():
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    assert distance(step(made, config)[0], step(dequantized, config)[0]) < 1e-4

    linear = [m for m in made.base.modules() if hasattr(m, "base_layer")]
    assert all(type(m.base_layer).__name__ in ("Linear4bit", "Linear8bitLt") for m in linear)
    assert len(linear) == 14
    assert made.support.weight.dtype == torch.float32
    assert all(p.dtype == torch.float32 for p in made.trainable().values())

    before = {name: p.clone() for name, p in made.trainable().items()}
    frozen = [p.clone() for p in made.model.parameters() if not p.requires_grad]
    batch = sampled(made, config)
    with torch.no_grad():
        old = made.logprobs(batch.tokens)
    train(made, config, 3)
    assert all(not torch.equal(p, before[name]) for name, p in made.trainable().items())
    assert all(map(torch.equal, frozen, (p for p in made.model.parameters() if not p.requires_grad)))
    with torch.no_grad():
        gain = (made.logprobs(batch.tokens) - old).sum(1)
    assert (gain * batch.advantages).sum() > 0


# ---- 8-bit moments -------------------------------------------------------------------------------------------------


def test_eight_bit_moments_train_alike_and_resume_bit_for_bit(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="needs the extra `gpu`")
    config = run_config(optimizer="adamw_8bit", lora={"r": 128, "alpha": 8}, learning_rate=1e-3, max_steps=9)
    plain = config.model_copy(update={"optimizer": "adamw"})
    whole, made, exact = policy(config), policy(config), policy(plain)
    start = [p.clone() for p in whole.trainable().values()]
    train(exact, plain, 3)
    optimizer = train(whole, config, 5)
    train(made, config, 3, first := make_optimizer(config, made.trainable()))
    moved = [a - b for a, b in zip(made.trainable().values(), start, strict=True)]
    assert distance(moved, [a - b for a, b in zip(exact.trainable().values(), start, strict=True)]) < 0.1
    states = list(first.state.values())
    assert {state["state1"].dtype for state in states} == {torch.uint8, torch.float32}

    path = save_checkpoint(tmp_path, 3, 9, made.model, first, made.trainable())
    resumed = policy(config, moved=False)
    second = make_optimizer(config, resumed.trainable())
    assert load_checkpoint(path, resumed.model, second, resumed.trainable()) == 3
    for left, right in zip(first.state.values(), second.state.values(), strict=True):
        assert left.keys() == right.keys()
        assert all(torch.equal(torch.as_tensor(left[k]), torch.as_tensor(right[k])) for k in left)
    batch = sampled(policy(config), config)
    for made_again, optimizer_again in ((resumed, second), (made, first)):
        for number in (4, 5):
            backward(made_again, batch, make_objective(config), config)
            apply_update(optimizer_again, config, number)
    assert all(map(torch.equal, resumed.trainable().values(), made.trainable().values()))
    assert optimizer.state


# ---- every weight --------------------------------------------------------------------------------------------------

FULL = {"lora": None, "learning_rate": 1e-3, "beta": 0.04, "micro_batch_tokens": THREE_PARTS}


def test_full_fine_tuning_trains_every_weight_against_a_frozen_copy() -> None:
    config = run_config(**FULL)
    made = policy(config, moved=False)
    start = copy.deepcopy(made.base.state_dict())
    tokens = padded(sample(made, PROMPTS, 4, 9, seed=3))
    with torch.no_grad():
        before = made.logprobs(tokens)
    train(made, config, 2)
    assert set(made.trainable()) == set(dict(made.base.named_parameters()))
    assert all(not torch.equal(p, start[name]) for name, p in made.trainable().items())
    with made.reference():
        assert torch.equal(made.logprobs(tokens), before)
    with torch.no_grad():
        assert (made.logprobs(tokens) - before).abs().max() > 1e-3


def test_full_gradient_is_that_of_full_logits() -> None:
    config = run_config(**(FULL | {"lambda_reg": 0.0, "beta": 0.0, "loss_type": "gpg"}))
    made = policy(config, moved=False)
    got, _ = step(made, config)
    batch = sampled(made, config)
    ids = torch.cat([batch.tokens.prompt_ids[batch.tokens.prompt_index], batch.tokens.completion_ids], 1)
    mask = torch.cat([batch.tokens.prompt_mask[batch.tokens.prompt_index], batch.tokens.completion_mask], 1).long()
    made.base.zero_grad()
    logits = made.base(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits
    scores = logits[:, len(PROMPTS[2]) - 1 : -1].log_softmax(-1).gather(2, batch.tokens.completion_ids[..., None])
    weights = batch.advantages[:, None] * batch.loss_mask
    (-(scores[..., 0] * weights).sum() / batch.loss_mask.sum()).backward()
    assert distance(got, gradients(made)) < 1e-4


@pytest.mark.parametrize(
    ("changes", "copies"),
    [
        ({"beta": 0.0, "lambda_reg": 0.0}, False),
        ({"beta": 0.0, "ref_free": True}, False),
        ({"beta": 0.0}, True),
        ({"lambda_reg": 0.0, "beta": 0.1}, True),
    ],
    ids=str,
)
def test_a_copy_is_made_only_where_a_loss_needs_it(changes: dict[str, object], copies: bool) -> None:
    made = policy(run_config(lora=None, **changes), moved=False)
    assert (made.frozen is not None) == copies
    if not copies:
        words = r"no reference model, because it was loaded with beta = 0 .*; load it with beta > 0"
        with pytest.raises(ValueError, match=words), made.reference():
            pass


def test_sixteen_bit_weights_take_updates_below_their_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("amir.update.optimizer.PORTION", 8)
    config = run_config(**(FULL | {"dtype": "bfloat16", "learning_rate": 1e-5, "beta": 0.0, "lambda_reg": 0.0}))
    named = {name: nn.Parameter(torch.full((8,), 1.0, dtype=torch.bfloat16)) for name in ("w", "v")}
    exact = {name: nn.Parameter(torch.full((8,), 1.0)) for name in named}
    optimizer, other = make_optimizer(config, named), make_optimizer(config, exact)
    for number in range(1, 301):
        for parameter in (*named.values(), *exact.values()):
            parameter.grad.copy_(torch.linspace(0.01, 0.09, 8))
        apply_update(optimizer, config, number)
        apply_update(other, config, number)
    assert named["w"].dtype == torch.bfloat16
    assert (named["w"] < 1).all(), "300 updates of 1e-5, each below half a bfloat16 ulp"
    for name, parameter in named.items():
        torch.testing.assert_close(optimizer.state[parameter]["master"], exact[name].data, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_full_weights_are_saved_resumed_and_loaded_by_transformers(tmp_path: Path, family: str, dtype: str) -> None:
    config = run_config(**(FULL | {"beta": 0.0}))
    made, resumed = (made_of_dtype(family, config, dtype) for _ in range(2))
    first = train(made, config, 2)
    path = save_checkpoint(tmp_path, 2, 6, made.model, first, made.trainable())
    assert {"model.safetensors", "config.json", "optimizer.safetensors", "state.json"} <= {
        p.name for p in path.iterdir()
    }
    second = make_optimizer(config, resumed.trainable())
    load_checkpoint(path, resumed.model, second, resumed.trainable())
    assert all(map(torch.equal, made.trainable().values(), resumed.trainable().values()))
    train(made, config, 2, first, 3)
    train(resumed, config, 2, second, 3)
    assert all(map(torch.equal, made.trainable().values(), resumed.trainable().values()))

    save_result(tmp_path / "model", made.model, made.tokenizer)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=getattr(torch, dtype)).eval()
    ids = torch.randint(3, 97, (2, 9))
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=ids).logits, made.base(input_ids=ids).logits)
    assert load_policy(run_config(model=str(tmp_path / "model"), dtype=dtype)).eos_ids == made.eos_ids


def made_of_dtype(family: str, config: RunConfig, dtype: str) -> Policy:
    torch.manual_seed(0)
    base = FAMILIES[family]()
    for parameter in base.parameters():
        parameter.data = parameter.data.to(getattr(torch, dtype))
    return wrap_policy(base, tokenizer(), config)


# ---- going on from an adapter --------------------------------------------------------------------------------------


def test_going_on_from_an_adapter_keeps_it_as_the_reference(tmp_path: Path) -> None:
    config = run_config(lora={"r": 4, "alpha": 8})
    earlier = policy(config)
    save_result(tmp_path / "adapter", earlier.model, earlier.tokenizer)
    again = run_config(lora={"r": 4, "alpha": 8, "adapter": str(tmp_path / "adapter")}, beta=0.1)
    made = wrap_policy(model(), tokenizer(), again)
    tokens = padded(sample(made, PROMPTS, 4, 9, seed=3))
    with torch.no_grad():
        before = earlier.logprobs(tokens)
        assert torch.equal(made.logprobs(tokens), before)
        with made.model.disable_adapter():
            assert not torch.equal(made.logprobs(tokens), before)
    names = set(made.trainable())
    optimizer = train(made, again, 2)
    assert set(made.trainable()) == names == set(earlier.trainable())
    with torch.no_grad():
        assert not torch.equal(made.logprobs(tokens), before)
    with made.reference():
        assert torch.equal(made.logprobs(tokens), before)

    path = save_checkpoint(tmp_path, 2, 6, made.model, optimizer, made.trainable())
    assert not [name for name in load_file(path / "adapter_model.safetensors") if "ref" in name.split(".")]
    assert not (path / "ref").exists()
    resumed = wrap_policy(model(), tokenizer(), again)
    load_checkpoint(path, resumed.model, make_optimizer(again, resumed.trainable()), resumed.trainable())
    with torch.no_grad():
        assert torch.equal(resumed.logprobs(tokens), made.logprobs(tokens))
    with resumed.reference():
        assert torch.equal(resumed.logprobs(tokens), before)
    PeftModel.from_pretrained(model(), path)


def test_an_adapter_of_another_shape_or_none_is_refused(tmp_path: Path) -> None:
    earlier = policy(run_config(lora={"r": 4, "alpha": 8}))
    save_result(tmp_path / "adapter", earlier.model, earlier.tokenizer)
    for lora, words in [
        (
            {"r": 8, "alpha": 8, "adapter": str(tmp_path / "adapter")},
            "it has r = 4 and alpha = 8, and the run has lora.r = 8",
        ),
        ({"r": 8, "alpha": 8, "adapter": str(tmp_path / "adapter")}, "lora.r and lora.alpha equal to the adapter's"),
        ({"adapter": str(tmp_path / "nothing")}, "nothing"),
    ]:
        with pytest.raises(ConfigError, match=r"lora\.adapter = '.*expected a folder with a LoRA adapter") as refused:
            wrap_policy(model(), tokenizer(), run_config(lora=lora))
        assert words in str(refused.value)


# ---- refusals ------------------------------------------------------------------------------------------------------

NEEDS_GPU = ["this needs a GPU, and device = 'cpu'", "leave the setting out, or set device: cuda"]
REFUSALS = [
    (
        ["lora=null", "quantization=4bit"],
        ["quantization = '4bit'", "lora = None", "set quantization: null, or train a LoRA"],
    ),
    (["quantization=3bit"], ["quantization", "3bit", "'4bit' or '8bit'"]),
    (["lora=null", "dtype=float16"], ["dtype = 'float16'", "loss scaling", "expected 'bfloat16' or 'float32'"]),
    (["optimizer=sgd"], ["optimizer = 'sgd'", "expected 'adamw' or 'adamw_8bit'"]),
    (["offload_activations=true"], ["offload_activations = True", "set gradient_checkpointing: true"]),
    (["gradient_checkpointing=true", "offload_activations=true", "device=cpu"], ["offload_activations", *NEEDS_GPU]),
    (["liger_layers=true", "device=cpu"], ["liger_layers", *NEEDS_GPU]),
    (["attn_implementation=flash_attention_2", "device=cpu"], ["flash_attention_2", *NEEDS_GPU]),
    (
        ["attn_implementation=flash_attention_2", "dtype=float32"],
        ["dtype = 'float32'", "16-bit", "set dtype: bfloat16"],
    ),
    (
        ["lora.adapter=x", "lora.target_modules=[q_proj]"],
        ["lora.target_modules = ['q_proj']", "leave target_modules out"],
    ),
]


@pytest.mark.parametrize(("overrides", "words"), REFUSALS, ids=[" ".join(r[0]) for r in REFUSALS])
def test_what_cannot_work_is_refused_before_torch_is_loaded(overrides: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config("quickstart", overrides)
    for word in words:
        assert word in str(refused.value)


def test_what_this_machine_lacks_is_refused_before_the_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    flash = run_config(attn_implementation="flash_attention_2")
    offload = run_config(gradient_checkpointing=True, offload_activations=True)
    for config in (flash, run_config(liger_layers=True), offload):
        with pytest.raises(ConfigError, match="this needs a GPU, and the run's device is cpu; leave the setting out"):
            refuse_unavailable(config, cpu)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for config, package in [
        (flash, "flash_attn"),
        (run_config(liger_layers=True), "liger_kernel"),
        (run_config(quantization="4bit"), "bitsandbytes"),
        (run_config(optimizer="adamw_8bit"), "bitsandbytes"),
    ]:
        with pytest.raises(
            ConfigError, match=f"the package {package} is not installed; run pip install .*leave the setting"
        ):
            refuse_unavailable(config, gpu)
    refuse_unavailable(offload, gpu)
    with pytest.raises(ConfigError, match=r"liger_layers: this needs a GPU|liger_layers: the package liger_kernel"):
        load_policy(run_config(model="./nowhere", liger_layers=True))


def test_liger_replaces_layers_and_leaves_the_head_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("liger_kernel", reason="needs the extra `gpu`")
    from transformers.models.llama import modeling_llama

    for name in ("apply_rotary_pos_emb", "LlamaRMSNorm", "LlamaMLP"):
        monkeypatch.setattr(modeling_llama, name, getattr(modeling_llama, name))
    base = model()
    forward = type(base).forward
    apply_liger_layers(base)
    assert "Liger" in base.model.norm.forward.__qualname__
    assert "Liger" in base.model.layers[0].mlp.forward.__qualname__
    assert type(base).forward is forward
    assert "forward" not in vars(base)
    base.config.model_type = "granite_of_tomorrow"
    with pytest.raises(ConfigError, match="not support the model type 'granite_of_tomorrow'; set liger_layers: false"):
        apply_liger_layers(base)


def test_a_model_without_layers_to_checkpoint_is_refused() -> None:
    with pytest.raises(ConfigError, match="Sequential has no layers that can be checkpointed; set it to false"):
        checkpoint_layers(nn.Sequential(nn.Linear(2, 2)), offload=False)


def test_options_ride_through_a_whole_policy() -> None:
    """Checkpointing asked for by the settings reaches a policy that samples and trains."""
    config = run_config(gradient_checkpointing=True, micro_batch_tokens=THREE_PARTS)
    plain = dataclasses.replace(policy(run_config(micro_batch_tokens=THREE_PARTS)))
    made = policy(config)
    assert torch.equal(sampled(made, config).tokens.completion_ids, sampled(plain, config).tokens.completion_ids)
    assert distance(step(made, config)[0], step(plain, config)[0]) < TOLERANCE

"""The packed training pass: log-probs and gradients of rows run one by one; what cannot be packed says so."""

import functools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError, checkpoint
from transformers import (
    AutoModel,
    BloomConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    Lfm2Config,
    LlamaConfig,
    MambaConfig,
    PreTrainedConfig,
    Qwen2Config,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from amir.policy import packed_attention as attention
from amir.policy import packing
from amir.policy.packed_attention import Scores, Segment, Segments
from amir.policy.packing import checkpoint_contexts, hidden_states, select_states, why_unpacked
from amir.tokens import Tokens
from tiny import policy, run_config

WINDOW = 4  # shorter than every prompt but one, and than most completions
SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
}
LAYERS = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": WINDOW}
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "qwen2": Qwen2Config(**SIZES, use_sliding_window=True, **LAYERS),
    "gemma3": Gemma3TextConfig(**SIZES, head_dim=8, **LAYERS),
    "gemma2": Gemma2Config(**SIZES, head_dim=8, attn_logit_softcapping=5.0, **LAYERS),
}


def body_of(config: PreTrainedConfig, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return AutoModel.from_config(config).eval().to(dtype)


def tokens_of(prompts: list[int], prompt_index: list[int], completions: list[int]) -> Tokens:
    """Random ids, those under the masks too: what reads padding shows."""
    p, c = max(prompts), max(completions)
    return Tokens(
        torch.randint(97, (len(prompts), p)),
        torch.arange(p) >= p - torch.tensor(prompts)[:, None],
        torch.tensor(prompt_index),
        torch.randint(97, (len(completions), c)),
        torch.arange(c) < torch.tensor(completions)[:, None],
    )


GROUPS = {
    "two groups": ([9, 3], [0, 0, 0, 1, 1], [12, 1, 7, 5, 6]),
    "groups interleaved": ([5, 1, 8], [2, 0, 1, 0, 2], [4, 9, 1, 2, 8]),
    "one completion": ([6], [0], [5]),
    "one token": ([1], [0, 0], [1, 1]),
}


def row_by_row(body: nn.Module, tokens: Tokens) -> Tensor:
    """Hidden states `[K, H]`, each sequence alone and without any padding."""
    parts = []
    for row, place in enumerate(tokens.prompt_index.tolist()):
        prompt = tokens.prompt_ids[place][tokens.prompt_mask[place]]
        ids = torch.cat([prompt, tokens.completion_ids[row][tokens.completion_mask[row]]])
        parts.append(body(input_ids=ids[None]).last_hidden_state[0, len(prompt) - 1 : -1])
    return torch.cat(parts)


def gradients(body: nn.Module, hidden: Tensor, upstream: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(hidden, list(body.parameters()), upstream, allow_unused=True))


def distance(left: list[Tensor], right: list[Tensor]) -> float:
    """The largest difference of a gradient relative to its size, or to a thousandth of the whole where that is more."""
    pairs = [(a, b) for a, b in zip(left, right, strict=True) if b is not None]
    least = 1e-3 * torch.cat([b.flatten() for _, b in pairs]).norm()
    return max(float((a - b).norm() / b.norm().clamp(min=least)) for a, b in pairs)


def error(body: nn.Module, tokens: Tokens, **how: bool) -> tuple[float, float]:
    """Largest difference of hidden states, and of a parameter's gradient relative to its size."""
    truth = row_by_row(body, tokens)
    ours = hidden_states(body, tokens, **how)
    upstream = torch.randn_like(truth)
    apart = distance(gradients(body, ours, upstream), gradients(body, truth, upstream))
    return float((ours - truth).detach().abs().max()), apart


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "plain rows"])
def test_hidden_states_and_gradients_are_those_of_rows_run_alone(name: str, groups: str, packed: bool) -> None:
    body, tokens = body_of(CONFIGS[name], torch.float64), tokens_of(*GROUPS[groups])
    largest, apart = error(body, tokens, packed=packed)
    # Transformers' rotary embeddings and softmax of capped scores are float32 whatever the model's dtype
    assert largest < 1e-5
    assert apart < 1e-5


@pytest.mark.parametrize("name", CONFIGS)
def test_float32_keeps_the_promised_tolerances(name: str) -> None:
    body, tokens, head = body_of(CONFIGS[name]), tokens_of(*GROUPS["two groups"]), 0.3 * torch.randn(32, 97)

    def logprobs(hidden: Tensor) -> Tensor:
        scores = (hidden @ head).log_softmax(-1)
        return scores.gather(1, tokens.completion_ids[tokens.completion_mask][:, None])[:, 0]

    ours = logprobs(hidden_states(body, tokens, packed=True))
    truth = logprobs(row_by_row(body, tokens))
    upstream = torch.randn_like(truth)
    assert (ours - truth).abs().max() < 1e-5
    assert distance(gradients(body, ours, upstream), gradients(body, truth, upstream)) < 1e-4


def faults() -> Iterator[tuple[str, str, object]]:
    mask, pack, after = Segments.mask, packing.pack, attention._after_prompts
    yield "a window one too long", "mask", lambda row, place, w, like: mask(row, place, w and w + 1, like)
    yield "no window", "mask", lambda row, place, w, like: mask(row, place, None, like)
    yield "a query sees the next key", "mask", lambda *a: mask(*a).roll(1, 1)

    def next_to_each_other(tokens: Tokens) -> packing.Pack:
        row = pack(tokens)
        row.positions.copy_(torch.arange(row.ids.shape[1])[None])
        return row

    def without_prompts(tokens: Tokens) -> packing.Pack:
        row = pack(tokens)
        row.segments.segments[:] = [Segment(s.length, None) for s in row.segments.segments]
        return row

    def one_off(tokens: Tokens) -> packing.Pack:
        row = pack(tokens)
        row.predicts.add_(1).clamp_(max=row.ids.shape[1] - 1)
        return row

    yield "positions of the row", "pack", next_to_each_other
    yield "completions without their prompt", "pack", without_prompts
    yield "the predicted token's own hidden state", "pack", one_off
    yield (
        "prompt without gradient",
        "after",
        lambda x, row: [
            k
            if s.prompt is None
            else torch.cat([k[:, :, : row.lengths[s.prompt]].detach(), k[:, :, row.lengths[s.prompt] :]], 2)
            for k, s in zip(after(x, row), row.segments, strict=True)
        ],
    )


@pytest.mark.parametrize("fault", list(faults()), ids=lambda fault: fault[0])
def test_a_wrong_layout_would_show(fault: tuple[str, str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    _, place, wrong = fault
    owner, name = {
        "mask": (Segments, "mask"),
        "pack": (packing, "pack"),
        "after": (attention, "_after_prompts"),
    }[place]
    monkeypatch.setattr(owner, name, wrong)
    body = body_of(CONFIGS["qwen2"], torch.float64)
    tokens = tokens_of([9, 3], [0, 0, 0, 1, 1], [12, 2, 7, 5, 6])
    assert max(error(body, tokens, packed=True)) > 1e-2


@pytest.mark.parametrize("packed", [True, False])
def test_the_body_computes_the_tokens_that_are_counted(packed: bool) -> None:
    made, tokens = policy(), tokens_of(*GROUPS["two groups"])
    if not packed:
        made.__dict__["why_unpacked"] = "told so"
    seen = []
    made.support.body.embed_tokens.register_forward_pre_hook(lambda _, args: seen.append(args[0].numel()))
    assert made.packed == packed
    seen.clear()
    made.logprobs(tokens)
    assert seen == [tokens.computed(packed=packed)] == [9 + 3 + 11 + 0 + 6 + 4 + 5 if packed else 5 * (9 + 11)]


def test_a_policy_scores_the_same_packed_and_in_plain_rows_with_entropy_and_reference() -> None:
    made, tokens = policy(run_config(temperature=0.7)), tokens_of(*GROUPS["groups interleaved"])

    def scores() -> list[Tensor]:
        with made.reference():
            reference = made.logprobs(tokens)
        return [made.logprobs(tokens), *made.logprobs_entropy(tokens), reference]

    assert made.packed
    ours = scores()
    made.__dict__["why_unpacked"] = "told so"
    plain = scores()
    for left, right in zip(ours, plain, strict=True):
        assert left.shape == tokens.completion_mask.shape
        assert (left[~tokens.completion_mask] == 0).all()
        assert torch.allclose(left, right, atol=1e-5)
    assert not torch.allclose(ours[0], ours[-1], atol=1e-2)


def recomputing(body: nn.Module, **options: object) -> None:
    for layer in body.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.gradient_checkpointing = layer.training = True
            layer._gradient_checkpointing_func = functools.partial(checkpoint, use_reentrant=False, **options)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("name", CONFIGS)
def test_layers_computed_again_in_the_backward_attend_as_before(name: str, packed: bool) -> None:
    tokens = tokens_of(*GROUPS["two groups"])
    body = body_of(CONFIGS[name])
    kept = hidden_states(body, tokens, packed=packed)
    upstream = torch.randn_like(kept)
    truth = gradients(body, kept, upstream)
    recomputing(body, context_fn=checkpoint_contexts(body))
    again = hidden_states(body, tokens, packed=packed)
    assert torch.equal(again, kept)
    assert distance(gradients(body, again, upstream), truth) == 0


def test_layers_computed_again_with_another_attention_are_an_error() -> None:
    body, tokens = body_of(CONFIGS["llama"]), tokens_of(*GROUPS["two groups"])
    recomputing(body)
    hidden = hidden_states(body, tokens, packed=True)
    with pytest.raises(CheckpointError):
        hidden.sum().backward()


def test_the_models_own_attention_is_back_after_the_pass_and_after_a_failure() -> None:
    body, tokens = body_of(CONFIGS["llama"]), tokens_of(*GROUPS["two groups"])
    hidden_states(body, tokens, packed=True)
    assert body.config._attn_implementation == "sdpa"
    with pytest.raises(IndexError):
        hidden_states(body, Tokens(tokens.prompt_ids + 97, *list(vars(tokens).values())[1:]), packed=True)
    assert body.config._attn_implementation == "sdpa"


def flash_attention_in_words(q, k, v, ends_q, ends_k, longest_q, longest_k, how: Scores) -> Tensor:
    """What flash-attn documents of its varlen function: causal to the last key, a window of keys on the left."""
    ends_q, ends_k, out = ends_q.tolist(), ends_k.tolist(), []
    left, right = attention._window(how)
    for place in range(len(ends_q) - 1):
        query, key, value = (
            x[ends[place] : ends[place + 1]].transpose(0, 1) for x, ends in ((q, ends_q), (k, ends_k), (v, ends_k))
        )
        key, value = (x.repeat_interleave(q.shape[1] // x.shape[0], 0) for x in (key, value))
        rows, columns = query.shape[1], key.shape[1]
        assert rows <= longest_q
        assert columns <= longest_k
        aligned = torch.arange(rows)[:, None] + columns - rows
        visible = torch.arange(columns) <= aligned + right
        if left >= 0:
            visible &= torch.arange(columns) >= aligned - left
        scores = query @ key.transpose(1, 2) * how.scaling
        if how.softcap is not None:
            scores = how.softcap * torch.tanh(scores / how.softcap)
        out.append((scores.masked_fill(~visible, float("-inf")).softmax(-1) @ value).transpose(0, 1))
    return torch.cat(out)


@pytest.mark.parametrize("name", CONFIGS)
def test_what_flash_attention_is_given_means_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "varlen_kernel", lambda query, how: flash_attention_in_words)
    body = body_of(CONFIGS[name], torch.float64)
    largest, apart = error(body, tokens_of(*GROUPS["groups interleaved"]), packed=True)
    assert largest < 1e-5
    assert apart < 1e-5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", CONFIGS)
def test_flash_attention_on_a_gpu(name: str) -> None:
    config = CONFIGS[name]
    wide = type(config)(**config.to_dict() | {"head_dim": 32, "hidden_size": 128})
    body = body_of(wide, torch.bfloat16).cuda()
    held = tokens_of(*GROUPS["groups interleaved"])
    tokens = Tokens(*(tensor.cuda() for tensor in vars(held).values()))
    packed, plain = (hidden_states(body, tokens, packed=p).float() for p in (True, False))
    assert (packed - plain).norm() < 0.03 * plain.norm()


def test_only_half_precision_on_cuda_goes_to_flash_attention() -> None:
    how = Scores(1.0, None, None)
    for dtype in (torch.float32, torch.bfloat16):
        assert attention.varlen_kernel(torch.zeros(1, 2, 3, 64, dtype=dtype), how) is None


EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
CONVOLUTIONS = {"layer_types": ["conv", "full_attention", "conv"]}
UNPACKABLE = {
    "sinks": (GptOssConfig(**SIZES, head_dim=8, layer_types=["full_attention"] * 3, **EXPERTS), "s_aux"),
    "alibi": (BloomConfig(vocab_size=97, hidden_size=32, n_layer=3, n_head=4), "attention interface"),
    "state space": (MambaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=3), "attention interface"),
    "convolutions": (Lfm2Config(**SIZES, **CONVOLUTIONS), "layers of type conv"),
}


@pytest.mark.parametrize("name", UNPACKABLE)
def test_a_model_that_cannot_be_packed_says_why_and_its_plain_rows_are_right(name: str) -> None:
    config, words = UNPACKABLE[name]
    body, tokens = body_of(config), tokens_of(*GROUPS["two groups"])
    reason = why_unpacked(body)
    assert reason is not None
    assert words in reason
    with torch.no_grad():
        assert torch.allclose(hidden_states(body, tokens, packed=False), row_by_row(body, tokens), atol=1e-5)


def test_a_model_that_packs_wrongly_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    body = body_of(CONFIGS["qwen2"])
    assert why_unpacked(body) is None
    body.layers[1].self_attn.sliding_window = WINDOW
    assert "layer 1" in why_unpacked(body)

    body = body_of(CONFIGS["llama"])
    body.layers[1].self_attn.is_causal = False
    assert "not causal" in why_unpacked(body)

    body = body_of(CONFIGS["llama"])
    body.layers[2].self_attn.attention_dropout, body.layers[2].self_attn.training = 0.1, True
    assert "dropout" in why_unpacked(body)

    body = body_of(CONFIGS["llama"])
    body.layers[1].self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
    assert "2 of its 3 layers" in why_unpacked(body)

    mask = Segments.mask
    monkeypatch.setattr(Segments, "mask", lambda row, place, window, like: mask(row, place, 2, like))
    assert "differ" in why_unpacked(body_of(CONFIGS["llama"]))


def test_looking_leaves_the_random_state_alone() -> None:
    made = policy()
    state = torch.get_rng_state()
    assert made.packed
    assert torch.equal(torch.get_rng_state(), state)


def test_gradients_that_meet_in_a_prompts_last_token_have_the_same_bits_in_every_run() -> None:
    """On several threads, where indexing adds them in the order in which the threads arrive."""
    threads = torch.get_num_threads()
    states, upstream = torch.randn(3, 64, requires_grad=True), torch.randn(6000, 64)
    places = torch.randint(3, (6000,))

    def distinct(select: Callable[[Tensor, Tensor], Tensor]) -> int:
        gradients = (torch.autograd.grad(select(states, places), states, upstream)[0] for _ in range(100))
        return len({gradient.numpy().tobytes() for gradient in gradients})

    torch.set_num_threads(2)
    try:
        assert distinct(select_states) == 1
        assert distinct(lambda states, places: states[places]) > 1, "the test must see the order of arrival"
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(select_states(states, places), states[places])

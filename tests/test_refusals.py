"""What every public op refuses alike: what is no number, no tensor, on another device, and bounds that are none."""

import math
import re

import pytest
import torch

from amir_kernels import (
    OBJECTIVES,
    Objective,
    amir_loss,
    group_advantage,
    linear_logprob,
    linear_logprob_entropy,
    linear_policy_loss,
    pair_logits,
    pass_at_k_advantage,
    policy_loss,
    preference_loss,
    preference_weights,
    sequence_logprob,
    workspace_of,
)

ROWS, LENGTH, HIDDEN, VOCABULARY = 4, 5, 8, 11
NO_NUMBERS = ["0.1", True, math.nan, math.inf, torch.tensor(2.0, requires_grad=True), [0.1]]
NO_COUNTS = ["3", True, 2.5, 0, torch.tensor(3)]


def head():
    return {
        "hidden": torch.randn(ROWS, LENGTH, HIDDEN),
        "weight": torch.randn(VOCABULARY, HIDDEN),
        "target": torch.randint(VOCABULARY, (ROWS, LENGTH)),
        "bias": torch.randn(VOCABULARY),
        "temperature": torch.rand(ROWS, LENGTH) + 0.5,
        "lora": (torch.randn(2, HIDDEN), torch.randn(VOCABULARY, 2), 0.5),
    }


def policy():
    return {
        "logprobs": -torch.rand(ROWS, LENGTH),
        "old_logprobs": -torch.rand(ROWS, LENGTH),
        "advantages": torch.randn(ROWS),
        "mask": torch.ones(ROWS, LENGTH),
        "ref_logprobs": -torch.rand(ROWS, LENGTH),
        "importance_weight": torch.ones(ROWS),
        "entropy": torch.rand(ROWS, LENGTH),
    }


def pairs():
    return {
        "scores": torch.randn(ROWS),
        "rewards": torch.arange(4.0),
        "group": torch.tensor([0, 0, 1, 1]),
        "valid": torch.ones(ROWS, dtype=torch.bool),
    }


def amir():
    return policy() | {"rewards": torch.arange(4.0), "group": 2}


def linear_policy():
    tokens = policy()
    del tokens["logprobs"], tokens["entropy"]
    return head() | tokens | {"preference_weights": torch.ones(ROWS)}


def advantage():
    return {"rewards": torch.arange(4.0), "group": torch.tensor([0, 0, 1, 1])}


OPS = {
    linear_logprob: head,
    linear_logprob_entropy: head,
    linear_policy_loss: linear_policy,
    policy_loss: policy,
    amir_loss: amir,
    preference_loss: pairs,
    preference_weights: pairs,
    pair_logits: pairs,
    group_advantage: advantage,
    pass_at_k_advantage: lambda: advantage() | {"rewards": torch.tensor([0.0, 1.0, 1.0, 0.0]), "k": 1},
}
MAIN = ("hidden", "logprobs", "scores")
NUMBERS = [
    *(
        (op, name)
        for op in (linear_logprob, linear_logprob_entropy, linear_policy_loss)
        for name in ("softcap", "logit_scale")
    ),
    *(
        (op, name)
        for op in (preference_loss, preference_weights, pair_logits, amir_loss)
        for name in ("beta_dpo", "reward_margin")
    ),
    (amir_loss, "lambda_reg"),
    (group_advantage, "eps"),
]
COUNTS = [
    (linear_logprob, "workspace_bytes"),
    (linear_policy_loss, "workspace_bytes"),
    (preference_loss, "max_pairs_per_group"),
    (pair_logits, "max_pairs_per_group"),
    (amir_loss, "max_pairs_per_group"),
    (pass_at_k_advantage, "k"),
]


def found(value):
    """How an error shows the value that was passed."""
    return type(value).__name__ if isinstance(value, list | torch.Tensor) else re.escape(repr(value))


def found_no_number(value):
    """How an error shows a value that is no number, and for a tensor the remedy."""
    return found(value) + ("; it would get no gradient: pass a float" if isinstance(value, torch.Tensor) else "")


def named(op_and_name):
    return getattr(op_and_name, "__name__", str(op_and_name))


@pytest.mark.parametrize(("op", "name"), NUMBERS, ids=named)
@pytest.mark.parametrize("value", NO_NUMBERS, ids=str)
def test_a_scalar_is_a_finite_number_and_no_tensor(op, name, value):
    op(**OPS[op]() | {name: 0.5})
    with pytest.raises((TypeError, ValueError), match=f"^{name} must be a .*, got {found_no_number(value)}"):
        op(**OPS[op]() | {name: value})


@pytest.mark.parametrize("op", [linear_logprob, linear_policy_loss], ids=named)
@pytest.mark.parametrize("value", ["0.1", True, math.nan, None], ids=str)
def test_a_temperature_and_a_lora_scaling_are_numbers_too(op, value):
    with pytest.raises((TypeError, ValueError), match=rf"^temperature must be a finite number, got {found(value)}"):
        op(**OPS[op]() | {"temperature": value})
    with pytest.raises((TypeError, ValueError), match=rf"^lora scaling must be a finite number, got {found(value)}"):
        op(**OPS[op]() | {"lora": (*head()["lora"][:2], value)})


@pytest.mark.parametrize("op", [linear_logprob, linear_policy_loss], ids=named)
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf], ids=str)
def test_temperatures_of_tokens_follow_the_rule_of_a_number(op, value):
    given = OPS[op]()
    given["temperature"][1, 2] = value
    with pytest.raises(ValueError, match=r"^temperature must be finite and positive, got .* at position \[1, 2\]"):
        op(**given)
    given["target"][1, 2] = -100
    op(**given)
    with pytest.raises(ValueError, match=r"^temperature must be finite and positive"):
        linear_logprob(torch.ones(3), torch.ones(2, 3), torch.tensor(1), temperature=torch.tensor(value))


def test_what_is_no_flag_no_group_and_no_choice_is_refused():
    with pytest.raises(TypeError, match=r"^entropy_grad must be True or False, got 'false'"):
        linear_logprob_entropy(**head() | {"entropy_grad": "false"})
    for op in (linear_logprob, linear_logprob_entropy, linear_policy_loss):
        with pytest.raises(TypeError, match=r"^process_group must be .*mesh.get_group.* got int"):
            op(**OPS[op]() | {"process_group": -100})  # what torch.distributed gives those outside a group
    with pytest.raises(ValueError, match=r"^normalize must be one of 'mean', 'sum', got 'max'"):
        linear_policy_loss(**linear_policy() | {"preference_weights": None, "normalize": "max"})


@pytest.mark.parametrize(("op", "name"), COUNTS, ids=named)
@pytest.mark.parametrize("value", NO_COUNTS, ids=str)
def test_a_count_is_an_int(op, name, value):
    expected = "at least 1" if value == 0 and value is not True else "an int"
    shown = "float" if value == 2.5 else found(value)
    with pytest.raises((TypeError, ValueError), match=f"^{name} must be {expected}, got {shown}"):
        op(**OPS[op]() | {name: value})


@pytest.mark.parametrize("value", NO_NUMBERS, ids=str)
def test_the_parts_of_an_objective_are_numbers(value):
    for name in ("clip_low", "clip_high", "kl_coef", "mirror_coef", "entropy_coef", "dual_clip"):
        with pytest.raises(
            (TypeError, ValueError), match=f"^{name} must be a finite number.*, got {found_no_number(value)}"
        ):
            Objective(**{name: value})
    with pytest.raises((TypeError, ValueError), match=r"^max_completion_length must be "):
        OBJECTIVES["dr_grpo"].replace(max_completion_length=value)


def test_a_plan_of_the_scratch_takes_what_the_call_takes():
    tensors = {name: head()[name] for name in ("hidden", "weight")}
    for given, message in (
        ({"workspace_bytes": 2.5}, "workspace_bytes must be an int, got float"),
        ({"workspace_bytes": 0}, "workspace_bytes must be at least 1, got 0"),
        ({"lora": head()["lora"][:2]}, "lora must be the three values .*, got 2 values"),
        ({"hidden": [1.0]}, "hidden must be a tensor, got list; torch.as_tensor makes one"),
    ):
        with pytest.raises((TypeError, ValueError), match=f"^{message}"):
            workspace_of(**tensors | given)


DIVISORS = {
    "num_tokens": lambda value: policy_loss(**policy(), objective="dapo", num_tokens=value).loss,
    "num_sequences": lambda value: policy_loss(**policy(), objective="grpo", num_sequences=value).loss,
    "num_pairs": lambda value: preference_loss(**pairs(), num_pairs=value).loss,
    "num_groups": lambda value: preference_loss(**pairs(), reduction="group_mean", num_groups=value).loss,
}


@pytest.mark.parametrize("name", DIVISORS)
def test_a_divisor_follows_one_rule_as_a_number_and_as_a_tensor(name):
    def loss(value):
        torch.manual_seed(0)
        return DIVISORS[name](value)

    for value in (0, 0.5, 1, 3, 7.5):
        assert torch.equal(loss(value), loss(torch.tensor(value))), value
        assert abs(loss(value) * (value or 1) / loss(1) - 1) < 1e-6, value
    for value in (math.nan, -1, math.inf):
        for given in (value, torch.tensor(value)):
            with pytest.raises(ValueError, match=rf"^{name} must be a finite number of at least 0, got {value}"):
                loss(given)
    for value in ("3", True, [3]):
        with pytest.raises(TypeError, match=f"^{name} must be a finite number of at least 0, got {found(value)}"):
            loss(value)


def cases_of_tensors():
    for op, arguments in OPS.items():
        for name, value in arguments().items():
            if isinstance(value, torch.Tensor) or name == "lora":
                yield pytest.param(op, name, id=f"{op.__name__}-{name}")


@pytest.mark.parametrize(("op", "name"), list(cases_of_tensors()))
def test_tensors_elsewhere_are_refused(op, name):
    arguments = OPS[op]()
    if name in (*MAIN, "rewards") and name == next(iter(arguments)):
        others = [key for key, value in arguments.items() if isinstance(value, torch.Tensor) and key != name]
        elsewhere, said = arguments | {key: arguments[key].to("meta") for key in others}, "|".join(others)
    elif name == "lora":
        lora_a, lora_b, scaling = arguments["lora"]
        elsewhere, said = arguments | {"lora": (lora_a, lora_b.to("meta"), scaling)}, "lora B"
    else:
        elsewhere, said = arguments | {name: arguments[name].to("meta")}, name
    with pytest.raises(ValueError, match=f"^({said}) is on meta, .* on cpu; .*: move one of them"):
        op(**elsewhere)


@pytest.mark.parametrize(("op", "name"), list(cases_of_tensors()))
def test_floats_of_8_bits_are_refused(op, name):
    arguments = OPS[op]()
    value = arguments[name]
    if name == "lora":
        arguments[name] = (value[0].to(torch.float8_e5m2), *value[1:])
    elif value.is_floating_point() and name not in ("mask", "rewards"):
        arguments[name] = value.to(torch.float8_e5m2)
    else:
        return
    with pytest.raises(TypeError, match=f"^{name}.* at least 16 bits, got torch.float8_e5m2; convert it first"):
        op(**arguments)


@pytest.mark.parametrize(("op", "name"), list(cases_of_tensors()))
@pytest.mark.parametrize("value", ["text", [1.0, 2.0, 3.0, 4.0], (1.0, 2.0)], ids=str)
def test_what_is_no_tensor_is_refused_by_name(op, name, value):
    with pytest.raises((TypeError, ValueError), match=f"^{name}.* must be "):
        op(**OPS[op]() | {name: value})


def test_preference_weights_are_one_float_per_row():
    for weights in (torch.ones(ROWS, 1), torch.ones(()), torch.ones(ROWS, dtype=torch.int64), 0.5):
        for op in (linear_policy_loss, amir_loss):
            with pytest.raises((TypeError, ValueError), match=r"^preference_weights must "):
                op(**OPS[op]() | {"preference_weights": weights})


BOUNDS = {
    "past the end": [0, 5, 10, 15, 400],
    "first not 0": [2, 5, 10, 15, 20],
    "negative": [-3, 5, 10, 15, 20],
    "decreasing": [0, 10, 5, 15, 20],
}


@pytest.mark.parametrize("bounds", BOUNDS.values(), ids=BOUNDS)
def test_bounds_of_packed_rows_lie_in_the_tokens(bounds):
    logprobs = -torch.rand(20)
    for dtype in (torch.int32, torch.int64):
        cu_seqlens = torch.tensor(bounds, dtype=dtype)
        shown = re.escape(f"got {bounds} for 20 tokens")
        with pytest.raises(ValueError, match=f"^cu_seqlens must start with 0, .*, {shown}"):
            policy_loss(logprobs, logprobs, torch.ones(4), cu_seqlens=cu_seqlens)
        with pytest.raises(ValueError, match=f"^cu_seqlens must start with 0, .*, {shown}"):
            sequence_logprob(logprobs, cu_seqlens=cu_seqlens)


@pytest.mark.parametrize("bounds", [[0, 5, 1000], torch.tensor(5).numpy(), "0,5"], ids=str)
def test_bounds_are_a_tensor(bounds):
    with pytest.raises(TypeError, match=r"^cu_seqlens must be a tensor, got .*; torch.as_tensor makes one"):
        sequence_logprob(-torch.rand(20), cu_seqlens=bounds)


def test_bounds_are_checked_in_one_traced_graph():
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda logprobs, bounds: sequence_logprob(logprobs, cu_seqlens=bounds), backend="aot_eager", fullgraph=True
    )
    logprobs, bounds = -torch.rand(20), torch.tensor([0, 5, 5, 18])
    assert torch.equal(compiled(logprobs, bounds), sequence_logprob(logprobs, cu_seqlens=bounds))
    with pytest.raises(RuntimeError, match="cu_seqlens must start with 0"):
        compiled(logprobs, torch.tensor([0, 5, 5, 400]))

"""Policy losses: known numbers, gradients by formula, masks, layouts, refusals."""

import math
import re
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from amir_kernels import OBJECTIVES, Objective, amir_loss, policy_loss, reference
from token_batches import CLIPS, DR_GRPO, batch, compare, fixture, named, pack

NAN = math.nan
CISPO_RAW = OBJECTIVES["cispo"].replace(clip_bounds="raw", clip_low=0.0, clip_high=5.0)


GOLDEN = {
    "grpo": (OBJECTIVES["grpo"].replace(**CLIPS), 0.027991624),
    "grpo kl": (OBJECTIVES["grpo"].replace(kl_coef=0.04, **CLIPS), 0.028132798),
    "bnpo": (OBJECTIVES["bnpo"].replace(**CLIPS), -0.043807673),
    "bnpo kl": (OBJECTIVES["bnpo"].replace(kl_coef=0.04, **CLIPS), -0.043667337),
    "dapo": (OBJECTIVES["dapo"], -0.043807673),
    "dr_grpo": (DR_GRPO.replace(**CLIPS), -0.026771356),
    "dr_grpo kl": (DR_GRPO.replace(kl_coef=0.04, **CLIPS), -0.026685595),
    "gspo": (OBJECTIVES["gspo"], 0.028663783),
    "gspo_token": (OBJECTIVES["gspo_token"], 0.028663783),
    "gspo .2/.28": (OBJECTIVES["gspo"].replace(**CLIPS), 0.005460555),
    "luspo": (OBJECTIVES["luspo"].replace(**CLIPS), -0.240364896),
    "sapo": (OBJECTIVES["sapo"], -0.034719295),
    "cispo raw 5": (CISPO_RAW, 0.144718918),
    "cispo .8 1.28": (OBJECTIVES["cispo"].replace(**CLIPS), 0.141113760),
    "gpg": (OBJECTIVES["gpg"], 0.146363636),
    "gmpo": (OBJECTIVES["gmpo"].replace(**CLIPS), 0.021747490),
    "vespo": (OBJECTIVES["vespo"], 0.058156914),
    # sum_t -A lp of each row: 1.2 * 3.65, -0.7 * 2.6, -0.5 * 1.9; their mean
    "reinforce": (OBJECTIVES["reinforce"], (4.38 - 1.82 - 0.95) / 3),
}


@pytest.mark.parametrize("name", GOLDEN)
@pytest.mark.parametrize("function", [policy_loss, reference.policy_loss])
def test_golden_fixture(function, name):
    objective, expected = GOLDEN[name]
    for dtype in (torch.float32, torch.float64):
        logprobs, old, ref, advantages, mask = fixture(dtype)
        got = function(logprobs, old, advantages, mask, ref_logprobs=ref, objective=objective)
        assert got.loss.dtype == dtype
        assert abs(got.loss.item() - expected) < 1e-6
        got.loss.backward()
        assert logprobs.grad.isfinite().all()
        assert logprobs.grad[1, 3] == 0


def gradients_by_formula():
    """name: (objective, dL/dlp written out). a is the aggregation's weight of a token."""
    lp, old, ref, advantages, mask = fixture()
    lp, old, ref = (torch.where(mask.bool(), x.detach(), 0) for x in (lp, old, ref))
    mask = mask.double()
    n, rows, total = mask.sum(1, keepdim=True), 3, 11
    A, d, rho = advantages[:, None], ref - lp, torch.exp(lp - old)
    s = torch.exp((lp - old).sum(1, keepdim=True) / n)
    low, high = 0.8, 1.28

    def unclipped(ratio):
        return ~(((A > 0) & (ratio > high)) | ((A < 0) & (ratio < low)))

    sequence_mean, token_mean = mask / (rows * n), mask / total
    tau = torch.tensor([1.0, 1.05, 1.05], dtype=torch.float64)[:, None]
    gate = torch.sigmoid(tau * (rho - 1))
    bent = torch.where(A > 0, (lp - old).clamp(max=0.28), (lp - old).clamp(min=-0.2))
    geometric = torch.exp((bent * mask).sum(1, keepdim=True) / n)
    w = torch.exp((lp - old).sum(1, keepdim=True))
    k, lam = torch.tensor([[[2.0], [3], [3]], [[3.0], [2], [2]]], dtype=torch.float64)
    phi = torch.exp(lam + k * w.log() - lam * w)
    k3 = {"kl_coef": 0.04, **CLIPS}
    return {
        "grpo": (OBJECTIVES["grpo"].replace(**CLIPS), -sequence_mean * unclipped(rho) * rho * A),
        "bnpo k3": (
            OBJECTIVES["bnpo"].replace(**k3),
            -token_mean * (unclipped(rho) * rho * A + 0.04 * (torch.exp(d) - 1)),
        ),
        "bnpo k3 corrected": (
            OBJECTIVES["bnpo"].replace(kl_bias_correction=True, **k3),
            -token_mean * (unclipped(rho) * rho * A - 0.04 * rho * (lp - ref)),
        ),
        "bnpo k2": (
            OBJECTIVES["bnpo"].replace(kl_estimator="k2", **k3),
            -token_mean * (unclipped(rho) * rho * A - 0.04 * (lp - ref)),
        ),
        "bnpo k1": (
            OBJECTIVES["bnpo"].replace(kl_estimator="k1", **k3),
            -token_mean * (unclipped(rho) * rho * A - 0.04),
        ),
        "bnpo mirror": (
            OBJECTIVES["bnpo"].replace(mirror_coef=0.04, **CLIPS),
            -token_mean * (unclipped(rho) * rho * A + 0.04 * (1 / rho - 1)),
        ),
        "bnpo dual": (
            OBJECTIVES["bnpo"].replace(dual_clip=1.5, **CLIPS),
            -token_mean * (unclipped(rho) & ~((A < 0) & (rho > 1.5))) * rho * A,
        ),
        "dr_grpo": (DR_GRPO.replace(**CLIPS), -mask / (rows * 6) * unclipped(rho) * rho * A),
        "gspo": (OBJECTIVES["gspo"].replace(**CLIPS), -sequence_mean * unclipped(s) * s * A),
        "gspo tight": (
            OBJECTIVES["gspo"].replace(clip_high=0.28),
            -sequence_mean * torch.tensor([[1], [1], [0]]) * s * A,
        ),
        "luspo": (OBJECTIVES["luspo"].replace(**CLIPS), -mask / rows * unclipped(s) * s * A),
        "sapo": (OBJECTIVES["sapo"], -sequence_mean * 4 * gate * (1 - gate) * rho * A),
        "cispo": (OBJECTIVES["cispo"].replace(**CLIPS), -token_mean * rho.clamp(low, high) * A),
        "cispo raw": (CISPO_RAW.replace(clip_high=1.4), -token_mean * rho.clamp(max=1.4) * A),
        "gpg": (OBJECTIVES["gpg"], -token_mean * A),
        "vespo": (OBJECTIVES["vespo"], -token_mean * phi * A),
        "gmpo": (OBJECTIVES["gmpo"].replace(**CLIPS), -sequence_mean * (bent == lp - old) * geometric * A),
        "reinforce": (OBJECTIVES["reinforce"], -mask / rows * A),
    }


@pytest.mark.parametrize("name", gradients_by_formula())
@pytest.mark.parametrize("function", [policy_loss, reference.policy_loss])
def test_gradients_by_formula(function, name):
    objective, expected = gradients_by_formula()[name]
    logprobs, old, ref, advantages, mask = fixture()
    loss = function(logprobs, old, advantages, mask, ref_logprobs=ref, objective=objective).loss
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert (gradient - expected).abs().max() < 1e-12


def test_the_fixture_meets_every_clip():
    clips = gradients_by_formula()["grpo"][1] == 0
    assert clips.tolist() == [[False, True, False, False], [False, False, False, True], [False, True, False, False]]
    dual = gradients_by_formula()["bnpo dual"][1] == 0
    assert dual[1, 1]


# ---- against the reference -----------------------------------------------------------------------------------------

VARIANTS = {
    "plain": {},
    "two KLs and entropy": {"kl_coef": 0.1, "mirror_coef": 0.2, "entropy_coef": 0.05},
    "corrected KL": {"kl_coef": 0.1, "mirror_coef": 0.2, "kl_bias_correction": True},
    "k2": {"kl_coef": 0.1, "kl_estimator": "k2"},
    "abs": {"kl_coef": 0.1, "mirror_coef": 0.1, "kl_estimator": "abs"},
    "dual clip": {"dual_clip": 1.4},
}


def objectives():
    """Every named objective in every variant that it allows."""
    for name, (label, parts) in ((n, v) for n in OBJECTIVES for v in VARIANTS.items()):
        objective = named(name)
        if "dual_clip" in parts and objective.surrogate != "clip":
            continue
        if "kl_bias_correction" in parts and objective.ratio_level == "none":
            continue
        yield pytest.param(objective.replace(**parts), id=f"{name}, {label}")


@pytest.mark.parametrize("objective", list(objectives()))
def test_equals_reference(objective):
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        inputs = batch(dtype)
        compare(
            policy_loss(**inputs, objective=objective),
            reference.policy_loss(**inputs, objective=objective),
            inputs,
            tolerance,
        )
        packed, _ = pack(inputs, torch.tensor([7, 3, 4, 0, 7, 5]))
        compare(
            policy_loss(**packed, objective=objective),
            reference.policy_loss(**packed, objective=objective),
            packed,
            tolerance,
        )


@pytest.mark.parametrize("name", [name for name in OBJECTIVES if name != "gmpo"])
def test_advantages_and_weights_per_token(name):
    inputs = batch()
    inputs["advantages"] = torch.where(inputs["mask"], torch.randn(6, 7, dtype=torch.float64), NAN)
    inputs["importance_weight"] = torch.where(inputs["mask"], torch.rand(6, 7, dtype=torch.float64), NAN)
    ours, theirs = (f(**inputs, objective=named(name)) for f in (policy_loss, reference.policy_loss))
    compare(ours, theirs, inputs, 1e-12)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_constant_per_token_is_the_row_value(name):
    inputs = batch()
    whole = policy_loss(**inputs, objective=named(name))
    inputs["importance_weight"] = inputs["importance_weight"][:, None].expand(6, 7)
    if name != "gmpo":
        inputs["advantages"] = inputs["advantages"][:, None].expand(6, 7)
    compare(policy_loss(**inputs, objective=named(name)), whole, inputs, 1e-12)


def test_on_policy_without_old():
    logprobs, _, _, advantages, mask = fixture()
    for name in OBJECTIVES:
        detached = policy_loss(logprobs, logprobs.detach(), advantages, mask, objective=named(name))
        omitted = policy_loss(logprobs, None, advantages, mask, objective=named(name))
        gradients = [torch.autograd.grad(result.loss, logprobs)[0] for result in (detached, omitted)]
        assert detached.loss == omitted.loss
        assert torch.equal(*gradients)


def test_gspo_token_is_gspo_for_one_advantage_per_row():
    for clips in ({}, CLIPS):
        logprobs, old, _, advantages, mask = fixture()
        pair = [
            policy_loss(logprobs, old, advantages, mask, objective=OBJECTIVES[name].replace(**clips)).loss
            for name in ("gspo", "gspo_token")
        ]
        assert abs(pair[0] - pair[1]) < 1e-15
        gradients = [torch.autograd.grad(loss, logprobs)[0] for loss in pair]
        assert (gradients[0] - gradients[1]).abs().max() < 1e-15


@pytest.mark.parametrize("name", ["grpo", "gspo", "gspo_token", "sapo", "gmpo"])
@pytest.mark.parametrize("function", [policy_loss, reference.policy_loss])
def test_the_guard_stops_the_gradient(function, name):
    # a ratio of e^25 with A < 0 is on the side that no clip bounds: the value stays e^20, without a gradient
    logprobs = torch.tensor([[-1.0, -2.0]], dtype=torch.float64, requires_grad=True)
    for shift, live in ((19.0, True), (25.0, False)):
        got = function(logprobs, logprobs.detach() - shift, torch.tensor([-1.0]), objective=name)
        (gradient,) = torch.autograd.grad(got.loss, logprobs)
        ratio = math.exp(min(shift, 20.0))
        assert abs(got.metrics["ratio_sum"] - 2 * ratio) < 1e-6 * ratio
        if name != "sapo":  # its gate is saturated long before
            assert abs(got.loss - ratio) < 1e-6 * ratio
            assert (gradient != 0).all() == live


def test_dual_clip_is_an_upper_bound_on_the_ratio():
    # written as TRL's delta: min(min(rho, delta) A, clip(rho) A)
    log_ratio = torch.linspace(-4, 4, 401, dtype=torch.float64)[None]
    rho, objective = log_ratio.exp(), Objective(dual_clip=3.0, **CLIPS)
    for advantage in (-2.0, -0.3, 0.5, 1.7):
        got = policy_loss(
            log_ratio, torch.zeros_like(log_ratio), log_ratio.new_tensor([advantage]), objective=objective
        )
        bound = torch.minimum(rho.clamp(max=3.0) * advantage, rho.clamp(0.8, 1.28) * advantage)
        assert abs(got.loss + bound.mean()) < 1e-12
        assert got.metrics["dual_clip_count"] == ((rho > 3).sum() if advantage < 0 else 0)


def test_kl_trains_where_the_advantages_are_zero():
    logprobs, old, ref, advantages, mask = fixture()
    loss = policy_loss(
        logprobs, old, advantages * 0, mask, ref_logprobs=ref, objective=OBJECTIVES["dapo"].replace(kl_coef=0.1)
    ).loss
    (gradient,) = torch.autograd.grad(loss, logprobs)
    expected = 0.1 / 11 * (1 - torch.exp(ref - logprobs.detach()))
    assert (gradient - torch.where(mask.bool(), expected, 0)).abs().max() < 1e-15


# ---- masks and degenerate batches ----------------------------------------------------------------------------------


def test_two_by_two_by_hand():
    # token losses 1, 2 / 3, masked: the normalizers side by side (A = -1 and no ratio, so a token's loss is its lp)
    logprobs, mask = torch.tensor([[1.0, 2.0], [3.0, NAN]]), torch.tensor([[1, 1], [1, 0]])
    parts = {"ratio_level": "none", "surrogate": "logprob"}
    for aggregation, expected in (
        ("token_mean", 6 / 3),
        ("sequence_mean_token_mean", (1.5 + 3) / 2),
        ("sequence_mean_token_sum", (3 + 3) / 2),
        ("sequence_mean_token_sum_norm", (3 + 3) / 2 / 4),
    ):
        longest = 4 if aggregation.endswith("norm") else None
        objective = Objective(aggregation=aggregation, max_completion_length=longest, **parts)
        got = policy_loss(logprobs, None, torch.tensor([-1.0, -1.0]), mask, objective=objective)
        assert got.loss == expected, aggregation


@pytest.mark.parametrize("name", OBJECTIVES)
def test_empty_row_counts_in_a_sequence_mean_only(name):
    logprobs, old, _, advantages, mask = fixture()

    def loss(last_row):
        return policy_loss(logprobs, old, advantages, mask * last_row, objective=named(name)).loss

    without = loss(torch.tensor([[1], [1], [0]]))
    two = policy_loss(logprobs[:2], old[:2], advantages[:2], mask[:2], objective=named(name)).loss
    share = 1 if named(name).aggregation == "token_mean" else 2 / 3
    assert abs(without - two * share) < 1e-15


@pytest.mark.parametrize("name", OBJECTIVES)
def test_nothing_to_learn_from(name):
    for shape in ((3, 4), (0, 4), (2, 0)):
        logprobs = torch.full(shape, NAN, requires_grad=True)
        mask = torch.zeros(shape, dtype=torch.bool)
        got = policy_loss(logprobs, torch.full(shape, NAN), torch.full(shape[:1], NAN), mask, objective=named(name))
        got.loss.backward()
        assert got.loss == 0
        assert (logprobs.grad == 0).all()
        assert all(value == 0 for key, value in got.metrics.items() if key != "sequences")


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs"])
def test_extreme_inputs_stay_finite(name, estimator):
    # log-ratios of +-200 overflow exp in float32; a lost token of lp -1e4 on either side
    parts = {"kl_coef": 0.1, "mirror_coef": 0.1, "kl_estimator": estimator}
    level = named(name).ratio_level
    objective = named(name).replace(**parts, kl_bias_correction=level != "none")
    logprobs = torch.tensor([[-1e-3, -200.0, -1e4], [-200.0, -1e-3, 0.0], [-1e4, -1.0, -90.0]], requires_grad=True)
    old = torch.tensor([[-200.0, -1e-3, 0.0], [-1e-3, -200.0, -1e4], [-1e4, -90.0, -1.0]])
    for advantages in ([1.0, -1.0, 0.0], [-1.0, 1.0, 0.0]):
        got = policy_loss(logprobs, old, torch.tensor(advantages), ref_logprobs=old.flip(0), objective=objective)
        (gradient,) = torch.autograd.grad(got.loss, logprobs)
        assert got.loss.isfinite()
        assert gradient.isfinite().all()
        assert all(value.isfinite() for value in got.metrics.values())


def test_half_precision_inputs_are_computed_in_float32():
    logprobs, old, ref, advantages, mask = fixture(torch.bfloat16)
    got = policy_loss(logprobs, old, advantages, mask, ref_logprobs=ref)
    wide = policy_loss(*(x.float() for x in (logprobs, old, advantages)), mask, ref_logprobs=ref.float())
    assert got.loss.dtype == torch.float32
    assert got.loss == wide.loss
    got.loss.backward()
    assert logprobs.grad.dtype == torch.bfloat16


def test_metrics_by_hand():
    logprobs, old, ref, advantages, mask = fixture()
    entropy = torch.where(mask.bool(), 0.5, NAN)
    objective = OBJECTIVES["dapo"].replace(dual_clip=1.5)
    metrics = policy_loss(
        logprobs, old, advantages, mask, ref_logprobs=ref, objective=objective, entropy=entropy
    ).metrics
    kept = mask.bool()
    rho, d = torch.exp(logprobs - old)[kept], (ref - logprobs)[kept]
    expected = {
        "tokens": 11,
        "sequences": 3,
        "ratio_sum": rho.sum(),
        "clip_high_count": 1,  # row 0, e^0.4 with A > 0
        "clip_low_count": 1,  # row 2, e^-0.3 with A < 0
        "dual_clip_count": 1,  # row 1, e^0.5 with A < 0
        "kl_sum": (d.exp() - d - 1).sum(),
        "old_kl_sum": (1 / rho + rho.log() - 1).sum(),
        "entropy_sum": 5.5,
    }
    for name, value in expected.items():
        assert abs(metrics[name] - value) < 1e-12, name
    assert (
        abs(metrics["policy_sum"] - 11 * policy_loss(logprobs, old, advantages, mask, objective=objective).loss) < 1e-12
    )


# ---- what the device sees ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OBJECTIVES)
def test_compiles_as_one_graph(name):
    objective = named(name).replace(kl_coef=0.1, mirror_coef=0.1, entropy_coef=0.1)
    inputs = batch(torch.float32)
    logprobs = inputs.pop("logprobs")

    def loss(lp):
        return policy_loss(lp, **inputs, objective=objective)

    torch._dynamo.reset()
    got = torch.compile(loss, backend="aot_eager", fullgraph=True)(logprobs)
    compare(got, loss(logprobs), inputs | {"logprobs": logprobs}, 1e-6)


@pytest.mark.parametrize("packed", [False, True])
def test_shapes_do_not_recompile(packed):
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    compiled = torch.compile(lambda **inputs: amir_loss(**inputs, group=2), backend=counter, fullgraph=True)
    for rows, length in ((4, 5), (6, 7), (8, 3), (14, 9), (10, 4), (12, 12)):
        inputs = batch(torch.float32, rows=rows, length=length) | {"rewards": torch.randn(rows)}
        if packed:
            inputs, _ = pack(inputs, torch.full((rows,), length))
        got, expected = compiled(**inputs), amir_loss(**inputs, group=2)
        assert abs(got.loss - expected.loss) < 1e-6
    assert counter.frame_count <= 3  # the first shape, then any shape


@pytest.mark.parametrize("name", OBJECTIVES)
def test_never_reads_a_value_back(name):
    # on the meta device there are no values: any host sync would raise
    inputs = {key: value.detach().to("meta") for key, value in batch(torch.float32).items()}
    inputs["logprobs"].requires_grad_()
    objective = named(name).replace(kl_coef=0.1, mirror_coef=0.1, entropy_coef=0.1)
    for group in (3, torch.empty(6, dtype=torch.int64, device="meta")):
        rewards = torch.empty(6, device="meta")
        got = amir_loss(**inputs, rewards=rewards, group=group, objective=objective, num_tokens=9)
        got.loss.backward()
        assert got.loss.shape == ()


# ---- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"ratio_level": "word"}, "ratio_level must be one of .*, got 'word'"),
        ({"surrogate": "ppo"}, "surrogate must be one of .*, got 'ppo'"),
        ({"aggregation": "mean"}, "aggregation must be one of .*, got 'mean'"),
        ({"kl_estimator": "k4"}, "kl_estimator must be one of .*, got 'k4'"),
        ({"clip_low": -0.1}, "clip_low must be a finite number of at least 0, got -0.1"),
        ({"clip_high": NAN}, "clip_high must be a finite number of at least 0, got nan"),
        ({"kl_coef": -0.1}, "kl_coef must be a finite number of at least 0, got -0.1"),
        ({"mirror_coef": math.inf}, "mirror_coef must be a finite number of at least 0, got inf"),
        ({"entropy_coef": NAN}, "entropy_coef must be a finite number, got nan"),
        ({"dual_clip": 1.1}, "dual_clip must exceed 1 \\+ clip_high = 1.2, got 1.1"),
        ({"surrogate": "sapo", "dual_clip": 3.0}, "dual_clip=3.0 has no effect on surrogate='sapo'; leave it None"),
        ({"surrogate": "sapo", "clip_low": 0.2}, "clip_low=0.2 has no effect on surrogate='sapo'; leave it None"),
        ({"sapo_tau_pos": 1.0}, "sapo_tau_pos=1.0 has no effect on surrogate='clip'; leave it None"),
        ({"surrogate": "sapo", "sapo_tau_neg": 0.0}, "sapo_tau_neg must be a positive finite number, got 0.0"),
        ({"surrogate": "logprob"}, "defined for ratio_level 'none', got 'token'"),
        ({"surrogate": "clip", "ratio_level": "none"}, "defined for ratio_level 'token' or .*, got 'none'"),
        ({"surrogate": "geometric"}, "defined for ratio_level 'sequence', got 'token'"),
        ({"surrogate": "logprob", "ratio_level": "none", "kl_bias_correction": True}, "set kl_bias_correction=False"),
        ({"clip_bounds": "raw"}, """belongs to surrogate="cispo", got surrogate='clip'; use clip_bounds="relative\""""),
        ({"surrogate": "cispo", "clip_bounds": "raw"}, "must enclose 1, got \\[0.2, 0.2\\]; .*clip_bounds="),
        ({"max_completion_length": 100}, "max_completion_length=100 has no effect on .*; leave it None"),
        (
            {"aggregation": "sequence_mean_token_sum_norm", "max_completion_length": 0},
            "max_completion_length must be at least 1, got 0",
        ),
    ],
)
def test_senseless_objectives_are_refused(parts, message):
    with pytest.raises(ValueError, match=message):
        Objective(**parts)


def test_objective_is_frozen_and_replaceable():
    objective = OBJECTIVES["grpo"].replace(clip_high=0.28)
    assert (objective.clip_low, objective.clip_high, OBJECTIVES["grpo"].clip_high) == (0.2, 0.28, 0.2)
    with pytest.raises(AttributeError):
        objective.clip_high = 0.3
    with pytest.raises(TypeError, match="epsilon"):
        objective.replace(epsilon=0.3)
    for name, entry in OBJECTIVES.items():
        assert entry.kl_coef == entry.mirror_coef == entry.entropy_coef == 0, name
        assert Objective(**{field.name: getattr(entry, field.name) for field in fields(Objective)}) == entry


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"objective": "gpro"}, "objective 'gpro' is unknown; the nearest is 'grpo'"),
        ({"objective": "DAPO"}, "objective 'DAPO' is unknown; the nearest is 'dapo'"),
        ({"objective": 3}, "objective must be a name in OBJECTIVES or an Objective, got int 3"),
        ({"objective": "dr_grpo"}, "max_completion_length, which is None .*; pass OBJECTIVES"),
        (
            {"objective": OBJECTIVES["grpo"].replace(kl_coef=0.1), "ref_logprobs": None},
            "kl_coef=0.1 needs ref_logprobs, got None",
        ),
        (
            {"objective": OBJECTIVES["grpo"].replace(entropy_coef=0.1), "entropy": None},
            "entropy_coef=0.1 needs entropy, got None",
        ),
        ({"objective": "gmpo", "advantages": torch.ones(6, 7)}, "one advantage per row, \\[6\\], got \\[6, 7\\]: "),
        ({"advantages": torch.ones(5)}, "advantages must be one value per row .*, got \\[5\\]"),
        ({"advantages": torch.ones(6, 1)}, "advantages must be one value per row .*, got \\[6, 1\\]"),
        (
            {"advantages": torch.ones(6, dtype=torch.int64)},
            "advantages must be a floating-point tensor, got torch.int64; convert",
        ),
        ({"importance_weight": torch.ones(7)}, "importance_weight must be one value per row .*, got \\[7\\]"),
        ({"old_logprobs": torch.ones(6, 6)}, "old_logprobs must have shape \\[6, 7\\] .*, got \\[6, 6\\]"),
        ({"ref_logprobs": torch.ones(6, 6)}, "ref_logprobs must have shape \\[6, 7\\] .*, got \\[6, 6\\]"),
        ({"entropy": torch.ones(6)}, "entropy must have shape \\[6, 7\\] .*, got \\[6\\]"),
        ({"mask": torch.full((6, 7), 0.5)}, "must hold 0 and 1 only .*importance_weight.*, got 0.5"),
        ({"mask": torch.full((6, 7), 2)}, "a mask of torch.int64 must hold 0 and 1 only .*, got 2"),
        ({"mask": torch.full((6, 7), -1, dtype=torch.int8)}, "must hold 0 and 1 only .*, got -1"),
        ({"mask": torch.ones(6, dtype=torch.bool)}, "mask must have shape \\[6, 7\\] .*, got \\[6\\]"),
        ({"cu_seqlens": torch.tensor([0, 42])}, "packed \\[T\\] with cu_seqlens, got \\[6, 7\\]; padded tokens"),
        ({"num_tokens": NAN}, "num_tokens must be a finite number of at least 0, got nan"),
        ({"num_tokens": torch.tensor(NAN)}, "num_tokens must be a finite number of at least 0, got nan"),
        ({"num_tokens": torch.ones(2)}, "num_tokens must be one number, got a tensor of shape \\[2\\]; pass its sum"),
        ({"num_sequences": -1, "objective": "grpo"}, "num_sequences must be a finite number of at least 0, got -1"),
    ],
)
def test_refusals(change, message):
    with pytest.raises((ValueError, TypeError, RuntimeError), match=message):
        policy_loss(**batch() | {"objective": "dapo"} | change)


DOCUMENT = Path(__file__).parents[1] / "docs" / "objectives.md"


@pytest.mark.skipif(not DOCUMENT.exists(), reason="the sources are not here: a wheel is tested")
def test_the_table_of_objectives_is_the_objectives():
    rows = re.findall(
        r"^\| `(\w+)` \| ([^|\n]+) \|[^|\n]+\| ([^|\n]+) \| ([^|\n]+) \|[^|\n]+\|$", DOCUMENT.read_text(), re.MULTILINE
    )
    assert [name for name, *_ in rows] != []
    assert {name for name, *_ in rows} == set(OBJECTIVES)
    for name, ratio, aggregation, clips in rows:
        objective = OBJECTIVES[name]
        level = "sequence_token" if ratio.startswith("sequence,") else ratio
        assert objective.ratio_level == level, name
        bounds = [float(bound) for bound in clips.split(", ")] if clips != "none" else [None, None]
        assert [objective.clip_low, objective.clip_high] == bounds, name
        starts = {
            "token_mean": "token mean",
            "sequence_mean_token_mean": "mean over rows",
            "sequence_mean_token_sum": "mean over rows of token sums",
            "sequence_mean_token_sum_norm": "sum / (B · max_completion_length)",
        }
        assert aggregation.startswith(starts[objective.aggregation]), name

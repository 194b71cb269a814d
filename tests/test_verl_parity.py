"""Losses and advantages against verl's `core_algos`: its numbers as kept in `verl_numbers.json`, itself if installed.

The numbers were made by running verl's file (`--keep-parity` makes them anew where verl is installed). verl itself is
not imported, since that needs ray.
"""

import hashlib
import importlib.util
import json
import sys
from importlib.metadata import version
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from amir_kernels import OBJECTIVES, Objective, group_advantage, policy_loss
from token_batches import batch

VERL = importlib.util.find_spec("verl")
KEPT = Path(__file__).parent / "verl_numbers.json"


def masked_sum(values, mask, axis=None):
    return torch.where(mask.bool(), values, 0).sum() if axis is None else (values * mask).sum(axis)


class ActorConfig(SimpleNamespace):
    """The settings that the losses read, with verl's defaults; one process."""

    def __init__(self, **settings):
        defaults = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "tau_pos": 1.0, "tau_neg": 1.05}
        super().__init__(global_batch_info={}, **defaults | settings)

    def get(self, name, default):
        return getattr(self, name, default)


@pytest.fixture(scope="module")
def verl():
    """verl's file of losses and advantages; what it imports of verl, which needs ray, is stood in for."""
    if VERL is None:
        pytest.skip("verl is not installed")
    folder = Path(VERL.submodule_search_locations[0])
    before = dict(sys.modules)

    def stand_in(name, **content):
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(content)

    def load(name, path):
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return module

    for name in ("verl", "verl.trainer", "verl.workers"):
        stand_in(name)
    functional = {"masked_sum": masked_sum, "masked_mean": lambda v, m, axis=None: masked_sum(v, m, axis) / m.sum(axis)}
    stand_in("verl.utils.torch_functional", **functional)
    stand_in("verl.utils.device", get_device_name=lambda: "cpu")
    stand_in("verl.utils.import_utils", deprecated=lambda *_: lambda function: function)
    stand_in("verl.trainer.config", AlgoConfig=type("AlgoConfig", (), {}))
    stand_in("verl.workers.config", ActorConfig=ActorConfig)
    stand_in("omegaconf", DictConfig=dict)
    stand_in("verl.utils", torch_functional=sys.modules["verl.utils.torch_functional"])
    groups = load("verl.utils.groupwise", folder / "utils" / "groupwise.py")
    vars(sys.modules["verl.utils"]).update(as_torch_index=groups.as_torch_index, group_mean_std=groups.group_mean_std)
    yield load("verl.trainer.ppo.core_algos", folder / "trainer" / "ppo" / "core_algos.py")
    for name in sys.modules.keys() - before.keys():
        del sys.modules[name]
    sys.modules.update(before)


def clean_batch():
    """`batch` without its empty row, plain zeros where the mask is off: verl multiplies by the mask in places."""
    inputs = {name: value.detach()[[0, 1, 3, 4, 5]] for name, value in batch().items()}
    for name in ("logprobs", "old_logprobs", "ref_logprobs"):
        inputs[name] = torch.where(inputs["mask"], inputs[name], 0)
    inputs["old_logprobs"][0, 0] = inputs["logprobs"][0, 0] - 2.0  # a ratio of 7.4
    inputs["advantages"][0] = -1.0
    inputs["importance_weight"] = torch.rand(5, 7, dtype=torch.float64) + 0.5
    return inputs


def their_loss(verl, inputs, name, *, weighted=False, mode="token-mean", kl=None, **settings):
    mask = inputs["mask"].long()
    loss = verl.get_policy_loss_fn(name)(
        inputs["old_logprobs"],
        inputs["logprobs"],
        inputs["advantages"][:, None].expand(mask.shape),
        mask,
        loss_agg_mode=mode,
        config=ActorConfig(**settings),
        rollout_is_weights=inputs["importance_weight"] if weighted else None,
    )[0]
    if kl is None:
        return loss
    return loss + 0.5 * verl.agg_loss(verl.kl_penalty(inputs["logprobs"], inputs["ref_logprobs"], kl), mask, mode)


def our_loss(inputs, objective, *, weighted=False):
    names = ["logprobs", "old_logprobs", "advantages", "mask"] + ["importance_weight"] * weighted
    names += ["ref_logprobs"] * (objective.kl_coef > 0)
    return policy_loss(**{name: inputs[name] for name in names}, objective=objective).loss


def numbers(loss, inputs):
    """Value and gradient as they are kept."""
    (gradient,) = torch.autograd.grad(loss, inputs["logprobs"])
    return {"loss": loss.item(), "gradient": gradient.tolist()}


def error(ours, theirs):
    gradients = (torch.tensor(found["gradient"], dtype=torch.float64) for found in (ours, theirs))
    a, b = gradients
    return max(abs(ours["loss"] - theirs["loss"]), (a - b).abs().max().item())


# ---- losses --------------------------------------------------------------------------------------------------------

MODES = {
    "token-mean": {"aggregation": "token_mean"},
    "seq-mean-token-mean": {"aggregation": "sequence_mean_token_mean"},
    "seq-mean-token-sum": {"aggregation": "sequence_mean_token_sum"},
    # verl divides by the padded width where no factor is given
    "seq-mean-token-sum-norm": {"aggregation": "sequence_mean_token_sum_norm", "max_completion_length": 7},
}
OTHERS = {
    "gspo": ("gspo_token", "seq-mean-token-mean"),
    "sapo": ("sapo", "seq-mean-token-mean"),
    "gpg": ("gpg", "token-mean"),
    "cispo": ("cispo", "token-mean"),
    "geo_mean": ("gmpo", "token-mean"),
}


def losses():
    """(row, column) of the table: verl's settings, our objective. geo_mean with weights is a difference, below."""
    for weighted, column in ((False, "plain"), (True, "importance weights")):
        for mode, parts in MODES.items():
            theirs = {"name": "vanilla", "mode": mode, "weighted": weighted}
            yield (f"`vanilla`, {mode}", column), theirs, Objective(dual_clip=3.0, **parts)
        for name, (ours, mode) in OTHERS.items():
            if (name, weighted) == ("geo_mean", True):
                continue
            objective = OBJECTIVES[ours]
            clips = {} if objective.clip_low is None else {"clip_low": 0.1, "clip_high": 0.28}
            theirs = {"name": name, "mode": mode, "weighted": weighted, "clip_ratio_low": 0.1, "clip_ratio_high": 0.28}
            yield (f"`{name}`, {mode}", column), theirs, objective.replace(**clips)
    for estimator in ("k1", "k2", "k3", "abs"):
        objective = OBJECTIVES["gpg"].replace(kl_coef=0.5, kl_estimator=estimator)
        yield ("`gpg`, token-mean", f"KL {estimator}"), {"name": "gpg", "kl": estimator}, objective


LOSSES = {"; ".join(case): (case, theirs, objective) for case, theirs, objective in losses()}
ADVANTAGES = {
    "`grpo`": ("grpo", {}, {"eps": 1e-6}),
    "`grpo`, no std": ("grpo", {"norm_adv_by_std_in_grpo": False}, {"scale": "none"}),
    "`rloo`": ("rloo", {}, {"baseline": "leave_one_out", "scale": "none"}),
}
REWARDS, GROUPS = torch.tensor([1.0, 0, 0.5, 1, 0, 0, 0.25]), torch.tensor([4, 4, 1, 4, 1, 4, 1])


def their_advantages(verl, estimator, keywords):
    scores, mask = torch.nn.functional.pad(REWARDS[:, None], (2, 0)), torch.ones(7, 3)
    return verl.get_adv_estimator_fn(estimator)(scores, mask, np.array(GROUPS.tolist()), **keywords)[0][:, 0]


def kept():
    return json.loads(KEPT.read_text())


def kept_batch():
    """The inputs that verl's kept numbers belong to."""
    inputs = {name: torch.tensor(rows, dtype=torch.float64) for name, rows in kept()["inputs"].items()}
    return inputs | {"mask": inputs["mask"].bool(), "logprobs": inputs["logprobs"].requires_grad_()}


def test_the_kept_numbers_are_verls(request, verl):
    """verl run anew gives them; with --keep-parity they are what it gives."""
    file = Path(VERL.submodule_search_locations[0]) / "trainer" / "ppo" / "core_algos.py"
    made = {
        "made by": "pytest tests/test_verl_parity.py --keep-parity",
        "from": f"verl {version('verl')}, verl/trainer/ppo/core_algos.py",
        "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        "torch": torch.__version__,
    }
    if request.config.getoption("--keep-parity"):
        names = ("logprobs", "old_logprobs", "ref_logprobs", "advantages", "mask", "importance_weight")
        made["inputs"] = {name: clean_batch()[name].tolist() for name in names}
        KEPT.write_text(json.dumps(made))
    inputs = kept_batch()
    made["losses"] = {case: numbers(their_loss(verl, inputs, **s), inputs) for case, (_, s, _) in LOSSES.items()}
    made["advantages"] = {case: their_advantages(verl, *a[:2]).tolist() for case, a in ADVANTAGES.items()}
    if request.config.getoption("--keep-parity"):
        KEPT.write_text(json.dumps(made, separators=(",", ":")) + "\n")
    for case, expected in kept()["losses"].items():
        assert error(made["losses"][case], expected) < 1e-12, case
    for case, expected in kept()["advantages"].items():
        assert made["advantages"][case] == pytest.approx(expected, abs=1e-7), case


def peer():
    return " ".join(kept()["from"].split(",")[0].split())


@pytest.mark.parametrize("case", LOSSES)
def test_loss_and_gradient(parity, case):
    (what, option), theirs, objective = LOSSES[case]
    inputs = kept_batch()
    ours = our_loss(inputs, objective, weighted=theirs.get("weighted", False))
    found = error(numbers(ours, inputs), kept()["losses"][case])
    parity(peer(), what, option, found, 1e-8)


def test_the_dual_clip_matters_there():
    inputs = kept_batch()
    bounded, free = (our_loss(inputs, Objective(dual_clip=c, **MODES["token-mean"])) for c in (3.0, None))
    assert error(numbers(bounded, inputs), numbers(free, inputs)) > 1e-3


@pytest.mark.parametrize("case", ADVANTAGES)
def test_advantages(parity, case):
    expected = torch.tensor(kept()["advantages"][case])
    found = (group_advantage(REWARDS, GROUPS, **ADVANTAGES[case][2]) - expected).abs().max().item()
    parity(f"{peer()}, advantages", case, "largest difference", found, 1e-6)


# ---- expected differences ------------------------------------------------------------------------------------------


@pytest.fixture
def inputs():
    return kept_batch()


def test_expected_difference_empty_rows(verl, inputs):
    """verl leaves a row without tokens out of a sequence mean; here, as in TRL, it stays in the divisor."""
    inputs["mask"][1] = False
    theirs = their_loss(verl, inputs, "vanilla", mode="seq-mean-token-mean")
    assert abs(our_loss(inputs, OBJECTIVES["grpo"].replace(dual_clip=3.0)) - theirs * 4 / 5) < 1e-8


def test_expected_difference_geo_mean_weights(verl, inputs):
    """verl weighs a row of geo_mean by its weights' geometric mean; here each token's share has its own weight."""
    theirs = their_loss(verl, inputs, "geo_mean", weighted=True)
    assert abs(our_loss(inputs, OBJECTIVES["gmpo"], weighted=True) - theirs) > 1e-4
    inputs["importance_weight"] = inputs["importance_weight"][:, :1].expand(5, 7)  # one weight a row: no difference
    theirs = their_loss(verl, inputs, "geo_mean", weighted=True)
    assert abs(our_loss(inputs, OBJECTIVES["gmpo"], weighted=True) - theirs) < 1e-8


def test_expected_difference_group_of_one(verl):
    """verl gives a group of one its raw reward as advantage; here it gets 0."""
    theirs = verl.get_adv_estimator_fn("grpo")(torch.tensor([[0.7]]), torch.ones(1, 1), np.array([0]))[0]
    assert abs(theirs.item() - 0.7) < 1e-5
    assert group_advantage(torch.tensor([0.7]), 1, eps=1e-6) == 0


def test_expected_difference_k3_is_bounded(verl):
    """verl bounds k3 at 10, with zero gradient beyond; here only the log-ratio is bounded, at 20."""
    assert verl.kl_penalty(torch.tensor([-5.0]), torch.tensor([0.0]), "k3") == 10
    objective = OBJECTIVES["gpg"].replace(kl_coef=1.0)
    arguments = (torch.tensor([[-5.0]]), None, torch.tensor([0.0]))
    got = policy_loss(*arguments, ref_logprobs=torch.tensor([[0.0]]), objective=objective).loss
    assert abs(got - (torch.tensor(5.0).exp() - 6)) < 1e-4

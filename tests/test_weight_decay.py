"""Weight decay by parameter: that of TRL and Transformers, for every family and kind of training."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Trainer

from amir.update.optimizer import apply_update, make_optimizer, parameter_groups
from test_support import CONFIGS
from tiny import policy, run_config


@pytest.mark.parametrize("name", CONFIGS)
def test_the_parameters_that_decay_are_those_of_transformers_trainer(name: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIGS[name])
    theirs = set(Trainer.get_decay_parameter_names(None, model))
    named = dict(model.named_parameters())
    decay = {p: group["weight_decay"] for group in parameter_groups(named, 0.5) for p in group["params"]}
    assert {name for name, parameter in named.items() if decay[parameter] == 0.5} == theirs & set(named)
    assert len(theirs) < len(named)


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit"])
def test_a_step_without_gradient_shrinks_matrices_only(optimizer: str) -> None:
    if optimizer == "adamw_8bit":
        pytest.importorskip("bitsandbytes")
    config = run_config(lora=None, weight_decay=0.5, learning_rate=0.1, lambda_reg=0.0, optimizer=optimizer)
    made = policy(config, moved=False)
    before = {name: parameter.detach().clone() for name, parameter in made.trainable().items()}
    apply_update(make_optimizer(config, made.trainable()), config, 1)
    for name, parameter in made.trainable().items():
        factor = 1.0 if "norm" in name else 1 - 0.1 * 0.5
        torch.testing.assert_close(parameter.detach(), factor * before[name], msg=name)
    assert made.base.model.norm.weight.eq(1).all()


@pytest.mark.parametrize(("settings", "groups"), [({"weight_decay": 0.1}, 1), ({"weight_decay": 0.0, "lora": None}, 1)])
def test_an_adapter_or_no_decay_makes_one_group_in_the_order_of_the_parameters(settings, groups) -> None:
    config = run_config(**settings)
    made = policy(config)
    optimizer = make_optimizer(config, made.trainable())
    assert len(optimizer.param_groups) == groups
    assert all(map(torch.Tensor.is_set_to, optimizer.param_groups[0]["params"], made.trainable().values()))

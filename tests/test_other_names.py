"""Names from other trainers and shorthands: what an unknown key is called here, and what may be typed for a setting."""

import dataclasses
import re
from pathlib import Path

import pytest
import yaml

from amir.config import RunConfig
from amir.config_reader import AS_TYPED, GROUPS, _known_keys, load_config
from amir.errors import ConfigError
from amir.other_names import OTHER_NAMES, OTHER_VALUES, ROWS

DOCUMENT = Path(__file__).parents[1] / "docs" / "other-names.md"


def refusal(*overrides: str, run: str = "quickstart") -> str:
    with pytest.raises(ConfigError) as refused:
        load_config(run, list(overrides))
    return str(refused.value)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("lr=0.0001", "unknown key 'lr' (value 0.0001); it is called 'learning_rate' here"),
        ("kl_coef=0.1", "unknown key 'kl_coef' (value 0.1); it is called 'beta' here"),
        ("max_new_tokens=9", "it is called 'max_completion_length' here"),
        ("num_train_epochs=1", "; the length of a run is `max_steps`; one epoch is the number of examples divided by"),
        ("per_device_train_batch_size=1", "a step has `prompts_per_step` prompts with `num_generations` completions"),
        ("use_vllm=true", 'start a vLLM server and set `sampler` to {name: server, url: "http://HOST:PORT"}'),
        ("dataset=x", "unknown key 'dataset' (value 'x'); it is called 'task.path' here"),
        ("load_in_4bit=true", "set `quantization: 4bit`"),
        ("lora.lora_alpha=3", "unknown key 'lora.lora_alpha' (value 3); it is called 'lora.alpha' here"),
        ("task.dataset=x", "unknown key 'task.dataset' (value 'x'); it is called 'task.path' here"),
        ("report_to=wandb", "every step is written to metrics.jsonl and TensorBoard"),
        ("resume_from_checkpoint=true", "add --resume to the command"),
        ("actor_rollout_ref.actor.optim.lr=1e-6", "it is called 'learning_rate' here"),
        ("actor_rollout_ref.rollout.n=8", "it is called 'num_generations' here"),
        ("actor_rollout_ref.model.path=x", "it is called 'model' here"),
        ("data.max_prompt_length=9", "unknown key 'data.max_prompt_length' (value 9); expected 'max_prompt_length'"),
        ("optim={lr: 1}", "unknown key 'optim.lr' (value 1); it is called 'learning_rate' here"),
        ("critic.optim.lr=1", "there is no value model"),
        ("critic={optim: {lr: 1}}", "there is no value model"),
    ],
)
def test_a_name_from_elsewhere_is_answered_with_the_one_here(override: str, words: str) -> None:
    assert words in refusal(override)


def test_a_mapping_of_another_trainer_has_a_line_for_each_entry(tmp_path: Path) -> None:
    fields = {"model": "x", "task": "gsm8k", "data": {"train_files": "a", "max_response_length": 9}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(fields))
    lines = refusal(run=str(tmp_path / "run.yaml")).splitlines()
    assert sorted(lines) == sorted(
        [
            "unknown key 'data.train_files' (value 'a'); it is called 'task.path' here",
            "unknown key 'data.max_response_length' (value 9); it is called 'max_completion_length' here",
        ]
    )


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("r=8", "expected 'lora.r'"),
        ("max_operand=9", "expected 'task.max_operand'"),
        ("lora.learning_rate=1", "expected 'learning_rate'"),
        ("cache_tokens=9", "expected 'sampler.cache_tokens'"),
        ("timeout_seconds=9", "expected 'rewards.timeout_seconds' or 'sampler.timeout_seconds'"),
        (
            "task={name: gsm8k, max_operand: 9}",
            "key 'task.max_operand' (value 9); task 'gsm8k' does not have it",
        ),
        ("sampler={name: paged, zebra: 1}", "unknown key 'sampler.zebra' (value 1); sampler has the keys name, cache"),
    ],
)
def test_a_misplaced_key_is_answered_with_its_place(override: str, words: str) -> None:
    assert words in refusal(override)


@pytest.mark.parametrize("key", ["zebra", "qq", "bananas_per_step_of_zebra"])
def test_a_key_that_resembles_none_gets_no_misleading_neighbour(key: str) -> None:
    assert refusal(f"{key}=1") == f"unknown key {key!r} (value 1)"


def test_no_name_here_is_called_a_name_from_elsewhere() -> None:
    known = set(_known_keys())
    assert not known & OTHER_NAMES.keys()
    names = [name for row in ROWS.values() for name in row.split()]
    assert len(names) == len(set(names))
    for here in ROWS:
        named = re.findall("`([^`:]+)", here)[::2] if "`" in here else [here] if " " not in here else []
        assert set(named) - known - {"refuse"} == set(), here
    assert OTHER_VALUES.keys() <= known
    assert AS_TYPED.keys() == GROUPS.keys()


def test_every_setting_of_trls_trainer_is_known() -> None:
    trl = pytest.importorskip("trl")
    theirs = {field.name for field in dataclasses.fields(trl.GRPOConfig)}
    assert len(theirs) > 100
    assert theirs - set(RunConfig.model_fields) - OTHER_NAMES.keys() == set()


@pytest.mark.skipif(not DOCUMENT.exists(), reason="the documents are not here: tests run against a wheel")
def test_the_document_has_every_row() -> None:
    shown = DOCUMENT.read_text()
    for here, names in ROWS.items():
        key = f"`{here}`" if here in _known_keys() else here.replace("|", "\\|")
        assert f"| {', '.join(f'`{name}`' for name in names.split())} | {key} |" in shown


@pytest.mark.parametrize(
    ("override", "key", "resolved"),
    [
        ("task=gsm8k", "task", {"name": "gsm8k", "path": None}),
        ("rewards=[correctness, integer]", "rewards.1.name", "integer"),
        ("rewards=[correctness, integer]", "rewards.0.weight", 1.0),
        ("rewards=correctness", "rewards.0.name", "correctness"),
        ("rewards={name: integer, weight: 2}", "rewards.0.weight", 2.0),
        ("rewards=['mine.py:score']", "rewards.0.function", "mine.py:score"),
        ("lora=true", "lora.r", 16),
        ("lora=false", "lora", None),
        ("sampler=paged", "sampler.name", "paged"),
        ("dynamic_sampling=true", "dynamic_sampling.max_rounds", 4),
        ("dynamic_sampling=false", "dynamic_sampling", None),
        ("scale_rewards=false", "scale_rewards", "none"),
        ("scale_rewards=true", "scale_rewards", "group"),
    ],
)
def test_a_shorthand_is_written_out(override: str, key: str, resolved: object) -> None:
    value: object = load_config("quickstart", [override]).model_dump()
    for part in key.split("."):
        value = value[int(part) if part.isdigit() else part]
    assert value == resolved


@pytest.mark.parametrize(
    ("overrides", "key", "value"),
    [
        (["lora=true", "lora.r=8"], ("lora", "r"), 8),
        (["lora=null", "lora.r=8"], ("lora", "r"), 8),
        (["task=gsm8k", "task.path=sample"], ("task", "path"), "sample"),
        (["sampler=paged", "sampler.cache_tokens=9999"], ("sampler", "cache_tokens"), 9999),
        (["dynamic_sampling.max_rounds=3"], ("dynamic_sampling", "max_rounds"), 3),
        (["rewards.0.weight=2"], ("rewards", 0, "weight"), 2),
        (["rewards=[correctness, integer]", "rewards.1.weight=2"], ("rewards", 1, "weight"), 2),
        (["rewards=[correctness, integer]", "rewards.1=soft_format"], ("rewards", 1, "name"), "soft_format"),
    ],
)
def test_an_override_sets_a_part_of_a_shorthand(
    overrides: list[str], key: tuple[str | int, ...], value: object
) -> None:
    found: object = load_config("quickstart", overrides).model_dump()
    for part in key:
        found = found[part]
    assert found == value


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("lora=16", "lora = 16: expected {r: 16, alpha: 16}, true for the defaults, or null to train every weight"),
        ("lora=[q_proj]", "lora = ['q_proj']: expected {r: 16, alpha: 16}, true"),
        ("task=rows.jsonl", "task.name = 'rows.jsonl': expected one of 'arithmetic', 'gsm8k', 'dataset'; type task: "),
        ("task=gsm8kk", "nearest: 'gsm8k'"),
        ("task={path: rows.jsonl}", "expected gsm8k, {name: arithmetic, max_operand: 9}, or {name: dataset, path: "),
        ("task=3", "task = 3: expected gsm8k, {name"),
        ("rewards=[3]", "rewards.0 = 3: expected the name of a shipped reward, or {function:"),
        ("rewards=[corectness]", "name 'corectness': expected one of correctness, "),
        ("rewards=[mine.py]", "function 'mine.py': expected module:function or file.py:function"),
        ("rewards={correctness: 1.0}", "unknown key 'rewards.0.correctness' (value 1.0); rewards has the keys name, "),
        ("rewards.3.weight=1", "'3' is not a place in a list of 1"),
        ("sampler=vllm", 'type sampler: {name: server, url: "http://HOST:PORT"} with a vLLM server'),
        ("sampler=server", "sampler.url: missing"),
        ("sampler=[paged]", "sampler = ['paged']: expected generate, paged, or {name: server"),
        ("dtype=bf16", "dtype = 'bf16': expected 'auto', 'float32', 'bfloat16' or 'float16'; type dtype: bfloat16"),
        ("dtype=float15", "nearest: 'float16'"),
        ("quantization=nf4", "type quantization: 4bit"),
        ("optimizer=adamw_torch", "type optimizer: adamw"),
        ("loss_type=rloo", "type loss_type: reinforce with `baseline: leave_one_out`"),
        ("device=cuda:0", "type device: cuda"),
    ],
)
def test_other_values_are_answered_with_what_to_type(override: str, words: str) -> None:
    found = refusal(override)
    assert words in found
    assert "instance of" not in found
    assert "dictionary" not in found


def test_a_place_in_a_list_is_counted_from_zero() -> None:
    words = "--set 'rewards.2.weight=1': '2' is not a place in a list of 1; places are counted from 0"
    assert words in refusal("rewards=[correctness]", "rewards.2.weight=1")


def test_a_run_without_steps_needs_an_evaluation() -> None:
    assert load_config("quickstart", ["max_steps=0", "warmup_steps=3"]).max_steps == 0
    assert "max_steps = 0: the run would neither train nor evaluate" in refusal("max_steps=0", "eval_prompts=0")

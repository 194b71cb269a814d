"""Settings: what is refused and in which words; recipes; the resolved config read back."""

import pytest

from amir.config import LOSS_TYPES
from amir.config_reader import config_yaml, load_config, recipe_names
from amir.errors import ConfigError
from amir_kernels import OBJECTIVES

REFUSALS = [
    ("learning_rat=3", ["unknown key 'learning_rat'", "3", "nearest: 'learning_rate'"]),
    ("lora.rank=3", ["unknown key 'lora.rank'", "nearest: 'lora.r'"]),
    ("task.max_operands=3", ["unknown key 'task.max_operands'", "nearest: 'task.max_operand'"]),
    ("learning_rate=abc", ["learning_rate", "'abc'", "expected a valid number"]),
    ("model=3", ["model", "3", "expected a valid string"]),
    ("max_steps=2.5", ["max_steps", "2.5", "integer"]),
    ("ref_free=yes please", ["ref_free", "'yes please'", "expected a valid boolean"]),
    ("learning_rate=.nan", ["learning_rate", "nan", "expected a finite number"]),
    ("learning_rate=true", ["learning_rate", "True", "expected a number"]),
    ("lora.target_modules=[1]", ["lora.target_modules", "= 1", "expected a valid string"]),
    ("output_dir=''", ["output_dir = ''", "at least 1 character"]),
    ("seed=99999999999999999999", ["seed = 99999999999999999999", "expected less than"]),
    ("threads=1000000", ["threads = 1000000", "expected less than or equal to 1024"]),
    ("temperature=0", ["temperature", "0", "greater than 0"]),
    ("num_generations=1", ["num_generations", "1", "greater than or equal to 2"]),
    ("lambda_reg=-1", ["lambda_reg", "-1", "greater than or equal to 0"]),
    ("top_p=0.9", ["top_p", "0.9", "expected top_p = 1.0"]),
    ("top_k=20", ["top_k", "20", "top_k = 0"]),
    ("loss_type=grop", ["loss_type", "'grop'", "expected one of grpo", "nearest: 'grpo'"]),
    ("scale_rewards=std", ["scale_rewards", "'std'", "'group'"]),
    ("warmup_steps=5000", ["warmup_steps = 5000", "expected fewer than max_steps = 26"]),
    ("min_prompt_length=99", ["min_prompt_length = 99", "expected at most max_prompt_length = 48"]),
    ("rewards=[{name: integer, conversational: true}]", ["conversational: true", "integer", "leave it out"]),
    ("rewards=[{name: integer, timeout_seconds: 3}]", ["timeout_seconds = 3", "integer", "leave it out"]),
    ("rewards=[]", ["rewards = []: expected at least 1 item"]),
    ("loss_type=GRPO", ["nearest: 'grpo'"]),
    ("task.name=algebra", ["task", "algebra", "'arithmetic', 'gsm8k'"]),
    ("seed", ["'seed'", "key=value"]),
    ("sampler.name=vllm", ["sampler", "vllm", "'generate', 'paged', 'server'"]),
    ("sampler={name: paged, cache_token: 9}", ["unknown key 'sampler.cache_token'", "nearest: 'sampler.cache_tokens'"]),
    ("sampler={name: paged, cache_tokens: 99}", ["sampler.cache_tokens = 99", "expected at least 576"]),
    ("sampler={name: server}", ["sampler.url: missing", "set it"]),
    (
        "sampler={name: server, url: 'localhost:8000'}",
        ["sampler.url = 'localhost:8000'", "expected an address such as http://"],
    ),
    ("sampler={name: server, url: 'http://a', wait_seconds: -1}", ["sampler.wait_seconds = -1", "expected greater"]),
    ("sampler={name: server, url: 'http://a', dialect: sglang}", ["sampler.dialect", "'vllm' or 'transformers'"]),
    ("correction={}", ["correction", "sampler 'generate'", "leave correction out"]),
    ("correction.max=0.5", ["correction", "max = 0.5", "expected min < 1 < max"]),
    ("correction={mode: mask}", ["correction", "min = 0", "expected min above 0, such as 0.5"]),
    ("correction.levels=token", ["unknown key 'correction.levels'", "nearest: 'correction.level'"]),
    ("dynamic_sampling.max_rounds=1", ["dynamic_sampling.max_rounds = 1", "expected greater than or equal to 2"]),
    ("dynamic_sampling.min_valid_share=0", ["dynamic_sampling.min_valid_share = 0", "expected greater than 0"]),
    ("dynamic_sampling.by=acc", ["dynamic_sampling.by = 'acc'", "expected one of the run's rewards correctness"]),
    ("model.name=x", ["model is a single value and has no keys", "expected model=VALUE"]),
]


@pytest.mark.parametrize(("override", "words"), REFUSALS, ids=[r[0] for r in REFUSALS])
def test_refusal_names_key_value_and_expectation(override: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config("quickstart", [override])
    for word in words:
        assert word in str(refused.value)


def test_every_wrong_key_is_reported_at_once() -> None:
    with pytest.raises(ConfigError) as refused:
        load_config("quickstart", ["learning_rat=3", "max_step=1"])
    assert len(str(refused.value).splitlines()) == 2


def test_clip_bounds_are_refused_where_nothing_is_clipped() -> None:
    with pytest.raises(ConfigError, match=r"epsilon = 0\.2: loss_type 'gpg' does not clip; leave epsilon unset"):
        load_config("quickstart", ["loss_type=gpg", "epsilon=0.2"])


def test_settings_that_need_another_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"eval_steps = 5: eval_prompts is 0; set eval_prompts"):
        load_config("quickstart", ["eval_steps=5", "eval_prompts=0"])
    words = r"combine_rewards = 'normalize_then_sum': .*expected scale_rewards = 'group' .*got 'none' and 'mean'"
    with pytest.raises(ConfigError, match=words):
        load_config("quickstart", ["combine_rewards=normalize_then_sum", "scale_rewards=none"])


def test_what_a_server_cannot_do_is_refused() -> None:
    server = "sampler={name: server, url: 'http://a:8000', dialect: transformers}"
    with pytest.raises(ConfigError, match="`transformers serve` returns no log-probs; leave correction out"):
        load_config("quickstart", [server, "correction={}"])
    with pytest.raises(ConfigError, match=r"sampler\.name = 'server': .* lora = None .*; train a LoRA adapter"):
        load_config("quickstart", [server, "lora=null"])
    assert load_config("quickstart", [server.replace("transformers", "vllm"), "correction={}"]).correction is not None


def test_unknown_run_names_the_nearest_recipe() -> None:
    with pytest.raises(ConfigError, match=r"run 'quickstrat': expected a YAML file .*; nearest: 'quickstart'"):
        load_config("quickstrat")


@pytest.mark.parametrize("text", ["", "- a\n", "a: [", "just words"])
def test_a_file_without_settings_is_refused(tmp_path, text: str) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"run\.yaml: expected (a mapping of settings|YAML)"):
        load_config(str(tmp_path / "run.yaml"))


def test_a_file_that_is_not_utf8_is_refused(tmp_path) -> None:
    (tmp_path / "run.YAML").write_bytes(b"model: \xff")
    with pytest.raises(ConfigError, match=r"run\.YAML: not UTF-8 .*0xff.*; save the file as UTF-8"):
        load_config(str(tmp_path / "run.YAML"))


def test_a_run_extends_another_and_states_what_differs(tmp_path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "base.yaml").write_text("extends: quickstart\nlora: {r: 4, alpha: 8}\nseed: 1\n")
    (tmp_path / "below" / "run.yaml").write_text("extends: ../base.yaml\nseed: 2\n")
    config = load_config(str(tmp_path / "below" / "run.yaml"), ["max_steps=3"])
    expected = load_config("quickstart", ["lora={r: 4, alpha: 8}", "seed=2", "max_steps=3"])
    assert config == expected


@pytest.mark.parametrize(
    ("base", "message"),
    [
        ("quickstrat", r"run\.yaml: extends '.*quickstrat': expected a YAML file or one of the recipes .*quickstart"),
        ("nowhere.yaml", r"run\.yaml: extends '.*nowhere\.yaml': expected a YAML file or one of the recipes"),
        ("run.yaml", r"run\.yaml: it extends itself, by .*run\.yaml -> .*run\.yaml; remove one `extends`"),
        ("[quickstart]", r"extends = \['quickstart'\]: expected the name of a recipe or the path of a YAML file"),
        ("null", r"extends = None: expected the name of a recipe or the path of a YAML file"),
    ],
)
def test_what_cannot_be_extended_is_named(tmp_path, base: str, message: str) -> None:
    (tmp_path / "run.yaml").write_text(f"extends: {base}\n")
    with pytest.raises(ConfigError, match=message):
        load_config(str(tmp_path / "run.yaml"))


def test_a_missing_required_key_is_named(tmp_path) -> None:
    (tmp_path / "run.yaml").write_text("model: x\n")
    with pytest.raises(ConfigError, match="task: missing; it has no default, so set it"):
        load_config(str(tmp_path / "run.yaml"))


@pytest.mark.parametrize("name", recipe_names())
def test_the_resolved_config_reads_back_the_same(tmp_path, name: str) -> None:
    config = load_config(name, ["lambda_reg=0", "learning_rate=2e-4"])
    assert config.learning_rate == 2e-4
    (tmp_path / "run.yaml").write_text(config_yaml(config))
    assert load_config(str(tmp_path / "run.yaml")) == config


def test_the_two_fixed_recipes_are_shipped() -> None:
    assert {"quickstart", "gsm8k-smoke"} <= set(recipe_names())


def test_loss_types_are_the_kernels_objectives_with_their_clip_bounds() -> None:
    assert set(LOSS_TYPES) == set(OBJECTIVES)
    for name, bounds in LOSS_TYPES.items():
        of_kernels = OBJECTIVES[name].clip_low, OBJECTIVES[name].clip_high
        assert bounds == (None if of_kernels == (None, None) else of_kernels), name

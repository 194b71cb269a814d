"""Runs of the tiny model: what is on disk, resuming bit for bit, warnings, refusals, and the command's exit codes."""

import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
)

from amir.config import RunConfig
from amir.config_reader import recipe_names
from amir.doctor import SERVES
from amir.errors import ConfigError
from amir.policy.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from amir.policy.load import wrap_policy
from amir.run.directory import RunDirectory, choose_output_dir
from amir.run.display import NullDisplay, draw_curves
from amir.run.health import WINDOW
from amir.run.metrics import METRICS
from amir.tasks import TASKS, Example
from amir.tasks.prompts import prompt_ids
from amir.trainer import Trainer
from amir.update.optimizer import learning_rate, make_optimizer
from tiny import EOS, PAD, VOCAB, Grader, crash_after, model, policy, run_config, tokenizer

TIMES = {"tokens_per_second", "peak_memory_mb"}


class Lines(NullDisplay):
    """A display that keeps what it was shown."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self.messages: list[str] = []

    def begin(self, finished_steps: int) -> None:
        self.finished_steps = finished_steps

    def step(self, metrics: dict[str, Any]) -> None:
        self.steps.append(metrics)

    def message(self, text: str) -> None:
        self.messages.append(text)


def opened(path: Path, config: RunConfig, *, resume: bool = False) -> RunDirectory:
    directory = RunDirectory(path, config, resume=resume)
    directory.start()
    return directory


def trainer(path: Path, config: RunConfig, *, resume: bool = False) -> Trainer:
    made = Trainer(
        config,
        policy(config, moved=False),
        TASKS[config.task.name](config.task),
        RunDirectory(path, config, resume=resume),
        Lines(),
    )
    if resume:
        made.resume()
    return made


def run(path: Path, config: RunConfig, *, resume: bool = False) -> Trainer:
    made = trainer(path, config, resume=resume)
    made.train()
    made.directory.close()
    return made


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def untimed(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k not in TIMES and not k.endswith("_seconds")} for row in metrics]


class ParityGrader(Grader):
    """Rewards what a random model does half of the time: an even number of characters."""

    def __call__(self, completions: list[str], golds: list[str]) -> list[float]:
        return [float(len(c) % 2 == 0) for c in completions]


@pytest.fixture(autouse=True)
def _parity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("amir.rewards.runner.Correctness", ParityGrader)


def test_a_run_leaves_config_metrics_completions_evaluations_checkpoints_and_adapter(tmp_path) -> None:
    config = run_config()
    made = run(tmp_path, config)
    metrics = rows(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in metrics] == [1, 2, 3]
    assert all(set(row) == {*METRICS, "reward/correctness"} for row in metrics)
    assert sum(row["pairs"] for row in metrics) > 0
    assert 0 < max(row["pair_grad_share"] for row in metrics) < 1
    assert all(row["ratio"] == 1 for row in metrics if row["pairs"])
    completions = rows(tmp_path / "completions" / "step-000002.jsonl")
    assert len(completions) == 12
    assert sum(c["reward"] for c in completions) / 12 == pytest.approx(metrics[1]["reward"])
    assert [row["step"] for row in rows(tmp_path / "evaluations.jsonl")] == [0, 3]
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-2", "step-3"]
    assert not list(tmp_path.rglob("*.tmp"))
    assert not [p for p in tmp_path.rglob("*") if p.suffix in (".pt", ".bin", ".pkl", ".pth")]

    loaded = PeftModel.from_pretrained(model(), tmp_path / "adapter").eval()
    ids = torch.randint(3, 97, (2, 9))
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=ids).logits, made.policy.base(input_ids=ids).logits)


@pytest.mark.parametrize("changes", [{}, {"num_iterations": 2, "lr_scheduler": "cosine", "beta": 0.04}], ids=str)
def test_resuming_gives_the_same_bits_and_loses_nothing(tmp_path, changes: dict[str, object]) -> None:
    whole = run(tmp_path / "whole", run_config(max_steps=4, **changes))
    cut = trainer(tmp_path / "cut", run_config(max_steps=4, **changes))
    crash_after(cut, step=3)
    resumed = run(tmp_path / "cut", run_config(max_steps=4, **changes), resume=True)

    assert resumed.display.finished_steps == 2
    assert resumed.display.messages[0] == "resumed after step 2"
    for left, right in zip(whole.named.values(), resumed.named.values(), strict=True):
        assert torch.equal(left, right)
    saved = [
        load_file(tmp_path / name / "checkpoints" / "step-4" / "optimizer.safetensors") for name in ("whole", "cut")
    ]
    assert saved[0].keys() == saved[1].keys()
    assert all(torch.equal(saved[0][key], saved[1][key]) for key in saved[0] if not key.startswith("rng"))
    assert untimed(rows(tmp_path / "whole" / "metrics.jsonl")) == untimed(rows(tmp_path / "cut" / "metrics.jsonl"))
    assert rows(tmp_path / "whole" / "evaluations.jsonl") == rows(tmp_path / "cut" / "evaluations.jsonl")
    for name in ("step-000003.jsonl", "step-000004.jsonl"):
        texts = [(tmp_path / run_name / "completions" / name).read_text() for run_name in ("whole", "cut")]
        assert texts[0] == texts[1]
    superseded = next((tmp_path / "cut" / "superseded").iterdir())
    assert [row["step"] for row in rows(superseded / "metrics.jsonl")] == [3]
    assert (superseded / "step-000003.jsonl").is_file()


def test_evaluating_changes_neither_weights_nor_what_is_sampled(tmp_path) -> None:
    quiet = run(tmp_path / "quiet", run_config(eval_prompts=0))
    often = run(tmp_path / "often", run_config(eval_prompts=4, eval_steps=1, eval_samples=3))
    evaluations = rows(tmp_path / "often" / "evaluations.jsonl")
    assert [(row["step"], row["samples"]) for row in evaluations] == [(0, 12), (1, 12), (2, 12), (3, 12)]
    assert 0 <= evaluations[0]["success"] <= evaluations[0]["pass@2"] <= 1
    for left, right in zip(quiet.named.values(), often.named.values(), strict=True):
        assert torch.equal(left, right)


def test_a_run_that_died_before_its_first_checkpoint_starts_over_and_keeps_what_it_had(tmp_path) -> None:
    config = run_config(max_steps=2, save_steps=9)
    whole = run(tmp_path / "whole", config)
    cut = trainer(tmp_path / "cut", config)
    cut.directory.start()
    cut._evaluate(0)
    cut.directory.close()
    resumed = run(tmp_path / "cut", config, resume=True)
    assert [row["step"] for row in rows(tmp_path / "cut" / "evaluations.jsonl")] == [0, 2]
    assert len(list((tmp_path / "cut" / "superseded").rglob("eval-000000.jsonl"))) == 1
    for left, right in zip(whole.named.values(), resumed.named.values(), strict=True):
        assert torch.equal(left, right)


def test_a_half_written_checkpoint_and_a_cut_line_are_passed_over(tmp_path) -> None:
    config = run_config(max_steps=2)
    made = run(tmp_path, config)
    (tmp_path / "checkpoints" / ".step-9.tmp").mkdir()
    (tmp_path / "checkpoints" / "step-9").mkdir()
    assert latest_checkpoint(tmp_path / "checkpoints").name == "step-2"
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "rew')
    resumed = run(tmp_path, run_config(max_steps=3), resume=True)
    assert [row["step"] for row in rows(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    assert made.named.keys() == resumed.named.keys()


STATES = {
    "empty": {"step": ..., "data_position": ..., "format": ..., "parameters": ..., "files": ...},
    "without a step": {"step": ...},
    "without a position": {"data_position": ...},
    "a step in words": {"step": "two"},
    "half a step": {"step": 2.5},
    "a position before the first": {"data_position": -1},
    "a list of files": {"files": ["adapter_model.safetensors"]},
    "no files": {"files": {}},
}


@pytest.mark.parametrize("damage", ["truncated", "missing", "another step's", *STATES])
def test_a_damaged_checkpoint_is_named_and_a_copy_beside_it_is_passed_over(tmp_path, damage: str) -> None:
    config = run_config(max_steps=4)
    run(tmp_path, config)
    folder = tmp_path / "checkpoints"
    shutil.copytree(folder / "step-4", folder / "step-4-backup")
    file = folder / "step-4" / "optimizer.safetensors"
    if damage == "truncated":
        file.write_bytes(file.read_bytes()[:-10])
    elif damage == "missing":
        (folder / "step-4" / "adapter_model.safetensors").unlink()
    elif damage in STATES:
        state = json.loads((folder / "step-4" / "state.json").read_text()) | STATES[damage]
        held = {key: value for key, value in state.items() if value is not ...}
        (folder / "step-4" / "state.json").write_text(json.dumps(held))
    else:
        shutil.copy(folder / "step-2" / "optimizer.safetensors", file)
    with pytest.raises(ConfigError, match="step-4: damaged") as refused:
        trainer(tmp_path, config, resume=True)
    assert "move it aside to resume from the previous checkpoint" in str(refused.value)


def test_a_failed_start_does_not_block_its_folder(tmp_path) -> None:
    config = run_config(max_prompt_length=3)
    words = "max_prompt_length = 3, .* no training prompt is left of .* examples; set bounds"
    with pytest.raises(ConfigError, match=words), RunDirectory(tmp_path, config, resume=False) as folder:
        Trainer(config, policy(config), TASKS["arithmetic"](config.task), folder, Lines())
    run(tmp_path, run_config(max_steps=1))


def test_settings_that_cannot_take_effect_are_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match="eval_prompts = 2: the task has no held-out examples; set eval_prompts: 0"):
        trainer(tmp_path / "a", run_config(task={"name": "arithmetic", "max_operand": 4, "held_out": 0.01}))
    broken = trainer(tmp_path / "b", run_config(max_steps=1))
    broken.policy.tokenizer.chat_template = "{{ broken"
    with pytest.raises(ConfigError, match=r"chat_template: it fails for 'What is .*; correct the template"):
        broken._encode(broken.task.train, "training")
    broken.policy.tokenizer.chat_template = None
    assert broken._encode(broken.task.train, "training")
    with pytest.raises(ConfigError, match=r"system_prompt: .* has no chat template, which it needs; set chat_template"):
        prompt_ids(broken.policy.tokenizer, Example("1 + 1", "2"), run_config(system_prompt="Be brief."))
    with pytest.raises(ConfigError, match=r"lora\.target_modules = \['nonsense'\]: .*; expected names of the model's"):
        policy(run_config(lora={"target_modules": ["nonsense"]}))


def test_folders_that_cannot_be_written_are_refused_before_anything_is_made(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match="is not a writable folder; name another output_dir"):
            RunDirectory(path, run_config(), resume=False)


def test_a_record_that_cannot_be_read_is_named_when_resuming(tmp_path) -> None:
    run(tmp_path, run_config(max_steps=2))
    (tmp_path / "config.yaml").unlink()
    (tmp_path / "config.yaml").mkdir()
    with pytest.raises(ConfigError, match=r"config\.yaml: cannot be read \(.*\); make it readable to resume"):
        trainer(tmp_path, run_config(max_steps=3), resume=True)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("config.yaml", b""),
        ("config.yaml", b"a: ["),
        ("metrics.jsonl", b"{oops\n"),
        ("metrics.jsonl", b"\xff\xfe\n"),
        ("metrics.jsonl", b"null\n"),
        ("evaluations.jsonl", b'{"reward": 1}\n'),
        ("evaluations.jsonl", b'{"step": 2, "success": "all"}\n'),
    ],
)
def test_a_damaged_record_is_named_when_resuming(tmp_path, name: str, text: bytes) -> None:
    run(tmp_path, run_config(max_steps=2))
    (tmp_path / name).write_bytes(text)
    with pytest.raises(ConfigError, match=f"{name}.*(correct or remove the line|restore the run's configuration)"):
        trainer(tmp_path, run_config(max_steps=3), resume=True)


def test_rows_that_were_lost_are_counted_when_resuming(tmp_path) -> None:
    run(tmp_path, run_config(max_steps=2))
    (tmp_path / "metrics.jsonl").write_bytes((tmp_path / "metrics.jsonl").read_bytes()[:40])
    resumed = run(tmp_path, run_config(max_steps=2), resume=True)
    told = "metrics.jsonl has no row for 2 of the 2 steps before this point, the first of them step 1"
    assert [text for text in resumed.display.messages if text.startswith(told)]


@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_with_records_and_no_configuration_is_neither_resumed_nor_overwritten(tmp_path, resume: bool) -> None:
    run(tmp_path, run_config(max_steps=2))
    (tmp_path / "config.yaml").unlink()
    with pytest.raises(ConfigError, match=r"it has metrics\.jsonl of a run and no config\.yaml, .*; restore that file"):
        RunDirectory(tmp_path, run_config(), resume=resume)


def test_resuming_a_finished_run_says_so(tmp_path) -> None:
    run(tmp_path, run_config(max_steps=2))
    resumed = run(tmp_path, run_config(max_steps=2), resume=True)
    assert [text for text in resumed.display.messages if "nothing to do" in text]


def test_another_models_checkpoint_is_refused(tmp_path) -> None:
    made = policy(run_config(lora={"r": 4, "target_modules": ["q_proj"]}))
    optimizer = make_optimizer(run_config(), made.trainable())
    path = save_checkpoint(tmp_path, 1, 3, made.model, optimizer, made.trainable())
    other = policy()
    with pytest.raises(ConfigError, match="another model or adapter"):
        load_checkpoint(path, other.model, make_optimizer(run_config(), other.trainable()), other.trainable())


@pytest.mark.parametrize("lora", [{"r": 4, "alpha": 8}, None], ids=["adapter", "whole"])
def test_a_checkpoint_of_other_shapes_is_refused(tmp_path, lora: dict[str, int] | None) -> None:
    made, wider = policy(run_config(lora=lora)), model()
    optimizer = make_optimizer(run_config(), made.trainable())
    path = save_checkpoint(tmp_path, 1, 3, made.model, optimizer, made.trainable())
    mlp = wider.model.layers[0].mlp
    mlp.gate_proj, mlp.up_proj = (torch.nn.Linear(32, 96, bias=False) for _ in range(2))
    mlp.down_proj = torch.nn.Linear(96, 32, bias=False)
    other = wrap_policy(wider, tokenizer(), run_config(lora=lora))
    with pytest.raises(ConfigError, match="another model or adapter"):
        load_checkpoint(path, other.model, make_optimizer(run_config(), other.trainable()), other.trainable())


RENAMED = {
    "gpt_neox": lambda sizes: GPTNeoXForCausalLM(GPTNeoXConfig(**sizes)),
    "gemma3": lambda sizes: Gemma3ForConditionalGeneration(
        Gemma3Config(
            text_config=sizes | {"head_dim": 8, "num_key_value_heads": 2},
            vision_config={"hidden_size": 24, "intermediate_size": 64, "num_hidden_layers": 1, "image_size": 28},
            mm_tokens_per_image=4,
        )
    ),
}
"""Families whose files on the hub name the weights otherwise than their modules do."""


@pytest.mark.parametrize("family", RENAMED)
def test_every_weight_is_resumed_whatever_its_family_calls_it(tmp_path, family: str) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    sizes |= {"vocab_size": VOCAB, "max_position_embeddings": 256, "eos_token_id": EOS, "pad_token_id": PAD}
    config = run_config(lora=None, ref_free=True)
    made, other = (wrap_policy(RENAMED[family](sizes), tokenizer(), config) for _ in range(2))
    optimizer = make_optimizer(config, made.trainable())
    path = save_checkpoint(tmp_path, 1, 3, made.model, optimizer, made.trainable())
    load_checkpoint(path, other.model, make_optimizer(config, other.trainable()), other.trainable())
    for loaded in (other.model, AutoModelForCausalLM.from_pretrained(path)):
        for name, weight in made.trainable().items():
            assert torch.equal(weight, loaded.get_parameter(name)), name


def test_the_picture_of_a_run_is_drawn_whatever_its_name(tmp_path) -> None:
    folder = tmp_path / "a$b^c_$ (2)"
    run(folder, run_config(max_steps=1))
    assert draw_curves(folder).stat().st_size > 0


def test_notes_among_the_completions_stay(tmp_path) -> None:
    run(tmp_path, run_config(max_steps=2, save_steps=2))
    (tmp_path / "completions" / "my-notes.jsonl").write_text("mine")
    run(tmp_path, run_config(max_steps=3, save_steps=2), resume=True)
    assert (tmp_path / "completions" / "my-notes.jsonl").read_text() == "mine"


def test_run_directories_are_never_shared_or_overwritten(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = run_config()
    first = choose_output_dir("tiny", config, resume=False)
    held = opened(first, config)
    with pytest.raises(ConfigError, match="'runs/tiny': it already has a run; add --resume to continue it"):
        RunDirectory(first, config, resume=False)
    with pytest.raises(ConfigError, match="'runs/tiny': another process is using it; wait for that run"):
        RunDirectory(first, config, resume=True)
    held.close()
    assert choose_output_dir("tiny", config, resume=False) == Path("runs/tiny-2")
    assert choose_output_dir("tiny", config, resume=True) == first
    with pytest.raises(ConfigError, match=r"seed = 5: the run in 'runs/tiny' has 0, .*it may change .*max_steps"):
        RunDirectory(first, run_config(seed=5), resume=True)
    RunDirectory(first, run_config(max_steps=9), resume=True).close()
    with pytest.raises(ConfigError, match="'elsewhere': it has no run to resume; leave out --resume to start one"):
        RunDirectory(Path("elsewhere"), config, resume=True)


def test_what_is_not_finite_is_null_on_disk(tmp_path) -> None:
    with RunDirectory(tmp_path, run_config(), resume=False) as directory:
        directory.record("metrics", {"step": 1, "reward": float("nan"), "kl": float("inf"), "question": "1 ÷ 0"})
    assert rows(tmp_path / "metrics.jsonl") == [{"step": 1, "reward": None, "kl": None, "question": "1 ÷ 0"}]


def test_a_pair_term_that_never_forms_a_pair_warns(tmp_path) -> None:
    config = run_config(max_steps=WINDOW, reward_margin=1.0, save_steps=100, eval_prompts=0, prompts_per_step=1)
    made = run(tmp_path, config)
    assert [text for text in made.display.messages if f"in steps 1 to {WINDOW} no pair was formed" in text]
    assert "no pair was formed" in (tmp_path / "log.txt").read_text()


@pytest.mark.parametrize("reward", ["strict_format", "linear_length"])
def test_rewards_that_never_differ_warn(tmp_path, reward: str) -> None:
    rewards = [{"name": reward, "arguments": {"start": 0, "end": 9} if reward == "linear_length" else {}}]
    config = run_config(max_steps=WINDOW, lambda_reg=0, eval_prompts=0, prompts_per_step=1, rewards=rewards)
    made = run(tmp_path, config)
    differed = any(row["reward_std"] > 0 for row in rows(tmp_path / "metrics.jsonl"))
    assert differed == (reward == "linear_length")
    assert bool([text for text in made.display.messages if "no group had differing rewards" in text]) != differed


def test_a_model_that_cannot_be_packed_says_so_once_and_trains_the_same(tmp_path) -> None:
    config = run_config(max_steps=2, eval_prompts=0, beta=0.1)
    packed = run(tmp_path / "packed", config)
    plain = trainer(tmp_path / "plain", config)
    plain.policy.__dict__["why_unpacked"], plain.budget.packed = "it has layers of type conv", False
    plain.train()
    assert [text for text in plain.display.messages if "conv" in text] == [
        "training without packing, each completion with its own copy of the prompt, because it has layers of type conv"
    ]
    assert not [text for text in packed.display.messages if "without packing" in text]
    left, right = packed.display.steps[0], plain.display.steps[0]
    for name in ("loss", "policy_grad_norm", "grad_norm", "tokens_trained"):
        assert left[name] == pytest.approx(right[name], rel=1e-4, abs=1e-7)
    assert 0 < left["tokens_trained"] < left["tokens_computed"] < right["tokens_computed"]


def test_prompts_too_long_are_counted_and_none_left_is_refused(tmp_path) -> None:
    made = trainer(tmp_path / "a", run_config(max_prompt_length=44))
    assert not [text for text in made.display.messages if "dropped" in text]
    with pytest.raises(ConfigError, match=r"max_prompt_length = 3, .*: no training prompt is left of .*; set bounds"):
        trainer(tmp_path / "b", run_config(max_prompt_length=3))
    made = trainer(tmp_path / "c", run_config(max_prompt_length=44, task={"name": "arithmetic", "max_operand": 10}))
    assert [text for text in made.display.messages if "which are longer than max_prompt_length = 44 tokens" in text]


def test_every_prompt_is_seen_once_an_epoch(tmp_path) -> None:
    made = trainer(tmp_path, run_config(prompts_per_step=7))
    size = len(made.prompts)
    seen = [p.example.question for _ in range(size) for p in made._next_prompts(7)]
    assert len(seen) == 7 * size
    for epoch in range(7):
        assert len(set(seen[epoch * size : (epoch + 1) * size])) == size
    assert seen[:size] != seen[size : 2 * size]


def test_learning_rate_warms_up_and_decays() -> None:
    config = run_config(learning_rate=1.0, warmup_steps=2, max_steps=6, lr_scheduler="linear")
    assert [learning_rate(config, step) for step in range(1, 7)] == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    cosine = run_config(learning_rate=1.0, max_steps=4, lr_scheduler="cosine")
    assert [round(learning_rate(cosine, step), 4) for step in (1, 3)] == [1.0, 0.5]


def at(cwd: Path) -> dict[str, Any]:
    """How a command is run here."""
    path = os.pathsep.join(str(Path(entry).resolve()) for entry in sys.path if entry)
    environment = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    return {"cwd": cwd, "env": environment, "capture_output": True, "text": True}


def python(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], **at(cwd), check=False)


def test_the_command_refuses_in_one_line_with_exit_code_two(tmp_path) -> None:
    for arguments, words in [
        (["train", "quickstrat"], "nearest: 'quickstart'"),
        (["train", "quickstart", "--set", "learning_rat=1"], "nearest: 'learning_rate'"),
        (
            ["train", "quickstart", "--set", "model=./nowhere"],
            "model = './nowhere': expected a folder with config.json",
        ),
        (["train", "quickstart", "--resume"], "it has no run to resume; leave out --resume to start one"),
        (["trian", "quickstart"], "trian"),
    ]:
        done = python("-m", "amir", *arguments, cwd=tmp_path)
        assert done.returncode == 2, done
        assert words in done.stderr
        assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("missing", ["typer", "pydantic", "yaml"])
def test_without_the_trainers_packages_the_command_says_what_to_install(tmp_path, missing: str) -> None:
    script = f"import sys; sys.modules['{missing}'] = None\nfrom amir.__main__ import main"
    done = python("-c", script, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == f"amir: the trainer needs {missing}: pip install 'amir-grpo[train]'\n"


def test_a_run_shows_no_bars_of_libraries_and_no_needless_notice(tmp_path) -> None:
    logger = "bitsandbytes.backends.cpu.ops"
    script = "import logging, amir.__main__ as command; command._quiet_libraries()\n"
    script += f"logging.getLogger({logger!r}).warning('foreign'); logging.getLogger({logger!r}).error('wrong')\n"
    script += "from tqdm.auto import tqdm; list(tqdm([1], desc='foreign'))"
    done = python("-c", script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "foreign" not in done.stderr
    assert "wrong" in done.stderr


@pytest.mark.parametrize(
    ("begun", "words"),
    [(True, "records are kept; add --resume to the same command"), (False, "not started; the same command starts it")],
)
def test_an_interrupted_run_says_how_to_go_on(tmp_path, begun: bool, words: str) -> None:
    script = f"""if True:
        import os, signal, sys, amir.__main__ as command
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
        def train(path, config, resume):
            path.mkdir(parents=True)
            {begun} and (path / "config.yaml").touch()
            os.kill(os.getpid(), {int(signal.SIGINT)})
        sys.argv, command._train = ["amir", "train", "quickstart"], train
        command.main()
    """
    done = python("-c", script, cwd=tmp_path)
    assert done.returncode == 1
    assert words in done.stderr


def test_an_output_that_is_closed_ends_the_run_with_a_word(tmp_path) -> None:
    script = """if True:
        import sys, amir.__main__ as command
        from pathlib import Path
        from amir.run.display import Terminal
        def train(path, config, resume):
            terminal = Terminal(1, Path(), print)
            while True:
                terminal.message("line" * 1000)
        sys.argv, command._train = ["amir", "train", "quickstart"], train
        command.main()
    """
    piped = f"{sys.executable} -c '{script}' | head -n 2"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", piped], **at(tmp_path), check=False)
    assert done.returncode == 1
    assert "the program that reads this output closed the pipe; expected one that reads to the end" in done.stderr
    assert "The run had not started; the same command starts it" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_command_lists_recipes_and_says_what_the_machine_can_do(tmp_path) -> None:
    listed = python("-m", "amir", "recipes", cwd=tmp_path)
    assert [line.split()[0] for line in listed.stdout.splitlines()] == recipe_names()
    found = python("-m", "amir", "doctor", cwd=tmp_path)
    assert f"torch {importlib.metadata.version('torch')}" in found.stdout
    assert ("\nno GPU: " in found.stdout) != torch.cuda.is_available()
    for package, purpose in SERVES.items():
        line = next(line for line in found.stdout.splitlines() if line.startswith(f"{package}"))
        assert ("not installed" in line) == (purpose in line)


def test_a_dry_run_prints_the_resolved_config_and_loads_no_torch(tmp_path) -> None:
    script = "import sys; sys.argv = ['amir', 'train', 'quickstart', '--dry-run']\nfrom amir.__main__ import main\n"
    script += "try: main()\nexcept SystemExit as e: print('exit', e.code)\nprint('torch' in sys.modules)"
    done = python("-c", script, cwd=tmp_path)
    assert "lambda_reg:" in done.stdout
    for line in ("epsilon: 0.2", "epsilon_high: 0.28", "  timeout_seconds: 10.0"):
        assert f"\n{line}\n" in done.stdout
    assert "\ndevice: auto  # cuda where torch finds a GPU, otherwise cpu\n" in done.stdout
    assert done.stdout.endswith("exit 0\nFalse\n")

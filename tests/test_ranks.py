"""Two ranks (gloo, CPU) end a run with the losses and weights of one process; their checkpoints serve any number."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("peft")

from amir.__main__ import _run_in_processes
from amir.config_reader import config_yaml
from amir.distributed import Ranks
from amir.errors import ConfigError
from amir.update.micro_batches import MicroBatch, assign
from tiny import model, run_config, tokenizer
from vllm_like import VllmLike

HERE = Path(__file__).parent
STEPS = 3
WAYS = {
    # a group that does not fit into a micro-batch, a step reused, both references
    "adapter": {"beta": 0.04, "num_iterations": 2, "micro_batch_tokens": 40, "term_gradient_steps": 2},
    "model": {"lora": None, "beta": 0.04, "learning_rate": 1e-3, "micro_batch_tokens": 40},
    "model, layers checkpointed": {"lora": None, "ref_free": True, "gradient_checkpointing": True},
}
UNTIMED = ("loss", "preference_loss", "grad_norm", "kl", "pairs", "reward", "tokens_trained", "pair_accuracy", "ratio")
UNTIMED += ("policy_parameter_grad_norm", "pair_parameter_grad_norm")


def script(*before: str) -> tuple[list[str], dict[str, str]]:
    """The command of tests/ranked_run.py, started by `before`, and its environment."""
    path = os.pathsep.join(str(Path(entry).resolve()) for entry in [*sys.path, HERE] if entry)
    environment = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return [sys.executable, *before, str(HERE / "ranked_run.py")], environment


@cache
def forks() -> subprocess.Popen[str]:
    """The script as a process that has loaded everything and forks the ranks of each run."""
    command, environment = script()
    pipe = subprocess.PIPE
    return subprocess.Popen([*command, "--serve"], env=environment, stdin=pipe, stdout=pipe, text=True)


@pytest.fixture(scope="module", autouse=True)
def _end_of_forks() -> Iterator[None]:
    yield
    if forks.cache_info().currsize:
        with forks() as process:
            process.stdin.close()
        forks.cache_clear()


def prepared(folder: Path, name: str, more: str = "", **changes: object) -> str:
    """The file of a run of the tiny model in FOLDER/NAME; `more` is text behind its settings."""
    if not (folder / "tiny").exists():
        model().save_pretrained(folder / "tiny")
        tokenizer().save_pretrained(folder / "tiny")
    settings = {"model": str(folder / "tiny"), "output_dir": str(folder / name), "max_steps": STEPS, "save_steps": 2}
    (folder / f"{name}.yaml").write_text(config_yaml(run_config(**(settings | changes))) + more)
    return str(folder / f"{name}.yaml")


def run(folder: Path, name: str, ranks: int, *options: str, torchrun: bool = False, **changes: object) -> Path:
    """A run on `ranks` processes, which are forked where nothing depends on torchrun; it must succeed."""
    done = (ended if torchrun else forked)(folder, name, ranks, *options, **changes)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FutureWarning" not in done.stderr, done.stderr
    return folder / name


def forked(
    folder: Path, name: str, ranks: int, *options: str, more: str = "", **changes: object
) -> subprocess.CompletedProcess[str]:
    """A run whose ranks are forks of a process that has loaded everything; the code is that of the first to fail."""
    job = {"ranks": ranks, "arguments": [prepared(folder, name, more, **changes), *options], "folder": str(folder)}
    written = [folder / "stdout.txt", folder / "stderr.txt"]
    for path in written:
        path.write_text("")
    process = forks()
    process.stdin.write(json.dumps(job) + "\n")
    process.stdin.flush()
    code = int(process.stdout.readline())
    return subprocess.CompletedProcess(job["arguments"], code, *(path.read_text() for path in written))


def ended(
    folder: Path, name: str, ranks: int, *options: str, more: str = "", **changes: object
) -> subprocess.CompletedProcess[str]:
    """A run under torchrun, however it ends; `more` is text behind its settings."""
    command, environment = script("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    command += [prepared(folder, name, more, **changes), *options]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=folder)


def metrics(path: Path) -> list[dict]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def trained(path: Path) -> dict[str, torch.Tensor]:
    (file,) = [*path.glob("adapter/adapter_model.safetensors"), *path.glob("model/model.safetensors")]
    return load_file(file)


def refuse_difference(left: Path, right: Path) -> None:
    for a, b in zip(metrics(left), metrics(right), strict=True):
        for name in UNTIMED:
            same = a[name] == b[name] or a[name] == pytest.approx(b[name], rel=1e-5, abs=1e-5)
            assert same, (name, a["step"], a[name], b[name])
    weights = trained(left), trained(right)
    assert weights[0].keys() == weights[1].keys()
    for name, value in weights[0].items():
        torch.testing.assert_close(value, weights[1][name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_two_ranks_train_what_one_process_trains(tmp_path, way: str) -> None:
    one = run(tmp_path, "on-1", 1, **WAYS[way])
    two = run(tmp_path, "on-2", 2, torchrun=way == "adapter", **WAYS[way])
    assert any(row["pairs"] for row in metrics(one))
    start = {name: value.clone() for name, value in load_file(tmp_path / "tiny" / "model.safetensors").items()}
    if "lora" in WAYS[way]:
        assert any(not torch.equal(value, start[name]) for name, value in trained(one).items())
    refuse_difference(one, two)
    rows = [[json.loads(line) for line in path.open()] for path in sorted((two / "completions").glob("step-*"))]
    assert [len(step) for step in rows] == [12] * STEPS
    kept = [
        sorted(p.name for p in path.rglob("*") if p.is_file() and "tensorboard" not in str(p)) for path in (one, two)
    ]
    assert kept[0] == kept[1]


@pytest.mark.parametrize(("way", "ranks"), [("adapter", (2, 1)), ("model", (1, 2)), ("model", (2, 1))])
def test_a_checkpoint_serves_another_number_of_ranks(tmp_path, way: str, ranks: tuple[int, int]) -> None:
    whole = run(tmp_path, "whole", 1, **WAYS[way])
    cut = run(tmp_path, "cut", ranks[0], **(WAYS[way] | {"max_steps": 2}))
    assert run(tmp_path, "cut", ranks[1], "--resume", **WAYS[way]) == cut
    refuse_difference(whole, cut)


@pytest.mark.parametrize("way", ["adapter", "model"])
def test_two_ranks_sample_from_the_model_itself(tmp_path, way: str) -> None:
    path = run(tmp_path, "sampled", 2, "--sample", **(WAYS[way] | {"max_steps": 2, "num_iterations": 1}))
    rows = [json.loads(line) for line in (path / "completions" / "step-000001.jsonl").open()]
    assert len(rows) == 12
    assert len({row["question"] for row in rows}) == 3
    assert len({row["completion"] for row in rows}) > 6
    assert all(row["ratio"] == pytest.approx(1, abs=1e-6) for row in metrics(path)[:1] if row["ratio"] is not None)


def test_two_ranks_resample_the_groups_that_one_process_resamples(tmp_path) -> None:
    changes = {"dynamic_sampling": {"max_rounds": 4, "min_valid_share": 1.0}, "num_generations": 2}
    one, two = (run(tmp_path, f"on-{ranks}", ranks, **changes) for ranks in (1, 2))
    rounds = [[(row["sampling_rounds"], row["groups_sampled"]) for row in metrics(path)] for path in (one, two)]
    assert rounds[0] == rounds[1]
    assert any(count > 1 for count, _ in rounds[0])
    refuse_difference(one, two)


def test_one_rank_asks_the_server_for_all(tmp_path) -> None:
    ended_with = []
    for ranks in (1, 2):
        server = VllmLike()
        sampler = {"name": "server", "url": server.url, "model": "tiny", "wait_seconds": 20.0}
        ended_with.append(run(tmp_path, f"on-{ranks}", ranks, "--sample", sampler=sampler, temperature=1.5))
        server.close()
        assert sum(path == "/v1/load_lora_adapter" for path, _ in server.asked) == STEPS + 1  # the last one to evaluate
    files = [sorted((path / "completions").glob("step-*")) for path in ended_with]
    assert [file.read_text() for file in files[0]] == [file.read_text() for file in files[1]]
    refuse_difference(*ended_with)


def test_fewer_prompts_than_ranks(tmp_path) -> None:
    """A rank without a prompt of its own samples and evaluates nothing, and trains along."""
    changes = {"prompts_per_step": 1, "eval_prompts": 1, "max_steps": 2, "num_generations": 8}
    path = run(tmp_path, "few", 2, "--sample", **changes)
    assert [row["groups_sampled"] for row in metrics(path)] == [1, 1]
    assert [len(file.read_text().splitlines()) for file in sorted((path / "completions").iterdir())] == [2, 2, 8, 8]


def test_a_rank_out_of_memory_takes_the_step_again_with_all(tmp_path) -> None:
    """First in scoring, then in training, where both ranks have gradients that must not stay."""
    changes = {"beta": 0.04, "num_iterations": 2, "num_generations": 8, "max_completion_length": 30}
    changes |= {"micro_batch_tokens": 250}
    one = run(tmp_path, "on-1", 1, **changes)
    done = forked(tmp_path, "on-2", 2, "--no-room", "5", "1", **changes)
    assert done.returncode == 0, done.stderr
    refuse_difference(one, tmp_path / "on-2")
    words = r"out of memory in a micro-batch of (\d+) completions, (\d+) tokens: the step continues"
    said = re.findall(words, (tmp_path / "on-2" / "log.txt").read_text())
    assert [int(rows) > 5 for rows, _ in said] == [True, *[False] * (len(said) - 1)]
    assert [int(tokens) for _, tokens in said] == sorted({int(tokens) for _, tokens in said}, reverse=True)
    assert len(said) >= 2
    assert done.stdout.count("out of memory") == len(said)


def test_parts_of_a_model_end_where_a_rank_is_out_of_memory(tmp_path) -> None:
    done = forked(tmp_path, "parts", 2, "--no-room", "9", "1", lora=None, micro_batch_tokens=100)
    assert done.returncode != 0
    assert done.stderr.count("ran out of memory") == 1, done.stderr
    words = r"amir: rank 1 ran out of memory in a micro-batch of (\d+) tokens .*; set micro_batch_tokens below \1, then"
    assert re.search(words, done.stderr), done.stderr


ONE_RANK_FAILS = (
    "def moody(completions):\n    if len(completions) == 4: raise ValueError('few')\n    return [1.0] * 8\n"
)
OVERFLOWS = {"learning_rate": 1e15, "warmup_steps": 0, "save_steps": 1}
REFUSED, STOPPED = 2, 1
ENDS = {
    "a misspelt key": (
        REFUSED,
        [],
        {"more": "learning_rat: 1\n"},
        "unknown key 'learning_rat' (value 1); nearest: 'learning_rate'",
    ),
    "a sampler that needs the model whole": (
        REFUSED,
        [],
        {"lora": None, "sampler": {"name": "paged"}},
        "sampler.name = 'paged': not supported for full fine-tuning ...; use sampler 'generate', LoRA, or run one rank",
    ),
    "a reward that fails on one rank": (
        STOPPED,
        [],
        {"rewards": [{"function": "mine.py:moody"}], "eval_prompts": 0},
        "reward moody (mine.py:moody) raised ValueError: few ...add --resume to the same command",
    ),
    "one completion that does not fit on one rank": (
        REFUSED,
        ["--no-room", "9", "0"],
        {},
        "one completion with its prompt (...) does not fit into memory (...); set gradient_checkpointing: true",
    ),
    "a gradient that is not finite on any rank": (
        STOPPED,
        [],
        OVERFLOWS,
        "step 2: the gradient is not finite (norm ...; start a new run with a smaller learning_rate",
    ),
    "parts of a model that cannot be sampled": (
        STOPPED,
        ["--sample"],
        OVERFLOWS | {"lora": None},
        "the policy computes NaN or infinity, ...; start a new run with a smaller learning_rate",
    ),
}


@pytest.mark.parametrize("way", ENDS)
def test_what_is_wrong_is_said_once(tmp_path, way: str) -> None:
    """By the first rank, without a traceback."""
    code, options, changes, words = ENDS[way]
    (tmp_path / "mine.py").write_text(ONE_RANK_FAILS)
    done = forked(tmp_path, "bad", 2, *options, **changes)
    assert done.returncode == code
    pattern = "amir: .*" + ".*".join(map(re.escape, words.split("...")))
    assert [line for line in done.stderr.splitlines() if re.search(pattern, line)], done.stderr
    assert done.stderr.count("amir: ") == 1, done.stderr
    assert "[rank" not in done.stderr, done.stderr
    assert "Unable to shutdown" not in done.stderr, done.stderr  # by SIGTERM, so that torchrun waited for 30 seconds
    if code == STOPPED:
        assert (tmp_path / "bad" / "log.txt").read_text().count(words.split("...")[0]) == 1
    if "save_steps" in changes:
        assert (tmp_path / "bad" / "checkpoints" / "step-1" / "state.json").exists()


def refused(folder: Path, *launch: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """`amir train` of a file with a misspelt key."""
    command = [sys.executable, *launch, "-m", "amir", "train", prepared(folder, "bad", "learning_rat: 1\n"), *options]
    return subprocess.run(command, env=script()[1], capture_output=True, text=True, check=False, cwd=folder)


def test_ranks_of_torchrun_end_with_one_message_and_the_exit_code(tmp_path) -> None:
    """What torchrun adds is its own."""
    done = refused(tmp_path, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert done.returncode != 0
    assert f"failed (exitcode: {REFUSED})" in done.stderr, done.stderr
    assert done.stderr.count("amir: ") == done.stderr.count("unknown key 'learning_rat'") == 1, done.stderr


def test_a_run_in_processes_ends_with_its_own_word_alone(tmp_path) -> None:
    """Unlike torchrun, which adds a traceback."""
    done = refused(tmp_path, options=("--processes", "2"))
    assert done.returncode == REFUSED
    assert re.fullmatch(r"amir: .*unknown key 'learning_rat'.*\n", done.stderr), done.stderr


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_is_reported_although_it_cannot_say_so(tmp_path, rank: int) -> None:
    kill = f"if os.environ.get('RANK') == '{rank}': os.kill(os.getpid(), signal.SIGKILL)"
    (tmp_path / "sitecustomize.py").write_text(f"import os, signal\n{kill}\n")
    command, environment = script("-m", "amir", "train", prepared(tmp_path, "killed"), "--processes", "2")
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), environment["PYTHONPATH"]])
    done = subprocess.run(command[:-1], env=environment, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == STOPPED
    told = f"amir: rank {rank} was killed by SIGKILL, which the system sends when memory runs out; set a smaller"
    assert [line for line in done.stderr.splitlines() if line.startswith(told)], done.stderr


def test_processes_inside_of_torchrun_are_refused(monkeypatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "given")
    with pytest.raises(ConfigError, match="--processes 2: torchrun has started the processes already; leave --proc"):
        _run_in_processes(2, "quickstart", [], resume=False, resume_if_present=False)


def test_shares_are_whole_and_micro_batches_dealt_evenly() -> None:
    items = list(range(7))
    assert [Ranks(rank, 3).share(items) for rank in range(3)] == [[0, 1, 2], [3, 4], [5, 6]]
    assert [Ranks(rank, 3).share([1]) for rank in range(3)] == [[1], [], []]
    micros = [MicroBatch(torch.tensor([i]), complete_groups=True) for i in range(4)]
    dealt = [assign(micros, Ranks(rank, 3)) for rank in range(3)]
    assert [[int(m.rows) for m in share if not m.idle] for share in dealt] == [[0, 3], [1], [2]]
    assert [[m.idle for m in share] for share in dealt] == [[False, False], [False, True], [False, True]]
    assert assign([], Ranks(1, 2)) == []

"""Sampling by a server: exact tokens and log-probs, adapters pushed and proved, troubles waited for or ended."""

import math
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import decoders

import amir.rollout.http_client
from amir.config import RunConfig
from amir.errors import ConfigError, RunStopped
from amir.policy.load import load_policy
from amir.rollout.samplers import make_sampler
from amir.rollout.server import Server
from amir.run.directory import RunDirectory
from amir.tasks import TASKS
from amir.tokens import pad_right
from amir.trainer import Trainer
from test_trainer import Lines, ParityGrader, rows, trainer, untimed
from tiny import EOS, model, padded, policy, run_config, tokenizer
from vllm_like import BASE, VllmLike

PROMPTS = [[5, 6], [7, 8, 9, 10, 11], [12, 13, 14, 15, 16, 17, 18, 19, 20]]


class LetterGrader(ParityGrader):
    """Rewards an even first letter: half of what a random model writes."""

    def __call__(self, completions: list[str], golds: list[str]) -> list[float]:
        return [float(ord(text[0]) % 2 == 0) if text else 0.0 for text in completions]


@pytest.fixture
def server() -> Iterator[VllmLike]:
    made = VllmLike()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amir.rollout.http_client, "FIRST_DELAY", 0.02)
    monkeypatch.setattr(amir.rollout.http_client, "LONGEST_DELAY", 0.1)
    monkeypatch.setattr("amir.rewards.runner.Correctness", LetterGrader)


def settings(url: str, **changes: object) -> dict[str, object]:
    return {"name": "server", "url": url, "wait_seconds": 5.0, "timeout_seconds": 5.0, **changes}


def config(url: str, *, sampler: dict[str, object] | None = None, **changes: object) -> RunConfig:
    return run_config(**{"temperature": 1.5, "sampler": settings(url, **(sampler or {})), **changes})


def sampler(tmp_path: Path, c: RunConfig, said: list[str] | None = None) -> Server:
    made = make_sampler(c, policy(c), tmp_path / "adapters", (said if said is not None else []).append)
    assert isinstance(made, Server)
    return made


def move(made: Server, by: float) -> None:
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in made._policy.trainable().values():
            parameter.add_(by * torch.randn(parameter.shape, generator=generator))


def test_tokens_and_log_probs_are_the_servers_own_and_the_policys(tmp_path, server) -> None:
    made = sampler(tmp_path, config(server.url))
    rollout = made.sample(PROMPTS, 8, 9, seed=3)
    tokens = padded(rollout)
    assert tokens.prompt_index.tolist() == [0] * 8 + [1] * 8 + [2] * 8
    for place, ids in enumerate(PROMPTS):
        assert tokens.prompt_ids[place][tokens.prompt_mask[place]].tolist() == ids
    with torch.no_grad():
        expected = made._policy.logprobs(tokens)
    assert rollout.logprobs is not None
    assert list(map(len, rollout.logprobs)) == tokens.completion_lengths.tolist()
    assert torch.allclose(pad_right(rollout.logprobs, 0.0), expected, atol=1e-4)
    last = [row[keep][-1] for row, keep in zip(tokens.completion_ids, tokens.completion_mask, strict=True)]
    assert [bool(end != EOS) for end in last] == rollout.truncated
    assert 0 < sum(rollout.truncated) < 24
    assert len({tuple(row.tolist()) for row in tokens.completion_ids}) > 20
    again = made.sample(PROMPTS, 8, 9, seed=3)
    assert again.completions == rollout.completions
    assert [ids[0] for ids in made.sample(PROMPTS, 8, 9, seed=4).completions] != [ids[0] for ids in rollout.completions]


def test_each_update_is_pushed_once_and_the_old_adapter_leaves(tmp_path, server) -> None:
    made = sampler(tmp_path, config(server.url))
    for _ in range(2):
        made.sample(PROMPTS, 2, 3, seed=0)
    move(made, 0.2)
    made.sample(PROMPTS, 2, 3, seed=0)
    asked = [path for path, _ in server.asked]
    assert asked.count("/v1/load_lora_adapter") == 2
    assert asked.count("/v1/unload_lora_adapter") == 1
    assert len(server.adapters) == 2
    names = [body["model"] for path, body in server.asked if path == "/v1/completions"]
    assert BASE not in names
    assert len(list((tmp_path / "adapters").iterdir())) == 1


def test_a_server_that_keeps_older_weights_is_refused(tmp_path, server) -> None:
    made = sampler(tmp_path, config(server.url, sampler={"tolerance": 10.0}))
    server.keeps_old_weights = True
    made.sample(PROMPTS, 2, 3, seed=0)
    move(made, 0.001)
    made.sample(PROMPTS, 2, 3, seed=0)
    move(made, 0.3)
    with pytest.raises(RunStopped, match=r"changed by 0\.0.* nats .*still samples from older weights; restart it"):
        made.sample(PROMPTS, 2, 3, seed=0)
    strict = sampler(tmp_path / "strict", config(server.url))
    move(strict, 0.3)
    with pytest.raises(
        RunStopped, match=r"differ from the trainer's by 0\..* nats .*tolerance = 0\.15\. Check its weights"
    ):
        strict.sample(PROMPTS, 2, 3, seed=0)


def test_a_token_counts_by_its_probability(tmp_path, server, monkeypatch) -> None:
    made = sampler(tmp_path, config(server.url))
    likely, unlikely = math.log(0.9), math.log(0.001)
    monkeypatch.setattr(made._dialect, "probe", lambda _: {0: (likely + 0.01, likely), 1: (unlikely - 3, unlikely)})
    made.sample(PROMPTS, 2, 3, seed=0)
    move(made, 0.01)
    monkeypatch.setattr(made._dialect, "probe", lambda _: {0: (likely - 0.2, likely), 1: (unlikely, unlikely)})
    with pytest.raises(RunStopped, match=r"the server's log-probs differ from the trainer's by 0\.200 nats"):
        made.sample(PROMPTS, 2, 3, seed=0)


def test_log_probs_at_another_temperature_are_refused(tmp_path) -> None:
    raw = VllmLike(temperature_in_logprobs=False)
    with pytest.raises(RunStopped, match="start vLLM with --logprobs-mode processed_logprobs"):
        sampler(tmp_path, config(raw.url)).sample(PROMPTS, 2, 3, seed=0)
    raw.close()


def test_what_passes_is_waited_for_and_said_once(tmp_path, server) -> None:
    said: list[str] = []
    made = sampler(tmp_path, config(server.url, sampler={"concurrent_requests": 1}), said)
    expected = made.sample(PROMPTS, 2, 3, seed=0)
    server.failures = [503, 500, 0, 429]
    assert made.sample(PROMPTS, 2, 3, seed=0).completions == expected.completions
    assert any("does not answer (ServerBusy: status 503" in text and "for at most 5 s" in text for text in said)
    assert said[-1] == f"the server {server.url} answers again"
    assert len(said) <= 8


def test_a_restarted_server_gets_the_adapter_again(tmp_path, server) -> None:
    made = sampler(tmp_path, config(server.url))
    expected = made.sample(PROMPTS, 2, 3, seed=0)
    server.forget()
    assert made.sample(PROMPTS, 2, 3, seed=0).completions == expected.completions
    server.failures, server.fail_on = [404] * 99, "/v1/completions"
    with pytest.raises(RunStopped, match=r"lost the adapter 3 times in one rollout; see the server's log, then resume"):
        made.sample(PROMPTS, 2, 3, seed=0)


def test_a_dead_server_ends_the_run_and_the_resumed_run_ends_as_the_undisturbed_one(tmp_path, server) -> None:
    c = config(server.url, sampler={"wait_seconds": 0.3}, max_steps=3, save_steps=1)
    whole = trainer(tmp_path / "whole", c)
    whole.train()
    assert [(m["mismatch"] or 0) < 1e-4 and not m["missing_logprob_share"] for m in whole.display.steps] == [True] * 3
    assert all(m["effective_sample_share"] == pytest.approx(1, abs=1e-6) for m in whole.display.steps)

    cut = trainer(tmp_path / "cut", c)
    step = cut.display.step

    def stop_the_server(metrics: dict[str, Any]) -> None:
        step(metrics)
        server.failures = [0] * 999 if metrics["step"] == 2 else []

    cut.display.step = stop_the_server
    with pytest.raises(RunStopped, match=r"has not answered for 0 s .*; start it, then resume the run"):
        cut.train()
    cut.directory.close()
    assert any("retrying for at most 0 s" in text for text in cut.display.messages)
    server.failures = []
    resumed = trainer(tmp_path / "cut", c, resume=True)
    resumed.train()
    assert resumed.display.messages[0] == "resumed after step 2"
    assert untimed(rows(tmp_path / "cut" / "metrics.jsonl")) == untimed(rows(tmp_path / "whole" / "metrics.jsonl"))
    for left, right in zip(whole.named.values(), resumed.named.values(), strict=True):
        assert torch.equal(left, right)


def test_missing_log_probs_are_counted_and_a_large_mismatch_is_said(tmp_path, server) -> None:
    def forgetful(choice: dict[str, Any]) -> dict[str, Any]:
        choice["logprobs"]["token_logprobs"][0] = None
        choice["logprobs"]["token_logprobs"][-1] = -9999.0
        return choice

    server.edit, server.logprob_offset = forgetful, -0.4
    c = config(server.url, sampler={"tolerance": 1.0}, max_steps=2, correction={"level": "token", "max": 1.3})
    made = trainer(tmp_path, c)
    made.train()
    for metrics in made.display.steps:
        assert 0 < metrics["missing_logprob_share"] < 1
        assert metrics["mismatch"] == pytest.approx(0.4, abs=1e-3)
        assert metrics["corrected_share"] == pytest.approx(1 - metrics["missing_logprob_share"])
    warnings = [
        text for text in made.display.messages if "log-probs differ from the trainer's by 0.400 nats a token" in text
    ]
    assert len(warnings) == 1


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (
            {"finish_reason": "stop", "logprobs": {"tokens": ["token_id:9"], "token_logprobs": [-1.0]}},
            "1 tokens .*'stop'; expected 1 to 3 tokens.* the end at that length or at one of the tokens",
        ),
        (
            {"finish_reason": "length", "logprobs": {"tokens": ["token_id:9"], "token_logprobs": [-1.0]}},
            "a completion of 1 tokens .*'length'; expected 1 to 3 tokens, .*the end at that length",
        ),
        (
            {"logprobs": {"tokens": ["ab"], "token_logprobs": [-1.0]}},
            "token 'ab': expected token_id:N, so the server ignores return_tokens_as_token_ids; update vLLM",
        ),
        (
            {"logprobs": {"tokens": ["token_id:1"], "token_logprobs": []}},
            "1 tokens with 0 log-probs .*each with its log-prob",
        ),
        (
            {"finish_reason": "abort", "logprobs": {"tokens": [], "token_logprobs": []}},
            "0 tokens .*'abort'; expected 1 to 3",
        ),
    ],
)
def test_answers_that_are_no_completion_end_the_run(tmp_path, server, wrong: dict[str, Any], words: str) -> None:
    made = sampler(tmp_path, config(server.url))
    made.sample(PROMPTS, 2, 3, seed=0)
    server.edit = lambda choice: choice | wrong
    with pytest.raises(RunStopped, match=words):
        made.sample(PROMPTS, 2, 3, seed=0)


def test_an_adapter_that_the_server_cannot_take_ends_the_run_at_once(tmp_path, server) -> None:
    server.max_lora_rank = 2
    made = sampler(tmp_path, config(server.url, sampler={"wait_seconds": 60.0}))
    words = r"refuses a request \(500: .*LoRA rank 4 is greater than max_lora_rank 2.*correct the server's settings"
    with pytest.raises(RunStopped, match=words):
        made.sample(PROMPTS, 2, 3, seed=0)
    assert [path for path, _ in server.asked].count("/v1/load_lora_adapter") == 1
    server.max_lora_rank, server.sees_folders = 16, False
    with pytest.raises(ConfigError, match=r"finds no adapter in .*set adapter_dir to a folder that both machines see"):
        made.sample(PROMPTS, 2, 3, seed=0)
    server.sees_folders = True
    server.failures, server.fail_on = [500], "/v1/load_lora_adapter"
    assert made.sample(PROMPTS, 2, 3, seed=0).logprobs is not None, "any other failure may pass"


def test_a_server_needs_the_key_and_room_for_the_longest_completion(tmp_path, server, monkeypatch) -> None:
    server.key = "secret"
    with pytest.raises(
        ConfigError, match=r"refuses requests \(401: .*check the address, and the key in sampler.api_key_env"
    ):
        sampler(tmp_path, config(server.url))
    monkeypatch.setenv("SERVER_KEY", "secret")
    keyed = config(server.url, sampler={"api_key_env": "SERVER_KEY"})
    assert sampler(tmp_path, keyed).sample(PROMPTS, 2, 3, seed=0).logprobs is not None
    server.max_model_len = 72
    words = r"max_completion_length = 73: the context of .* is 72 tokens.*lower one of the two, or .*--max-model-len 73"
    with pytest.raises(ConfigError, match=words):
        sampler(tmp_path, keyed)


def test_a_server_that_cannot_serve_the_run_is_refused(tmp_path, server, monkeypatch) -> None:
    with pytest.raises(ConfigError, match=r"sampler\.model = 'other': .* has the models tiny; set sampler.model to"):
        sampler(tmp_path, config(server.url, sampler={"model": "other"}))
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(
        ConfigError, match="'NO_SUCH_KEY': this environment variable is not set; set it to the server's key"
    ):
        sampler(tmp_path, config(server.url, sampler={"api_key_env": "NO_SUCH_KEY"}))
    server.without_lora = True
    with pytest.raises(ConfigError, match=r"/v1/load_lora_adapter \(404.*VLLM_ALLOW_RUNTIME_LORA_UPDATING"):
        sampler(tmp_path, config(server.url)).sample(PROMPTS, 2, 3, seed=0)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        monkeypatch.setattr(amir.rollout.http_client, "FIRST_DELAY", 60.0)
        with pytest.raises(RunStopped, match=r"has not answered for 0 s .*; start it"):
            sampler(tmp_path, config(url, sampler={"wait_seconds": 0.1}))


def test_a_server_that_hangs_is_given_up(tmp_path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        c = config(f"http://127.0.0.1:{silent.getsockname()[1]}", sampler={"timeout_seconds": 0.2, "wait_seconds": 0.3})
        with pytest.raises(RunStopped, match=r"has not answered for .* s \(ReadTimeout.*; start it"):
            sampler(tmp_path, c)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model on disk, its text the characters side by side."""
    folder = tmp_path_factory.mktemp("base")
    model().save_pretrained(folder)
    written = tokenizer()
    written.backend_tokenizer.decoder = decoders.Fuse()
    written.save_pretrained(folder)
    return folder


Serve = tuple[str, subprocess.Popen[bytes]]


@pytest.fixture(scope="module")
def servers() -> Iterator[list[Serve]]:
    """Every `transformers serve` that was started here; ended with the module."""
    started: list[Serve] = []
    yield started
    for _, process in started:
        process.kill()
        process.wait()


@pytest.fixture
def transformers_serve(servers: list[Serve]) -> Serve:
    """`transformers serve` on loopback, and its process: a new one where a test has ended the last."""
    for needed in ("fastapi", "uvicorn", "openai"):
        pytest.importorskip(needed)
    if servers and servers[-1][1].poll() is None:
        return servers[-1]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve"]
    command += ["--device", "cpu", "--dtype", "float32", "--port", str(port), "--host", "127.0.0.1"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    servers.append((f"http://127.0.0.1:{port}", subprocess.Popen(command, env=environment, **silent)))
    return servers[-1]


def of_transformers(url: str, base: Path, **changes: object) -> RunConfig:
    slow = {"dialect": "transformers", "wait_seconds": 60.0, "timeout_seconds": 30.0}
    return config(url, sampler=slow, model=str(base), **changes)


def test_transformers_serve_samples_what_the_policy_would(transformers_serve, base, tmp_path) -> None:
    c = of_transformers(transformers_serve[0], base, temperature=0.5)
    made = make_sampler(c, load_policy(c), tmp_path, print)
    move(made, 0.3)
    prompt = made._policy.tokenizer("1 + 2=")["input_ids"]
    rollout = made.sample([prompt], 150, 2, seed=0)
    assert rollout.logprobs is None
    usable = ~torch.tensor(rollout.unusable)
    assert 0 < usable.sum() < 150, "ids without a character are drawn too, and must be noticed"
    with torch.no_grad():
        law = (made._policy.base(input_ids=torch.tensor([prompt])).logits[0, -1].double() / 0.5).softmax(-1)
        plain = made._policy.base
        with made._policy.reference():
            other = (plain(input_ids=torch.tensor([prompt])).logits[0, -1].double() / 0.5).softmax(-1)
    first = padded(rollout).completion_ids[usable, 0]
    likelihood, under_base = (float(p[first].log().mean()) for p in (law, other))
    expected = float((law * law.log()).sum())
    assert likelihood == pytest.approx(expected, abs=0.35)
    assert under_base < expected - 0.7, "the test must tell the adapter from the base"


def test_transformers_serve_gets_each_update_and_a_run_ends_resumably_without_it(
    transformers_serve, base, tmp_path
) -> None:
    url, process = transformers_serve
    c = of_transformers(url, base, max_steps=3, save_steps=1, max_completion_length=4, eval_prompts=0)

    def run(resume: bool) -> Trainer:
        made = Trainer(c, load_policy(c), TASKS[c.task.name](c.task), RunDirectory(tmp_path, c, resume=resume), Lines())
        if resume:
            made.resume()
        return made

    made = run(resume=False)
    step = made.display.step

    def end_the_server(metrics: dict[str, Any]) -> None:
        step(metrics)
        if metrics["step"] == 2:
            process.kill()
            process.wait()
            object.__setattr__(made.collector.sampler._settings, "wait_seconds", 0.2)

    made.display.step = end_the_server
    with pytest.raises(RunStopped, match="has not answered"):
        made.train()
    made.directory.close()
    assert [row["step"] for row in rows(tmp_path / "metrics.jsonl")] == [1, 2]
    assert all(row["mismatch"] is None for row in rows(tmp_path / "metrics.jsonl"))
    assert any(row["grad_norm"] > 0 for row in rows(tmp_path / "metrics.jsonl"))
    completions = rows(tmp_path / "completions" / "step-000001.jsonl")
    unusable = [c["reward"] is None for c in completions]
    assert sum(unusable) / len(unusable) == pytest.approx(rows(tmp_path / "metrics.jsonl")[0]["unusable_share"])
    assert run(resume=True).finished_steps == 2

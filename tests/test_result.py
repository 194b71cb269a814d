"""What a finished run hands on: a result that loads from anywhere with its tokenizer, a card, modes, and warnings."""

import importlib.metadata
import json
import logging
import os
import re
import stat
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer

import amir.__main__ as command
import amir.policy.load
from amir.config_reader import config_yaml
from amir.policy.checkpoint import save_result
from amir.run.notices import Notices, library_notices
from tiny import model, policy, run_config, tokenizer

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}:"


def finished(folder: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Path:
    """The run directory of a run of the model in `folder`/tiny, named relatively."""
    monkeypatch.chdir(folder)
    if not Path("tiny").exists():
        model().save_pretrained("tiny")
        tokenizer().save_pretrained("tiny")
    settings = {"model": "./tiny", "output_dir": "run", "max_steps": 1, "chat_template": TEMPLATE} | changes
    Path("run.yaml").write_text(config_yaml(run_config(**settings)))
    monkeypatch.setattr(sys, "argv", ["amir", "train", "run.yaml"])
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == 0
    return folder / "run"


@pytest.mark.parametrize("lora", [{"r": 4, "alpha": 8}, None], ids=["adapter", "model"])
def test_the_result_loads_from_anywhere_and_prompts_as_the_run_did(
    lora: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = finished(tmp_path, monkeypatch, lora=lora, system_prompt="Be brief.", max_prompt_length=99)
    folder = run / ("adapter" if lora else "model")
    monkeypatch.chdir("/")
    if lora:
        recorded = json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]
        assert recorded == str(tmp_path / "tiny")
    loader = AutoPeftModelForCausalLM if lora else AutoModelForCausalLM
    ids = torch.arange(5, 15)[None]
    with torch.no_grad():
        assert loader.from_pretrained(folder)(ids).logits.isfinite().all()
    chat = [{"role": "user", "content": "1+1"}]
    told = AutoTokenizer.from_pretrained(folder).apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert told == "<user>1+1:"

    card = ModelCard.load(folder / "README.md")
    monkeypatch.chdir(folder)
    capsys.readouterr()
    exec(re.search(r"```python\n(.*?)```", card.text, re.DOTALL)[1], {})  # what the card says loads it
    assert capsys.readouterr().out


def test_the_card_states_settings_data_results_and_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = finished(tmp_path, monkeypatch, seed=3)
    card = ModelCard.load(run / "adapter" / "README.md")
    assert (card.data.library_name, card.data.pipeline_tag, card.data.base_model) == ("peft", "text-generation", None)
    settings = yaml.safe_load(re.search(r"```yaml\n(.*?)```", card.text, re.DOTALL)[1])
    assert (settings["seed"], settings["model"]) == (3, "./tiny")
    assert "Task: name 'arithmetic'." in card.text
    assert "`correctness` (weight 1)" in card.text
    (metrics,) = (json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines())
    assert f"| 1 | training | {metrics['reward']:.3f} | {metrics['success']:.3f} |" in card.text
    assert "| 0 | held out |" in card.text
    assert f"torch {importlib.metadata.version('torch')}" in card.text


@pytest.mark.parametrize("mask", [0o022, 0o027])
def test_every_file_has_the_mode_of_the_umask(mask: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.umask(mask)
    try:
        run = finished(tmp_path, monkeypatch, save_steps=1)
    finally:
        os.umask(before)
    files = [path for path in run.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} >= {".safetensors", ".json", ".jsonl", ".jinja", ".md"}
    assert {path: oct(stat.S_IMODE(path.stat().st_mode)) for path in files} == dict.fromkeys(files, oct(0o666 & ~mask))


def test_a_tokenizer_that_cannot_be_written_is_reported_as_the_weights_are(tmp_path: Path) -> None:
    class OnFullDisk:
        def save_pretrained(self, folder: str) -> None:
            tokenizer().backend_tokenizer.save("/dev/full")

    with pytest.raises(OSError, match=r"adapter cannot be saved \(No space left on device .*tokenizer\); free disk"):
        save_result(tmp_path / "adapter", policy().model, OnFullDisk())
    assert list(tmp_path.iterdir()) == []


def test_a_library_warning_reaches_the_terminal_and_the_log_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load = amir.policy.load._load

    def loud(*arguments: Any, **options: Any) -> Any:
        for _ in range(2):
            warnings.warn("the adapter is odd", stacklevel=1)
            logging.getLogger("transformers.modeling_utils").warning("\x1b[1mLOAD REPORT\x1b[0m\nlm_head | odd")
            logging.getLogger("bitsandbytes.nn").warning("the bits are odd")
        warnings.warn("to be removed in the next release", FutureWarning, stacklevel=1)
        return load(*arguments, **options)

    monkeypatch.setattr(amir.policy.load, "_load", loud)
    run = finished(tmp_path, monkeypatch)
    told, log = capsys.readouterr().out, (run / "log.txt").read_text()
    for line in ("UserWarning: the adapter is odd", "transformers: LOAD REPORT lm_head", "bitsandbytes: the bits"):
        assert told.count(line) == log.count(line) == 1
    assert log.count("\n") == len([line for line in log.splitlines() if line[:2] == "20"])


def test_an_ordinary_run_has_no_notices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    monkeypatch.setattr(Notices, "take", lambda self, text: taken.append(text))
    finished(tmp_path, monkeypatch, save_steps=1)
    assert taken == []


def test_deprecations_inside_libraries_are_no_notices() -> None:
    said: list[str] = []
    with library_notices() as notices:
        notices.pass_to(said.append)
        logging.getLogger("transformers.generation").warning("`past_key_values` is deprecated. Use `cache` instead.")
        logging.getLogger("transformers.generation").warning("the pad token is not set")
    assert said == ["transformers: the pad token is not set"]


def test_notices_end_with_their_context() -> None:
    before = logging.getLogger().handlers[:]
    with library_notices() as notices:
        notices.take("long " * 1000)
        said: list[str] = []
        notices.pass_to(said.append)
        notices.take("a\n b")
        notices.take("`past_key_values` is deprecated. Use `cache` instead.")
    assert logging.getLogger().handlers == before
    assert (len(said[0]), *said[1:]) == (2000, "a b")

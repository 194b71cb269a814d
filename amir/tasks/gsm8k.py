"""GSM8K grade-school questions (Cobbe et al., 2110.14168); the answer stands after `####`."""

import json
from importlib import resources
from pathlib import Path

from ..config import ConfigError, Gsm8kTask, read_utf8
from .task import Example, Task

HUB_NAME = "openai/gsm8k"
HELD_OUT_SHARE = 0.2
"""Of a single file without a test split, its last fifth is held out."""


def load(settings: Gsm8kTask) -> Task:
    """Reads the shipped sample, a JSONL file, a folder with train.jsonl and test.jsonl, or the hub."""
    if settings.path is None:
        return _from_hub()
    if settings.path == "sample":
        source = resources.files("amir.tasks") / "gsm8k_sample.jsonl"
        return _split(_examples(source.read_text(encoding="utf-8"), "gsm8k_sample.jsonl"))
    path = Path(settings.path).expanduser()
    if path.is_dir():
        return Task(_read(path / "train.jsonl"), _read(path / "test.jsonl"))
    return _split(_read(path))


def _read(path: Path) -> list[Example]:
    if not path.is_file():
        raise ConfigError(f"task.path = {str(path)!r}: no such file")
    return _examples(read_utf8(path), str(path))


def _examples(text: str, name: str) -> list[Example]:
    examples = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            examples.append(_example(row["question"], row["answer"]))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{name}, line {number}: {type(error).__name__}: {error}") from None
    if not examples:
        raise ConfigError(f"{name}: holds no question")
    return examples


def _final_answer(answer: str) -> str:
    _, mark, final = answer.partition("####")
    if not mark or not final.strip():
        raise ValueError("the answer has no '####' with a final number behind it")
    return final.strip().replace(",", "")


def _example(question: str, answer: str) -> Example:
    if not isinstance(question, str) or not question.strip():
        raise ValueError(f"question must be text, got {question!r}")
    return Example(question, _final_answer(answer))


def _split(examples: list[Example]) -> Task:
    held_out = max(1, round(len(examples) * HELD_OUT_SHARE)) if len(examples) > 1 else 0
    return Task(examples[: len(examples) - held_out], examples[len(examples) - held_out :])


def _from_hub() -> Task:
    from datasets import load_dataset

    try:
        splits = load_dataset(HUB_NAME, "main")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"task.path unset: {HUB_NAME} could not be read from the hub ({error}); name a file"
        ) from None
    train, test = ([_example(r["question"], r["answer"]) for r in splits[s]] for s in ("train", "test"))
    return Task(train, test)

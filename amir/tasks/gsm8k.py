"""GSM8K grade-school questions (Cobbe et al., 2110.14168); the answer stands after `####`."""

import json
from importlib import resources
from pathlib import Path

from ..config import ConfigError, Gsm8kTask
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
        return _split(_examples(source.read_text(), "gsm8k_sample.jsonl"))
    path = Path(settings.path).expanduser()
    if path.is_dir():
        return Task(_read(path / "train.jsonl"), _read(path / "test.jsonl"))
    return _split(_read(path))


def _read(path: Path) -> list[Example]:
    if not path.is_file():
        raise ConfigError(f"task.path = {str(path)!r}: no such file")
    return _examples(path.read_text(), str(path))


def _examples(text: str, name: str) -> list[Example]:
    examples = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            examples.append(Example(row["question"], _final_answer(row["answer"])))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{name}, line {number}: {type(error).__name__}: {error}") from None
    if not examples:
        raise ConfigError(f"{name}: holds no question")
    return examples


def _final_answer(answer: str) -> str:
    _, mark, final = answer.partition("####")
    if not mark:
        raise ValueError("the answer has no '####' before its final number")
    return final.strip().replace(",", "")


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
    train, test = ([Example(r["question"], _final_answer(r["answer"])) for r in splits[s]] for s in ("train", "test"))
    return Task(train, test)

"""The task `gsm8k`: grade-school questions (Cobbe et al., arXiv 2110.14168) whose answer follows `####`."""

from importlib import resources
from pathlib import Path

from ..config import DatasetTask, Gsm8kTask
from .dataset import make_examples
from .rows import read_rows
from .task import Example, Task, disjoint

HUB_NAME = "openai/gsm8k"
HELD_OUT_SHARE = 0.2
"""The last fifth of a single file is held out."""

COLUMNS = DatasetTask(name="dataset", path=HUB_NAME, prompt="{question}", answer="answer", answer_format="gsm8k")


def load(settings: Gsm8kTask) -> Task:
    """Reads the shipped sample, a JSONL file, a folder with train.jsonl and test.jsonl, or the hub's openai/gsm8k."""
    if settings.path is None:
        train, test = (read_rows(HUB_NAME, subset="main", split=split) for split in ("train", "test"))
        return disjoint(make_examples(train, COLUMNS), make_examples(test, COLUMNS))
    if settings.path == "sample":
        with resources.as_file(resources.files("amir.tasks") / "gsm8k_sample.jsonl") as sample:
            return _split(_read(sample))
    path = Path(settings.path).expanduser()
    if path.is_dir():
        return disjoint(_read(path / "train.jsonl"), _read(path / "test.jsonl"))
    return _split(_read(path))


def _read(path: Path) -> list[Example]:
    return make_examples(read_rows(str(path)), COLUMNS)


def _split(examples: list[Example]) -> Task:
    held_out = max(1, round(len(examples) * HELD_OUT_SHARE)) if len(examples) > 1 else 0
    return disjoint(examples[: len(examples) - held_out], examples[len(examples) - held_out :])

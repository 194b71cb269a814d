"""GSM8K rows: the shipped sample, files, folders, and errors that name file and line."""

import json

import pytest

from amir.config import Gsm8kTask
from amir.errors import ConfigError
from amir.tasks import TASKS


def load(path: object):
    return TASKS["gsm8k"](Gsm8kTask(name="gsm8k", path=str(path)))


def row(answer: str) -> str:
    return json.dumps({"question": f"How many make {answer}?", "answer": f"Some steps.\n#### {answer}"})


def test_the_sample_has_fifty_questions_with_integer_answers() -> None:
    task = load("sample")
    assert (len(task.train), len(task.held_out)) == (40, 10)
    for example in task.train + task.held_out:
        assert int(example.answer) >= 0
        assert len(example.question) > 20


def test_a_file_is_split_and_commas_go(tmp_path) -> None:
    (tmp_path / "rows.jsonl").write_text("\n".join(row(a) for a in ["1,234", "-5", "7", "8", "9"]) + "\n\n")
    task = load(tmp_path / "rows.jsonl")
    assert [e.answer for e in task.train] == ["1234", "-5", "7", "8"]
    assert [e.answer for e in task.held_out] == ["9"]


def test_line_separators_inside_text_and_a_byte_order_mark_are_read(tmp_path) -> None:
    text = json.dumps({"question": "a\u2028b\u0085c", "answer": "#### 3"}, ensure_ascii=False)
    (tmp_path / "rows.jsonl").write_text("\ufeff" + text, encoding="utf-8")
    assert load(tmp_path / "rows.jsonl").train[0].question == "a\u2028b\u0085c"


def test_a_folder_keeps_its_own_split(tmp_path) -> None:
    (tmp_path / "train.jsonl").write_text(row("1"))
    (tmp_path / "test.jsonl").write_text(row("2"))
    task = load(tmp_path)
    assert [e.answer for e in task.train + task.held_out] == ["1", "2"]


@pytest.mark.parametrize(
    "line",
    [
        "{broken",
        '{"question": "q"}',
        '{"question": "q", "answer": "no mark"}',
        '{"question": null, "answer": "#### 1"}',
        "[1]",
        '{"answer": "#### 1"}',
        row(""),
    ],
)
def test_a_broken_line_is_named(tmp_path, line: str) -> None:
    (tmp_path / "rows.jsonl").write_text(f"{row('1')}\n{line}\n")
    with pytest.raises(ConfigError, match=r"rows\.jsonl, line 2: .*(correct or remove|expected|expects)"):
        load(tmp_path / "rows.jsonl")


def test_missing_and_empty_files_are_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"absent.jsonl': no such file; expected an existing file"):
        load(tmp_path / "absent.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match=r"empty.jsonl': it has 0 rows; expected at least 1"):
        load(tmp_path / "empty.jsonl")

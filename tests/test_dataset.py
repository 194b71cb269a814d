"""Your own rows: every format gives the same examples, errors name file and line, nothing is trained and held out."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from amir.config import DatasetTask
from amir.errors import ConfigError
from amir.tasks import TASKS, Example, Task
from amir.tasks.prompts import encode_prompts, prompt_ids, refuse_foreign_tokenizer
from amir.tasks.rows import COMPRESSED, read_rows
from tiny import VOCAB, run_config, tokenizer

ROWS = [{"question": f"What is {n} + 1?", "answer": str(n + 1), "topic": "sums\nand, more"} for n in range(10)]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".jsonl":
        path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]), delimiter="\t" if path.suffix == ".tsv" else ",")
            writer.writeheader()
            writer.writerows(rows)
    return path


def load(path: object, **settings: object) -> Task:
    if "messages" not in settings:
        settings.setdefault("prompt", "{question}")
    return TASKS["dataset"](DatasetTask.model_validate({"name": "dataset", "path": str(path)} | settings))


@pytest.mark.parametrize("ending", ["jsonl", "json", "csv", "tsv", "parquet"])
def test_every_format_gives_the_same_examples(tmp_path: Path, ending: str) -> None:
    task = load(write(tmp_path / f"rows.{ending}", ROWS), prompt="{{Q}} {question}\n{topic}:")
    assert [e.question for e in task.train] == [f"{{Q}} {row['question']}\n{row['topic']}:" for row in ROWS]
    assert [e.answer for e in task.train] == [row["answer"] for row in ROWS]
    assert [e.columns for e in task.train] == ROWS
    assert task.held_out == []


def test_a_dataset_of_the_library_is_read_by_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "mine"
    folder.mkdir()
    write(folder / "train.jsonl", ROWS[:7])
    write(folder / "test.jsonl", ROWS[7:])
    task = load(folder, held_out_split="test")
    assert [len(task.train), len(task.held_out)] == [7, 3]
    assert task.train[0].columns == ROWS[0]
    with pytest.raises(ConfigError, match=r"mine.*or a dataset; load_dataset fails: .*\bdev\b"):
        load(folder, split="dev")
    with pytest.raises(ConfigError, match=r"absent'.*expected a file that ends in .jsonl.*load_dataset fails"):
        load(tmp_path / "absent")


def test_a_dataset_saved_to_disk_is_read(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    rows = [{"question": f"q{i}", "answer": f"{i}"} for i in range(3)]
    Dataset.from_list(rows).save_to_disk(tmp_path / "one")
    DatasetDict({"train": Dataset.from_list(rows), "dev": Dataset.from_list(rows[:1])}).save_to_disk(tmp_path / "two")
    for path, split, expected in (("one", None, 3), ("two", None, 3), ("two", "dev", 1)):
        task = load(tmp_path / path, split=split, prompt="{question}")
        assert [example.answer for example in task.train] == [str(i) for i in range(expected)]
    (tmp_path / "one" / "broken").mkdir()
    (tmp_path / "one" / "broken" / "state.json").write_text("{")
    with pytest.raises(ConfigError, match=r"broken': expected a file .*load_from_disk fails"):
        load(tmp_path / "one" / "broken", prompt="{question}")
    for path, split, words in (
        ("one", "dev", "task.split = 'dev': .* has no splits; leave split out"),
        ("two", "test", "task.split = 'test': .* has no such split; expected train, dev"),
    ):
        with pytest.raises(ConfigError, match=words):
            load(tmp_path / path, split=split, prompt="{question}")


def test_a_held_out_share_is_the_same_rows_every_time_and_all_of_them_somewhere(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", ROWS)
    first, second = (load(path, held_out=0.3) for _ in range(2))
    assert first == second
    assert len(first.held_out) == 3
    assert {e.question for e in first.train + first.held_out} == {row["question"] for row in ROWS}
    assert [e.question for e in first.held_out] != [row["question"] for row in ROWS[7:]]
    with pytest.raises(ConfigError, match=r"held_out = 0.01: that is 0 of 10 rows; expected a share that leaves rows"):
        load(path, held_out=0.01)


def test_what_is_held_out_is_not_trained_on_and_that_is_said(tmp_path: Path) -> None:
    train = write(tmp_path / "train.jsonl", ROWS)
    held = write(tmp_path / "held.csv", [ROWS[2] | {"question": "What  is 2 + 1?\n"}, ROWS[5]])
    task = load(train, held_out_path=str(held))
    assert [len(task.train), len(task.held_out)] == [8, 2]
    assert task.notes == ("dropped 2 of 10 training examples, which repeat a held-out prompt",)
    with pytest.raises(ConfigError, match="all 10 training examples repeat a held-out prompt; expected held-out data"):
        load(train, held_out_path=str(train))
    twins = load(write(tmp_path / "twins.jsonl", ROWS * 2), held_out=0.25)
    assert not {e.question for e in twins.train} & {e.question for e in twins.held_out}


@pytest.mark.parametrize(
    ("text", "format_", "expected"),
    [
        ("so\n#### 1,234", "gsm8k", "1234"),
        ("so \\boxed{1} or \\boxed{\\frac{1}{2}}.", "boxed", "\\frac{1}{2}"),
        (27.0, "plain", "27.0"),
        (-5, "plain", "-5"),
        (["1", "x"], "plain", "1, x"),
        ("a\nb", "plain", "a\nb"),
    ],
)
def test_answers(tmp_path: Path, text: object, format_: str, expected: str) -> None:
    path = write(tmp_path / "rows.jsonl", [{"question": "q", "answer": text}])
    assert load(path, answer_format=format_).train[0].answer == expected


CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1 + 1"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "and 2 + 2"},
]


def test_chat_columns_are_rendered_by_the_template(tmp_path: Path) -> None:
    example = load(write(tmp_path / "rows.jsonl", [{"chat": CHAT, "answer": 4}]), messages="chat").train[0]
    assert example.question == "and 2 + 2"
    tiny = tokenizer()
    assert tiny.decode(prompt_ids(tiny, example, run_config())).replace(" ", "") == "Bebrief.1+12and2+2="
    with pytest.raises(
        ConfigError, match=r"'think': .*already begin with one \('Be brief.'\); leave system_prompt out"
    ):
        prompt_ids(tiny, example, run_config(system_prompt="think"))
    tiny.chat_template = None
    with pytest.raises(
        ConfigError, match=r"task.messages: the model's tokenizer has no chat template.*set chat_template"
    ):
        prompt_ids(tiny, example, run_config())


def test_a_shipped_system_prompt_is_named(tmp_path: Path) -> None:
    tiny = tokenizer()
    shipped, own = (
        tiny.decode(prompt_ids(tiny, Example("1+1", "2"), run_config(system_prompt=text)))
        for text in ("calibrated", "Be brief.")
    )
    assert "< c o n f i d e n c e >" in shipped
    assert own.startswith("B e")


def test_a_prompt_holds_a_token() -> None:
    tiny = tokenizer()
    empty = Example("", "2", place="rows.jsonl, line 3")
    for template, words in (("", "the chat template"), (None, "its question")):
        tiny.chat_template = template
        with pytest.raises(
            ConfigError, match=f"rows.jsonl, line 3: {words} gives a prompt of 0 tokens; expected at least"
        ):
            prompt_ids(tiny, empty, run_config())


LINES = [
    ("{oops", "rows.jsonl, line 3: not JSON (Expecting property name"),
    ("{oops", "; correct or remove it"),
    ("[" * 100_000, "rows.jsonl, line 3: not JSON"),
    (
        '{"question": "q", "answer": "\\ud800"}',
        "line 3: the surrogate '\\ud800' is half of a character; expected valid",
    ),
    ("[1]", "line 3: expected an object with columns, got a list"),
    ('{"answer": "1", "topic": 2}', "line 3: no column 'question'; expected one of 'answer', 'topic'"),
    ('{"question": "q"}', "line 3: no column 'answer'; expected one of 'question'"),
    ('{"question": null, "answer": "1"}', "line 3: column 'question' is None; expected text or a finite number"),
    ('{"question": "q", "answer": NaN}', "line 3: column 'answer' is nan; expected text or a finite number"),
    ('{"question": " ", "answer": "1"}', "line 3: its prompt is empty (' '); correct or remove the row"),
    (
        '{"question": {"a": 1}, "answer": "1"}',
        "line 3: column 'question' is a dict; expected text, a number, or a list",
    ),
    ('{"question": "q", "answer": ""}', "line 3: column 'answer' is ''; answer_format = 'plain' expects text"),
    (
        '{"question": {"a": {"b": 1}}, "answer": "1"}',
        "or a list of those; name one of its fields, question.a.b",
    ),
    ('{"question": {}, "answer": "1"}', "line 3: column 'question' is a dict; expected text"),
    ('{"question": ["a", null], "answer": "1"}', "line 3: column 'question' is None; expected text or a finite number"),
    ('{"question": "q", "answer": [NaN]}', "line 3: column 'answer' is nan; expected text or a finite number"),
    ('{"question": "q", "question": "p", "answer": "1"}', "line 3: key 'question' is a duplicate; remove one of the"),
    ('{"question": "q", "answer": "1", "x": [{"y": 1, "y": 1}]}', "line 3: key 'y' is a duplicate; remove one of the"),
    ('{"question": "q", "answer": [[1]]}', "line 3: column 'answer' is a list; expected text, a number, or a list of"),
]


@pytest.mark.parametrize(("line", "words"), LINES, ids=[words for _, words in LINES])
def test_a_broken_line_is_named(tmp_path: Path, line: str, words: str) -> None:
    path = write(tmp_path / "rows.jsonl", ROWS[:1])
    path.write_text(path.read_text() + "\n" + line + "\n" + json.dumps(ROWS[1]) + "\n")
    with pytest.raises(ConfigError) as refused:
        load(path)
    assert words in str(refused.value)
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.csv", "question,answer\n1,2\n1,2,3\n", "a.csv, line 3: 3 cells, expected 2 as in the header"),
        ("a.csv", 'question,answer\n"1,2\n', "a.csv, line 2: not CSV (unexpected end of data); correct the line"),
        ("a.csv", "question,question\n1,2\n", "line 1: column 'question' is a duplicate; rename one of the two"),
        ("a.csv", "question,answer\n", "a.csv': it has 0 rows; expected at least 1"),
        ("a.json", '{"question": "q"}', "a.json: expected a list of objects, got a dict"),
        ("a.json", "[1]", "a.json, item 1: expected an object with columns, got a int"),
        ("a.jsonl", "\n\n", "a.jsonl': it has 0 rows; expected at least 1"),
        ("a.parquet", "no", "a.parquet: expected a parquet file ("),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, name: str, text: str, words: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError) as refused:
        load(tmp_path / name)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ("hello", "column 'chat' is 'hello'; expected a list of messages with role and content"),
        ([], "column 'chat' is []; expected a list of messages with role and content"),
        (
            [{"role": "usr", "content": "q"}],
            "message 0 is {'role': 'usr', 'content': 'q'}; expected a role (system, user",
        ),
        ([{"role": "user", "content": 3}], "message 0 is {'role': 'user', 'content': 3}; expected a role"),
        ([{"role": "user", "content": " \n"}], "its prompt is empty (' \\n'); correct or remove the row"),
        (
            [{"role": "user", "content": "q", "name": "me", "tool_calls": [{"id": 1}], "images": None}],
            "message 0 has 'name', 'tool_calls' beside role and content; prompts are text only",
        ),
        (CHAT[:3], "ends with a message of role 'assistant'; expected the user's last"),
    ],
)
def test_broken_messages_are_named(tmp_path: Path, messages: object, words: str) -> None:
    path = write(tmp_path / "rows.jsonl", [{"chat": messages, "answer": 4}])
    with pytest.raises(ConfigError, match=r"rows\.jsonl, line 1") as refused:
        load(path, messages="chat")
    assert words in str(refused.value)


@pytest.mark.parametrize(
    "prompt",
    [
        "{question",
        "{question.upper}",
        "{question!r}",
        "question",
        "./prompt.txt",
        "{{question}}",
        "{question:>9}",
        "{}",
        "{0}",
    ],
)
def test_a_template_takes_columns_alone(tmp_path: Path, prompt: str) -> None:
    words = r"task.prompt = '.*(; write a literal|expected only the name|names no column)|no column .*; expected one of"
    with pytest.raises(ConfigError, match=words):
        load(write(tmp_path / "rows.jsonl", ROWS), prompt=prompt)


def test_a_file_has_no_split(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"task.split = 'test': .*is a file, which has no split; leave split out"):
        read_rows(str(write(tmp_path / "rows.jsonl", ROWS)), split="test")


def test_prompts_out_of_bounds_are_left_out_and_counted_or_refused() -> None:
    examples = [Example("1" * n, "1") for n in (3, 9, 20, 30)]
    said: list[str] = []
    config = run_config(max_prompt_length=20, min_prompt_length=5)
    kept = encode_prompts(examples, tokenizer(), config, "training", VOCAB, said.append)
    assert [len(prompt.ids) for prompt in kept] == [10]
    assert said == [
        "dropped 2 of 4 training prompts, which are longer than max_prompt_length = 20 tokens",
        "dropped 1 of 4 training prompts, which are shorter than min_prompt_length = 5 tokens",
    ]
    words = r"training prompt 3 has 21 tokens .*'refuse'; raise max_prompt_length, .*begins '1111"
    with pytest.raises(ConfigError, match=words):
        encode_prompts(
            examples, tokenizer(), run_config(max_prompt_length=20, overlong_prompts="refuse"), "training", VOCAB, print
        )


def test_held_out_prompts_are_encoded_only_as_far_as_they_are_wanted() -> None:
    def examples():
        yield from [Example("1" * 30, "1"), Example("2", "1"), Example("3", "1"), Example("4", "1")]
        raise AssertionError("read too far")

    config = run_config(max_prompt_length=20)
    assert encode_prompts(examples(), tokenizer(), config, "held-out", VOCAB, print, limit=0) == []
    kept = encode_prompts(examples(), tokenizer(), config, "held-out", VOCAB, print, limit=2)
    assert [prompt.example.question for prompt in kept] == ["2", "3"]


def test_tokens_that_the_model_does_not_have_are_refused() -> None:
    tiny = tokenizer()
    refuse_foreign_tokenizer(tiny, [0, 1], len(tiny))
    with pytest.raises(ConfigError, match=r"have 60 tokens, but the tokenizer has 98 tokens; expected the model's own"):
        refuse_foreign_tokenizer(tiny, [0, 1], 60)
    with pytest.raises(ConfigError, match="the tokenizer has the token 200; expected the model's own tokenizer"):
        refuse_foreign_tokenizer(tiny, [0, 200], VOCAB)
    tiny.add_special_tokens({"additional_special_tokens": ["<image>"]})
    refuse_foreign_tokenizer(tiny, [0, 1], 98)
    with pytest.raises(
        ConfigError, match=r"prompt 2 has the token 98; the model's embeddings have 98 tokens\. Use the"
    ):
        encode_prompts([Example("a", "1"), Example("<image>", "1")], tiny, run_config(), "training", 98, print)


@pytest.mark.parametrize(
    ("row", "columns", "expected"),
    [
        ({"extra": {"problem": "2+2"}, "answer": 4}, {"prompt": "{extra.problem}?"}, ("2+2?", "4")),
        ({"q": "2+2", "reward_model": {"ground_truth": "4"}}, {"answer": "reward_model.ground_truth"}, ("2+2", "4")),
        ({"q": "2+2", "a": {"b": {"c": ["3", "4"]}}}, {"answer": "a.b.c.1"}, ("2+2", "4")),
        ({"q": "2+2", "a": {"b": ["3", "4"]}}, {"answer": "a.b"}, ("2+2", "3, 4")),
        ({"q": "2+2", "a.b": "4", "a": {"b": "5"}}, {"answer": "a.b"}, ("2+2", "4")),
    ],
)
def test_a_dot_leads_to_a_field(tmp_path: Path, row: dict[str, Any], columns: dict[str, str], expected: object) -> None:
    example = load(write(tmp_path / "rows.jsonl", [row]), **{"prompt": "{q}"} | columns).train[0]
    assert (example.question, example.answer) == expected
    assert example.columns == row


def test_rows_made_for_verl_are_read(tmp_path: Path) -> None:
    row = {"prompt": CHAT, "reward_model": {"style": "rule", "ground_truth": "4"}, "data_source": "sums"}
    path = write(tmp_path / "rows.parquet", [row])
    example = load(path, messages="prompt", answer="reward_model.ground_truth").train[0]
    assert (example.question, example.answer, len(example.messages)) == ("and 2 + 2", "4", 4)
    assert example.columns["reward_model"] == row["reward_model"]
    with pytest.raises(ConfigError, match=r"is a dict; .*one of its fields, reward_model.style, reward_model.gr"):
        load(path, messages="prompt", answer="reward_model")
    with pytest.raises(ConfigError, match=r"no column 'reward_model.gold'; expected one of .*'reward_model.ground"):
        load(path, messages="prompt", answer="reward_model.gold")


@pytest.mark.parametrize(
    ("number", "text"),
    [("0.00001", "0.00001"), ("1e-7", "0.0000001"), ("1e22", "1" + "0" * 22), ("2.50", "2.5"), ("-0.5", "-0.5")],
)
def test_numbers_are_texts_without_an_exponent(tmp_path: Path, number: str, text: str) -> None:
    (tmp_path / "rows.jsonl").write_text(f'{{"question": {number}, "answer": {number}}}\n')
    example = load(tmp_path / "rows.jsonl").train[0]
    assert (example.question, example.answer) == (text, text)
    assert example.columns["answer"] == float(number)


def test_no_length_is_too_long(tmp_path: Path) -> None:
    """The defaults of csv (131,072 characters a cell) and of Python's integers (4,300 digits) do not apply."""
    limit = csv.field_size_limit()
    long = [{"question": "x" * 140_000, "answer": "4"}, {"question": "y", "answer": "z\n" * 100_000 + "z"}]
    for name in ("rows.csv", "rows.tsv", "rows.jsonl", "rows.json"):
        assert [e.columns for e in load(write(tmp_path / name, long)).train] == long
    assert csv.field_size_limit() == limit
    (tmp_path / "digits.jsonl").write_text(f'{{"question": "q", "answer": -{"7" * 5000}}}\n')
    assert load(tmp_path / "digits.jsonl").train[0].answer == "-" + "7" * 5000


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz"])
@pytest.mark.parametrize("ending", ["jsonl", "json", "csv", "tsv"])
def test_text_files_may_be_compressed(tmp_path: Path, ending: str, suffix: str) -> None:
    plain = write(tmp_path / f"rows.{ending}", ROWS)
    packed = plain.with_name(plain.name + suffix)
    with COMPRESSED[suffix](packed, "wb") as file:
        file.write(plain.read_bytes())
    assert [e.columns for e in load(packed).train] == ROWS
    packed.write_bytes(packed.read_bytes()[:-20])
    with pytest.raises(ConfigError, match=rf"rows.{ending}{suffix}: cannot be read \(.*\); expected a readable file"):
        load(packed)
    packed.write_bytes(b"question,answer\n1,2\n")
    with pytest.raises(ConfigError, match=rf"rows.{ending}{suffix}: cannot be read \(.*\); expected a readable file"):
        load(packed)


def test_several_files_are_one_table(tmp_path: Path) -> None:
    for number in range(3):
        write(tmp_path / f"part-{number}.jsonl", ROWS[number : number + 1])
    write(tmp_path / "more.csv", ROWS[5:7])
    write(tmp_path / "odd[1].jsonl", ROWS[8:9])
    whole = load(tmp_path / "part-*.jsonl")
    assert [e.columns for e in whole.train] == ROWS[:3]
    assert whole.train[1].place.endswith("part-1.jsonl, line 1")
    paths = [str(tmp_path / name) for name in ("more.csv", "part-[02].jsonl", "odd[1].jsonl")]
    settings = {"name": "dataset", "prompt": "{question}", "path": paths, "held_out_path": [str(tmp_path / "more.csv")]}
    task = TASKS["dataset"](DatasetTask.model_validate(settings))
    assert [e.columns for e in task.train] == [ROWS[0], ROWS[2], ROWS[8]]
    assert [e.columns for e in task.held_out] == ROWS[5:7]
    with pytest.raises(ConfigError, match=r"absent-\*.jsonl': no file matches this pattern; expected at least one"):
        load(tmp_path / "absent-*.jsonl")
    with pytest.raises(ConfigError, match=r"part-0.jsonl' is a duplicate; name each file once"):
        read_rows([str(tmp_path / "part-*.jsonl"), str(tmp_path / "part-0.jsonl")])
    with pytest.raises(ConfigError, match=r"absent.jsonl': no such file"):
        read_rows([str(tmp_path / "more.csv"), str(tmp_path / "absent.jsonl")])


def test_a_row_without_any_text_of_its_own_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [{"question": " ", "context": "", "answer": "4"}])
    with pytest.raises(ConfigError, match=r"line 1: its prompt is empty \('Q:  A:"):
        load(path, prompt="Q: {question}A:{context}")
    filled = write(tmp_path / "filled.jsonl", [{"question": "q", "context": "", "answer": "4"}])
    assert load(filled, prompt="{context} {question}").train[0].question == " q"

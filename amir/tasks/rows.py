"""Reads the rows of a table, each with its place for error messages: a file and line, or a dataset and row."""

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..config_reader import read_utf8
from ..errors import ConfigError

READERS = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
"""Suffixes of the files that are read here; other paths are passed to the library `datasets`."""

Row = tuple[str, dict[str, Any]]


def read_rows(path: str, key: str = "task.path", subset: str | None = None, split: str | None = None) -> list[Row]:
    """Place and columns of every row of a file, or of a split of a dataset; `key` is the setting with the path."""
    kind = Path(path).suffix.lower()
    if kind not in READERS:
        rows = list(_dataset(path, key, subset, split))
    else:
        for setting, value in (("subset", subset), ("split", split)):
            if value is not None:
                raise ConfigError(
                    f"task.{setting} = {value!r}: {key} = {path!r} is a file, which has no {setting}; leave "
                    f"{setting} out"
                )
        file = Path(path).expanduser()
        if not file.is_file():
            raise ConfigError(f"{key} = {path!r}: no such file; expected an existing file, or the name of a dataset")
        rows = list(_file(file, kind))
    if not rows:
        raise ConfigError(f"{key} = {path!r}: it has 0 rows; expected at least 1")
    return rows


def _file(path: Path, kind: str) -> Iterator[Row]:
    if kind == ".jsonl":
        return _jsonl(read_utf8(path), str(path))
    if kind == ".json":
        return _json(read_utf8(path), str(path))
    if kind == ".parquet":
        return _parquet(path)
    return _csv(read_utf8(path), str(path), "\t" if kind == ".tsv" else ",")


def _jsonl(text: str, name: str) -> Iterator[Row]:
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            place = f"{name}, line {number}"
            yield place, _object(_parsed(line, place), place)


def _json(text: str, name: str) -> Iterator[Row]:
    items = _parsed(text, name)
    if not isinstance(items, list):
        raise ConfigError(f"{name}: expected a list of objects, got a {type(items).__name__}; JSON lines end in .jsonl")
    for number, item in enumerate(items, start=1):
        yield f"{name}, item {number}", _object(item, f"{name}, item {number}")


def _parsed(text: str, place: str) -> Any:
    try:
        parsed = json.loads(text)
        if "\\ud" in text.lower():
            json.dumps(parsed, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{place}: the surrogate {error.object[error.start]!r} is half of a character; expected valid Unicode"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{place}: not JSON ({error}); correct or remove it") from None
    return parsed


def _object(row: Any, place: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise ConfigError(f"{place}: expected an object with columns, got a {type(row).__name__}")
    return row


def _csv(text: str, name: str, delimiter: str) -> Iterator[Row]:
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        columns = next(reader, [])
        if twice := [column for column in columns if columns.count(column) > 1]:
            raise ConfigError(f"{name}, line 1: column {twice[0]!r} is a duplicate; rename one of the two")
        for cells in reader:
            place = f"{name}, line {reader.line_num}"
            if len(cells) != len(columns) and cells:
                raise ConfigError(f"{place}: {len(cells)} cells, expected {len(columns)} as in the header")
            if cells:
                yield place, dict(zip(columns, cells, strict=True))
    except csv.Error as error:
        raise ConfigError(f"{name}, line {reader.line_num}: not CSV ({error}); correct the line") from None


def _parquet(path: Path) -> Iterator[Row]:
    import pyarrow
    from pyarrow import parquet

    try:
        table = parquet.read_table(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise ConfigError(f"{path}: expected a parquet file ({' '.join(str(error).split())})") from None
    for number, row in enumerate(table.to_pylist(), start=1):
        yield f"{path}, row {number}", row


def _dataset(path: str, key: str, subset: str | None, split: str | None) -> Iterator[Row]:
    """Rows of a folder that `save_to_disk` of the library `datasets` wrote, or of a dataset for `load_dataset`."""
    from datasets import DatasetDict, load_dataset, load_from_disk
    from datasets.exceptions import DatasetsError

    folder = Path(path).expanduser()
    saved = any((folder / mark).is_file() for mark in ("state.json", "dataset_dict.json"))
    split = split if saved else split or "train"
    try:
        rows = load_from_disk(str(folder)) if saved else load_dataset(path, subset, split=split)
    except (OSError, ValueError, DatasetsError) as error:
        loader = "load_from_disk" if saved else "load_dataset"
        raise ConfigError(
            f"{key} = {path!r}: expected a file that ends in {', '.join(READERS)}, or a dataset; {loader} fails: "
            f"{' '.join(str(error).split())}"
        ) from None
    if saved and subset is not None:
        raise ConfigError(
            f"task.subset = {subset!r}: {key} = {path!r} is a saved dataset, which has no subset; leave subset out"
        )
    if isinstance(rows, DatasetDict):
        split = split or "train"
        if split not in rows:
            raise ConfigError(f"task.split = {split!r}: {key} = {path!r} has no such split; expected {', '.join(rows)}")
        rows = rows[split]
    elif saved and split is not None:
        raise ConfigError(
            f"task.split = {split!r}: {key} = {path!r} is one saved dataset, which has no splits; leave split out"
        )
    name = path if split is None else f"{path} ({split})"
    for number, row in enumerate(rows, start=1):
        yield f"{name}, row {number}", row

"""Reads the rows of tables, each with its place for error messages: a file and line, or a dataset and row."""

import bz2
import contextlib
import csv
import glob
import gzip
import io
import json
import lzma
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..errors import ConfigError

READERS = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
"""Suffixes of the files that are read here; other paths are passed to the library `datasets`."""

COMPRESSED: dict[str, Callable[[Path], Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
"""Suffixes that may follow those of text files, and what opens such a file."""

Row = tuple[str, dict[str, Any]]


def read_rows(
    path: str | Sequence[str], key: str = "task.path", subset: str | None = None, split: str | None = None
) -> list[Row]:
    """Place and columns of every row of files, or of a split of datasets; `key` is the setting with the path.

    A path may be a pattern such as `data/*.jsonl`, whose files are read in alphabetical order.
    """
    sources = [source for pattern in ([path] if isinstance(path, str) else path) for source in _matching(pattern, key)]
    if twice := [source for source in sources if sources.count(source) > 1]:
        raise ConfigError(f"{key} = {path!r}: {twice[0]!r} is a duplicate; name each file once")
    rows = [row for source in sources for row in _source(source, key, subset, split)]
    if not rows:
        raise ConfigError(f"{key} = {path!r}: it has 0 rows; expected at least 1")
    return rows


def _matching(pattern: str, key: str) -> list[str]:
    """The files that a pattern matches; a path without `*`, `?` or `[`, or of an existing file, stays as it is."""
    path = str(Path(pattern).expanduser()) if pattern.startswith("~") else pattern
    if not glob.has_magic(path) or Path(path).exists():
        return [pattern]
    files = sorted(match for match in glob.glob(path, recursive=True) if Path(match).is_file())
    if not files:
        raise ConfigError(f"{key} = {pattern!r}: no file matches this pattern; expected at least one")
    return files


def _source(path: str, key: str, subset: str | None, split: str | None) -> Iterator[Row]:
    kind = _kind(path)
    if kind is None:
        return _dataset(path, key, subset, split)
    for setting, value in (("subset", subset), ("split", split)):
        if value is not None:
            raise ConfigError(
                f"task.{setting} = {value!r}: {key} = {path!r} is a file, which has no {setting}; leave {setting} out"
            )
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError(f"{key} = {path!r}: no such file; expected an existing file, or the name of a dataset")
    return _file(file, kind)


def _kind(path: str) -> str | None:
    """The suffix in READERS that tells how a file is read, compression aside; None for a dataset's name."""
    file = Path(path.lower())
    kind = Path(file.stem).suffix if file.suffix in COMPRESSED else file.suffix
    return kind if kind in READERS else None


def _file(path: Path, kind: str) -> Iterator[Row]:
    if kind == ".parquet":
        return _parquet(path)
    if kind == ".jsonl":
        return _jsonl(_text(path), str(path))
    if kind == ".json":
        return _json(_text(path), str(path))
    return _csv(_text(path), str(path), "\t" if kind == ".tsv" else ",")


def _text(path: Path) -> str:
    """The text of a file, decompressed; ConfigError if it cannot be read or is not UTF-8."""
    opener = COMPRESSED.get(path.suffix.lower(), lambda file: file.open("rb"))
    try:
        with opener(path) as file:
            return io.TextIOWrapper(file, encoding="utf-8-sig").read()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 ({error}); save the file as UTF-8") from None
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path}: cannot be read ({reason}); expected a readable file") from None


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
        parsed = json.loads(text, object_pairs_hook=_unique_keys, parse_int=_integer)
        if "\\ud" in text.lower():
            json.dumps(parsed, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{place}: the surrogate {error.object[error.start]!r} is half of a character; expected valid Unicode"
        ) from None
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{place}: not JSON ({error}); correct or remove it") from None
    return parsed


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ConfigError(f"key {twice!r} is a duplicate; remove one of the two")
    return entries


def _integer(digits: str) -> int | str:
    """An integer; with more digits than Python converts, its digits."""
    limit = sys.get_int_max_str_digits()
    return digits if limit and len(digits) > limit else int(digits)


def _object(row: Any, place: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise ConfigError(f"{place}: expected an object with columns, got a {type(row).__name__}")
    return row


def _csv(text: str, name: str, delimiter: str) -> Iterator[Row]:
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        with _cells_of_any_length():
            lines = [(reader.line_num, cells) for cells in reader]
    except csv.Error as error:
        raise ConfigError(f"{name}, line {reader.line_num}: not CSV ({error}); correct the line") from None
    columns = lines[0][1] if lines else []
    if twice := [column for column in columns if columns.count(column) > 1]:
        raise ConfigError(f"{name}, line 1: column {twice[0]!r} is a duplicate; rename one of the two")
    for number, cells in lines[1:]:
        if len(cells) != len(columns) and cells:
            raise ConfigError(f"{name}, line {number}: {len(cells)} cells, expected {len(columns)} as in the header")
        if cells:
            yield f"{name}, line {number}", dict(zip(columns, cells, strict=True))


@contextlib.contextmanager
def _cells_of_any_length() -> Iterator[None]:
    """The module csv refuses cells of more than 131,072 characters by default."""
    limit = csv.field_size_limit(sys.maxsize)
    try:
        yield
    finally:
        csv.field_size_limit(limit)


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

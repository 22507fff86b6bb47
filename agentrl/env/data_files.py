"""Files of data sets, packed or not, and data sets of the Hugging Face hub, as rows."""

from __future__ import annotations

import bz2
import csv
import difflib
import gzip
import io
import json
import lzma
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from agentrl.core.errors import DataError

TABLES = {".csv": ",", ".tsv": "\t"}
"""Ending of a table's file -> what stands between two cells."""

FILE_SUFFIXES = {".jsonl", ".json", ".ndjson", ".parquet", ".txt", *TABLES}
PACKED: Mapping[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
"""Ending of a packed file -> function that opens it; ``.zst`` is opened by pyarrow."""
KINDS = f"Give a file {', '.join(sorted(FILE_SUFFIXES))} (these but .parquet also with {', '.join(PACKED)} or .zst), or a folder of them."

SPLIT_NAMES = {name: split for split, names in {
    "train": ("train", "training"), "test": ("test", "testing", "eval", "evaluation"), "validation": ("validation", "valid", "val", "dev"),
}.items() for name in names}  # fmt: skip
"""Word in a file name -> split that the file belongs to."""

Row: TypeAlias = tuple[str, Mapping[str, Any]]
"""Position of a row, for messages, and its columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFormat:
    """The reading of data sets as rows.

    Attributes:
        flag: The flag that names the data set, for messages.
        split: Split of a folder or a Hugging Face data set.
        split_flag: The flag that names the split, for messages.
        bad: Takes in what is wrong with lines that are none, which are then left out; `None`: the first one is an error.
    """

    flag: str = "--prompts"
    split: str = "train"
    split_flag: str = "--prompt-split"
    bad: list[str] | None = None


def _split_suffix(path: Path) -> tuple[str, str]:
    """Return the kind of a file and how it is packed, as endings of its name."""
    suffix = path.suffix.lower()
    is_packed = suffix in PACKED or suffix == ".zst"
    return (Path(path.stem).suffix.lower(), suffix) if is_packed else (suffix, "")


def is_readable(path: Path) -> bool:
    """Return True for the name of a file of a kind that is read."""
    kind, packing = _split_suffix(path)
    return kind in FILE_SUFFIXES and not (packing and kind == ".parquet")


def stem_of(path: Path) -> str:
    """Return the name of a file without its endings."""
    return Path(path.stem).stem if _split_suffix(path)[1] else path.stem


def _open(path: Path, form: RowFormat, newline: str | None = None) -> io.TextIOBase:
    """Open a file, packed or not, as UTF-8 text; a byte order mark is left out, as it would become a part of the first name."""
    packing = _split_suffix(path)[1]
    if packing == ".zst":
        try:
            from pyarrow import CompressedInputStream, OSFile
        except ImportError as error:
            raise DataError(form.flag, str(path), "needs the package pyarrow", "pip install 'agentrl[data]'.") from error
        raw: Any = CompressedInputStream(OSFile(str(path)), "zstd")
    else:
        raw = PACKED[packing](path, "rb") if packing else path.open("rb")
    return io.TextIOWrapper(raw, encoding="utf-8-sig", errors="strict", newline=newline)


_NEXT = re.compile(r"\S")

UNREADABLE = (OSError, EOFError, lzma.LZMAError, UnicodeDecodeError)
"""Errors of packed files that are damaged, and of other files that hold no UTF-8 text."""


def read_rows(source: str, form: RowFormat) -> Iterable[Row]:
    """Yield the position and the columns of each row of a file, a folder, a saved data set or a hub name (``name@configuration``).

    Raises:
        DataError: If there is none, or it is malformed; the message names the line.
    """
    path = Path(source).expanduser()
    if path.is_file() and not is_readable(path):
        raise DataError(form.flag, source, "is a file of a kind that is not read", KINDS)
    if is_readable(path) and not path.is_dir():
        if not path.is_file():
            raise DataError(form.flag, source, "there is no such file", _nearest_file(path))
        return _rows(path, form)
    if files := _files(path, source, form):
        return ((f"{file.relative_to(path)} {where}", row) for file in files for where, row in _rows(file, form))
    return _hugging_face(source, path, form)


def _files(folder: Path, source: str, form: RowFormat) -> list[Path]:
    """Return the files of a folder that belong to the split; none for a path that is no folder or was saved by `datasets`.

    If no file name contains the name of a split, all files belong to the split.
    """
    if not folder.is_dir() or any((folder / marker).is_file() for marker in ("state.json", "dataset_dict.json", "dataset_infos.json")):
        return []
    usable = (path for path in folder.rglob("*") if is_readable(path) and path.is_file())
    found = sorted(path for path in usable if not any(part.startswith(".") for part in path.relative_to(folder).parts))
    splits = {path: _split_of(path) for path in found}
    if not any(splits.values()):
        return found
    chosen = [path for path, split in splits.items() if split == SPLIT_NAMES.get(form.split, form.split)]
    if not chosen:
        names = ", ".join(sorted({split for split in splits.values() if split}))
        raise DataError(form.split_flag, form.split, f"is no split of {source}", f"There is {names}.")
    return chosen


def _split_of(path: Path) -> str:
    """Return the split in a file name such as ``train-00000-of-00001.parquet``; empty if there is none."""
    return next((SPLIT_NAMES[word] for word in re.split(r"[^a-z]+", path.stem.lower()) if word in SPLIT_NAMES), "")


def _rows(path: Path, form: RowFormat) -> Iterable[Row]:
    suffix = _split_suffix(path)[0]
    if suffix in TABLES:
        return _table(path, form, TABLES[suffix])
    if suffix == ".txt":
        return _text(path, form)
    return _parquet(path, form) if suffix == ".parquet" else _jsonl(path, form)


def _table(path: Path, form: RowFormat, delimiter: str) -> Iterator[Row]:
    """Yield the rows of a CSV or TSV file with a heading; every cell is text."""
    try:
        with _open(path, form, newline="") as file:
            reader = csv.DictReader(file, delimiter=delimiter, strict=True)
            for row in reader:
                if None in row or None in row.values():
                    problem = f"line {reader.line_num} has not as many cells as the heading"
                    _refuse(DataError(form.flag, str(path), problem, "Put quotes around text with commas or line breaks."), form)
                    continue
                yield f"line {reader.line_num}", row
    except (csv.Error, *UNREADABLE) as error:
        raise DataError(form.flag, str(path), f"is not a readable table: {error}", "Save it as UTF-8 CSV with a heading.") from error


def _text(path: Path, form: RowFormat) -> Iterator[Row]:
    """Yield a row for each line of a text that is not empty."""
    try:
        with _open(path, form) as file:
            yield from ((f"line {number}", {"text": line.rstrip("\n")}) for number, line in enumerate(file, start=1) if line.strip())
    except UNREADABLE as error:
        raise DataError(form.flag, str(path), f"is not UTF-8 text: {error}", "Convert it.") from error


def _refuse(error: DataError, form: RowFormat) -> None:
    """Raise an error of one row, or take it down where such rows are left out."""
    if form.bad is None:
        raise error
    form.bad.append(error.problem)


def _jsonl(path: Path, form: RowFormat) -> Iterator[Row]:
    """Yield the objects of a file, one on each line, or those of a JSON array, or objects over several lines."""
    with _open(path, form) as file:
        lines: Iterator[tuple[int, str]] = enumerate(file, start=1)
        is_first = True
        while True:
            try:
                number, line = next(lines)
                if is_first and line.lstrip().startswith("["):
                    yield from _array(line + file.read(), path, form)
                    return
                if is_first and line.strip() and (whole := _opens_object(line, file)):
                    if objects := _objects(whole):
                        yield from ((f"row {index}", row) for index, row in enumerate(objects))
                        return
                    lines = enumerate(whole.splitlines(keepends=True)[1:], start=number + 1)
            except StopIteration:
                return
            except UNREADABLE as error:
                raise DataError(form.flag, str(path), f"is not UTF-8 text: {error}", "Convert it.") from error
            if not line.strip():
                continue
            is_first = False
            try:
                row = _object(line, number, path, form)
            except DataError as error:
                _refuse(error, form)
            else:
                yield f"line {number}", row


def _opens_object(line: str, file: io.TextIOBase) -> str:
    """Return the rest of a file with its first line if that begins an object and does not end it; else ""."""
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return line + file.read() if line.lstrip().startswith("{") else ""
    return ""


def _objects(text: str) -> list[Any]:
    """Return the JSON objects that follow each other in a text, over any lines; none if it is something else."""
    found: list[Any] = []
    place, decoder = 0, json.JSONDecoder()
    while rest := _NEXT.search(text, place):
        try:
            value, place = decoder.raw_decode(text, rest.start())
        except (ValueError, RecursionError):
            return []
        found.append(value)
    return found if all(isinstance(value, dict) for value in found) else []


def _array(text: str, path: Path, form: RowFormat) -> Iterator[Row]:
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError) as error:
        problem = f"begins with [ and is no JSON array: {error}"
        raise DataError(form.flag, str(path), problem, "Write one JSON object per line, or one array of them.") from error
    for index, row in enumerate(rows):
        if isinstance(row, dict):
            yield f"row {index}", row
        else:
            problem = f"row {index} is of the type {type(row).__name__}, not an object"
            _refuse(DataError(form.flag, str(path), problem, "Write an array of objects."), form)


def _object(line: str, number: int, path: Path, form: RowFormat) -> Mapping[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(form.flag, str(path), f"line {number} is not JSON: {error}", "Write one JSON object per line.") from error
    if not isinstance(row, dict):
        raise DataError(form.flag, str(path), f"line {number} is a {type(row).__name__}, not an object", "Write one JSON object per line.")
    return row


def _parquet(path: Path, form: RowFormat) -> Iterable[Row]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import read_table
    except ImportError as error:
        raise DataError(form.flag, str(path), "needs the package pyarrow", "pip install 'agentrl[data]'.") from error
    try:
        # By default pyarrow takes folders named `key=value` above the file for columns.
        rows = read_table(path, partitioning=None).to_pylist()
    except (ArrowException, OSError) as error:
        raise DataError(form.flag, str(path), f"is not a readable Parquet file: {error}", "") from error
    return [(f"row {index}", row) for index, row in enumerate(rows)]


def _hugging_face(source: str, path: Path, form: RowFormat) -> Iterable[Row]:
    if not path.exists() and (path.is_absolute() or source.startswith((".", "~"))):
        raise DataError(form.flag, source, "there is no such file or folder", _nearest_file(path))
    try:
        import datasets
    except ImportError as error:
        raise DataError(form.flag, source, "needs the package datasets", "pip install 'agentrl[data]'.") from error
    saved = any((path / marker).is_file() for marker in ("state.json", "dataset_dict.json"))
    name, _, configuration = source.partition("@")
    try:
        loaded = datasets.load_from_disk(str(path)) if saved else datasets.load_dataset(name, configuration or None, split=form.split)
    except Exception as error:  # the library raises dozens of kinds, among them those of its HTTP client
        reason = str(error).strip().splitlines() or [""]
        problem = f"cannot be loaded: {type(error).__name__}: {reason[0]}"
        raise DataError(form.flag, source, problem, f"{KINDS[:-1]}, a saved data set, or a hub name.") from error
    if isinstance(loaded, dict):
        if form.split not in loaded:
            raise DataError(form.split_flag, form.split, f"is no split of {source}", f"There is {', '.join(loaded)}.")
        loaded = loaded[form.split]
    return ((f"row {index}", row) for index, row in enumerate(loaded))


def _nearest_file(path: Path) -> str:
    folder = path.parent
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    close = difflib.get_close_matches(path.name, names, n=1)
    return f"Did you mean {folder / close[0]}?" if close else f"{KINDS[:-1]}, or a Hugging Face name."

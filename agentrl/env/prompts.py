"""Reading prompts from JSONL, CSV and Parquet files and from Hugging Face data sets."""

from __future__ import annotations

import csv
import dataclasses
import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from agentrl.core.errors import DataError
from agentrl.core.types import Task, as_messages
from agentrl.env.images import MARK, image_texts, with_marked_places
from agentrl.env.responses import PARAMS, chat_of

TABLES = {".csv": ",", ".tsv": "\t"}
"""Ending of a table's file -> what stands between two cells."""

FILE_SUFFIXES = {".jsonl", ".json", ".ndjson", ".parquet", *TABLES}

SPLIT_NAMES = {name: split for split, names in {
    "train": ("train", "training"), "test": ("test", "testing", "eval", "evaluation"), "validation": ("validation", "valid", "val", "dev"),
}.items() for name in names}  # fmt: skip
"""Word in a file name -> split that the file belongs to."""

_ABSENT = object()
LABEL_KEY = "label"
"""Column with the label where no other is named; a data set may lack it."""

Row: TypeAlias = tuple[str, Mapping[str, Any]]
"""Position of a row, for messages, and its columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFormat:
    """The reading of data set rows as tasks.

    Attributes:
        flag: The flag that names the data set, for messages.
        split: Split of a folder or a Hugging Face data set.
        split_flag: The flag that names the split, for messages.
        input_key: Column with the prompt: text or chat messages; ``a.b`` is the key ``b`` of what stands in the column ``a``.
        label_key: Column with the label, in the same form; without the default column the label is `None`.
        marks: ``<image>`` in the texts of a prompt with images is the place of one; off for texts that no chat template renders.
        image_key: Column with the images of the prompt, a list of them or one; without it there are none.
        input_template: Text around a plain-text prompt, with ``{}`` in the prompt's place; ``{{`` and ``}}`` mean braces.
        bad: Takes in what is wrong with lines that are none, which are then left out; `None`: the first one is an error.
    """

    flag: str = "--prompts"
    split: str = "train"
    split_flag: str = "--prompt-split"
    input_key: str = "prompt"
    label_key: str = LABEL_KEY
    image_key: str = "images"
    marks: bool = True
    input_template: str = ""
    bad: list[str] | None = None


@dataclass(frozen=True, slots=True)
class PromptSet:
    """The tasks of one data set, under its name."""

    name: str
    tasks: list[Task]


def read_prompts(sources: Sequence[str], form: PromptFormat) -> list[PromptSet]:
    """Read files, folders, saved data sets or hub names (``name@configuration``), one set each; several sets put their name into ids.

    `DataError` names the line or the key of a source that is missing or malformed. A row's other columns become its task's metadata.
    """
    names = _names(sources)
    sets = [PromptSet(name, _read(source, form)) for name, source in zip(names, sources, strict=True)]
    if len(sets) == 1:
        return sets
    return [PromptSet(part.name, [_named(task, i, part.name) for i, task in enumerate(part.tasks)]) for part in sets]


def _names(sources: Sequence[str]) -> list[str]:
    """Return short names of the sources if all differ, else the sources themselves."""
    short = [Path(source).stem if Path(source).suffix.lower() in FILE_SUFFIXES else Path(source).name for source in sources]
    return short if len(set(short)) == len(short) and all(short) else list(sources)


def _named(task: Task, index: int, name: str) -> Task:
    return dataclasses.replace(task, id=f"{name}/{index}", metadata={"source": name, **task.metadata})


def read_rows(source: str, form: PromptFormat) -> Iterable[Row]:
    """Yield the position and the columns of each row of a file, a folder, a saved data set or a hub name (``name@configuration``).

    Raises:
        DataError: If there is none, or it is malformed; the message names the line.
    """
    path = Path(source).expanduser()
    if path.suffix.lower() in FILE_SUFFIXES and not path.is_dir():
        if not path.is_file():
            raise DataError(form.flag, source, "there is no such file", _nearest_file(path))
        return _rows(path, form)
    if files := _files(path, source, form):
        return ((f"{file.relative_to(path)} {where}", row) for file in files for where, row in _rows(file, form))
    return _hugging_face(source, path, form)


def _read(source: str, form: PromptFormat) -> list[Task]:
    rows = list(read_rows(source, form))
    tasks = [_task(row, where, source, form) for where, row in rows]
    if not tasks:
        raise DataError(form.flag, source, "holds no row", "Give at least one prompt.")
    if form.label_key != LABEL_KEY and not any(has_column(row, form.label_key) for _, row in rows):
        remedy = _nearest_column("--label-key", form.label_key, rows[0][1])
        raise DataError("--label-key", form.label_key, f"is no column of {source}", remedy)
    return tasks


def has_column(row: Mapping[str, Any], key: str) -> bool:
    """Return True if a row has a column, or a path of keys with dots between them, as ``reward_model.ground_truth``."""
    return column(row, key, _ABSENT) is not _ABSENT


def column(row: Any, key: str, default: Any = None) -> Any:
    """Return what stands in a column of a row, or at the end of a path of keys with dots between them."""
    if not isinstance(row, Mapping):
        return default
    # A column whose own name has a dot comes before a path through other columns.
    if key in row:
        return row[key]
    first, dot, rest = key.partition(".")
    return column(row.get(first), rest, default) if dot else default


def column_paths(row: Mapping[str, Any]) -> list[str]:
    """Return the columns of a row, and below those that hold keys of their own the paths to these."""
    nested = [f"{name}.{path}" for name, value in row.items() if isinstance(value, Mapping) for path in column_paths(value)]
    return [*row, *nested]


def _nearest_column(flag: str, key: str, row: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(key, column_paths(row), n=1)
    return f"Did you mean {flag} {close[0]}?" if close else f"Its columns are {', '.join(row)}."


def is_chat(prompt: Any) -> bool:
    """Return True for chat messages, at least one, each with a role and content."""
    messages = isinstance(prompt, Sequence) and not isinstance(prompt, str) and bool(prompt)
    return messages and all(isinstance(message, Mapping) and {"role", "content"} <= set(message) for message in prompt)


def _task(row: Mapping[str, Any], where: str, source: str, form: PromptFormat) -> Task:
    key = form.input_key
    if not has_column(row, key):
        if PARAMS in row:
            return _nemo_gym_task(row, where, source, form)
        raise DataError("--input-key", key, f"is no column of {source} ({where})", _nearest_column("--input-key", key, row))
    prompt = column(row, key)
    chat = is_chat(prompt)
    if not chat and not (isinstance(prompt, str) and prompt):
        problem = f"{where}: column {key!r} is neither text nor a list of messages with role and content: {str(prompt)[:80]!r}"
        raise DataError(form.flag, source, problem, "Name another column with --input-key.")
    if form.input_template and not chat:
        prompt = form.input_template.format(prompt)
    # A label stays under the name that its column has, by which reward functions of other systems ask for it.
    rest = {name: value for name, value in row.items() if name not in (key, LABEL_KEY, form.image_key)}
    images = _images(row, where, source, form)
    try:
        if images and (form.marks or chat) and MARK in str(prompt):
            prompt = with_marked_places(as_messages(prompt), len(images))
    except ValueError as error:
        raise DataError(form.flag, source, f"{where}: {error}", "Write one for each image.") from error
    return Task(prompt, column(row, form.label_key), metadata=rest, images=images)


def _images(row: Mapping[str, Any], where: str, source: str, form: PromptFormat) -> tuple[str, ...]:
    """Return the images of a row as paths and data URLs."""
    found = column(row, form.image_key)
    if found is None:
        return ()
    try:
        return image_texts(found if isinstance(found, Sequence) and not isinstance(found, str | bytes) else [found])
    except ValueError as error:
        problem = f"{where}: column {form.image_key!r}, {error}"
        raise DataError(form.flag, source, problem, "Name another column with --image-key.") from error


def _nemo_gym_task(row: Mapping[str, Any], where: str, source: str, form: PromptFormat) -> Task:
    """Return the task of a row in NeMo Gym's form; the whole row becomes its metadata, for the server."""
    try:
        return Task(chat_of(row[PARAMS]), column(row, form.label_key), metadata=row)
    except ValueError as error:
        raise DataError(form.flag, source, f"{where}: {error}", "Give messages whose content is text.") from error


def _files(folder: Path, source: str, form: PromptFormat) -> list[Path]:
    """Return the files of a folder that belong to the split; none for a path that is no folder or was saved by `datasets`.

    If no file name contains the name of a split, all files belong to the split.
    """
    if not folder.is_dir() or any((folder / marker).is_file() for marker in ("state.json", "dataset_dict.json", "dataset_infos.json")):
        return []
    usable = (path for path in folder.rglob("*") if path.suffix.lower() in FILE_SUFFIXES and path.is_file())
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


def _rows(path: Path, form: PromptFormat) -> Iterable[Row]:
    suffix = path.suffix.lower()
    if suffix in TABLES:
        return _table(path, form, TABLES[suffix])
    return _parquet(path, form) if suffix == ".parquet" else _jsonl(path, form)


def _table(path: Path, form: PromptFormat, delimiter: str) -> Iterator[Row]:
    """Yield the rows of a CSV or TSV file with a heading; every cell is text."""
    try:
        # Spreadsheet programs begin a file with a byte order mark, which would become a part of the first column's name.
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, delimiter=delimiter, strict=True)
            for row in reader:
                if None in row or None in row.values():
                    problem = f"line {reader.line_num} has not as many cells as the heading"
                    _refuse(DataError(form.flag, str(path), problem, "Put quotes around text with commas or line breaks."), form)
                    continue
                yield f"line {reader.line_num}", row
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(form.flag, str(path), f"is not a readable table: {error}", "Save it as UTF-8 CSV with a heading.") from error


def _refuse(error: DataError, form: PromptFormat) -> None:
    """Raise an error of one row, or take it down where such rows are left out."""
    if form.bad is None:
        raise error
    form.bad.append(error.problem)


def _jsonl(path: Path, form: PromptFormat) -> Iterator[Row]:
    """Yield the objects of a file, one on each line, or those of a JSON array."""
    with path.open(encoding="utf-8-sig", errors="strict") as file:
        lines = enumerate(file, start=1)
        is_first = True
        while True:
            try:
                number, line = next(lines)
                if is_first and line.lstrip().startswith("["):
                    yield from _array(line + file.read(), path, form)
                    return
            except StopIteration:
                return
            except UnicodeDecodeError as error:
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


def _array(text: str, path: Path, form: PromptFormat) -> Iterator[Row]:
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


def _object(line: str, number: int, path: Path, form: PromptFormat) -> Mapping[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(form.flag, str(path), f"line {number} is not JSON: {error}", "Write one JSON object per line.") from error
    if not isinstance(row, dict):
        raise DataError(form.flag, str(path), f"line {number} is a {type(row).__name__}, not an object", "Write one JSON object per line.")
    return row


def _parquet(path: Path, form: PromptFormat) -> Iterable[Row]:
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


def _hugging_face(source: str, path: Path, form: PromptFormat) -> Iterable[Row]:
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
        raise DataError(
            form.flag, source, problem, "Give a .jsonl, .csv or .parquet file, a folder of them, a saved data set, or a hub name."
        ) from error
    if isinstance(loaded, dict):
        if form.split not in loaded:
            raise DataError(form.split_flag, form.split, f"is no split of {source}", f"There is {', '.join(loaded)}.")
        loaded = loaded[form.split]
    return ((f"row {index}", row) for index, row in enumerate(loaded))


def _nearest_file(path: Path) -> str:
    folder = path.parent
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    close = difflib.get_close_matches(path.name, names, n=1)
    return f"Did you mean {folder / close[0]}?" if close else "Give a .jsonl, .csv or .parquet file, or a Hugging Face name."

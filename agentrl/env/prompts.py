"""Reading prompts from JSONL and Parquet files and from Hugging Face data sets."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from agentrl.core.errors import DataError
from agentrl.core.types import Task

FLAG = "--prompts"
FILE_SUFFIXES = {".jsonl", ".json", ".ndjson", ".parquet"}


def read_prompts(prompts: str, *, split: str, input_key: str, label_key: str) -> list[Task]:
    """All tasks of a data set, in its order.

    Args:
        prompts: A JSONL or Parquet file, a folder saved by ``datasets``, or a name on the Hugging Face hub.
        split: Split of a Hugging Face data set.
        input_key: Column with the prompt: text or chat messages.
        label_key: Column with the label; absent: the label is `None`.

    Returns:
        One task per row; other columns are its metadata.

    Raises:
        DataError: If it is missing or malformed; the message names the line or the key.
    """
    path = Path(prompts).expanduser()
    suffix = path.suffix.lower()
    if suffix in FILE_SUFFIXES:
        if not path.is_file():
            raise DataError(FLAG, prompts, "there is no such file", _nearest_file(path))
        rows = _parquet(path) if suffix == ".parquet" else _jsonl(path)
    else:
        rows = _hugging_face(prompts, path, split)
    tasks = [_task(row, where, prompts, input_key, label_key) for where, row in rows]
    if not tasks:
        raise DataError(FLAG, prompts, "holds no row", "Give at least one prompt.")
    return tasks


def _task(row: Mapping[str, Any], where: str, prompts: str, input_key: str, label_key: str) -> Task:
    if input_key not in row:
        close = difflib.get_close_matches(input_key, list(row), n=1)
        remedy = f"Did you mean --input-key {close[0]}?" if close else f"Its columns are {', '.join(row)}."
        raise DataError("--input-key", input_key, f"is no column of {prompts} ({where})", remedy)
    prompt = row[input_key]
    chat = isinstance(prompt, list) and bool(prompt) and all(isinstance(m, Mapping) and {"role", "content"} <= set(m) for m in prompt)
    if not chat and not (isinstance(prompt, str) and prompt):
        problem = f"{where}: column {input_key!r} is neither text nor a list of messages with role and content: {str(prompt)[:80]!r}"
        raise DataError(FLAG, prompts, problem, "Name another column with --input-key.")
    rest = {key: value for key, value in row.items() if key not in (input_key, label_key)}
    return Task(prompt, row.get(label_key), metadata=rest)


def _jsonl(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    with path.open(encoding="utf-8", errors="strict") as file:
        lines = enumerate(file, start=1)
        while True:
            try:
                number, line = next(lines)
            except StopIteration:
                return
            except UnicodeDecodeError as error:
                raise DataError(FLAG, str(path), f"is not UTF-8 text: {error}", "Convert it.") from error
            if line.strip():
                yield f"line {number}", _object(line, number, path)


def _object(line: str, number: int, path: Path) -> Mapping[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(FLAG, str(path), f"line {number} is not JSON: {error}", "Write one JSON object per line.") from error
    if not isinstance(row, dict):
        raise DataError(FLAG, str(path), f"line {number} is a {type(row).__name__}, not an object", "Write one JSON object per line.")
    return row


def _parquet(path: Path) -> Iterable[tuple[str, Mapping[str, Any]]]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import read_table
    except ImportError as error:
        raise DataError(FLAG, str(path), "needs the package pyarrow", "pip install 'agentrl[data]'.") from error
    try:
        rows = read_table(path).to_pylist()
    except (ArrowException, OSError) as error:
        raise DataError(FLAG, str(path), f"is not a readable Parquet file: {error}", "") from error
    return [(f"row {index}", row) for index, row in enumerate(rows)]


def _hugging_face(name: str, path: Path, split: str) -> Iterable[tuple[str, Mapping[str, Any]]]:
    if not path.exists() and (path.is_absolute() or name.startswith((".", "~"))):
        raise DataError(FLAG, name, "there is no such file or folder", _nearest_file(path))
    try:
        import datasets
    except ImportError as error:
        raise DataError(FLAG, name, "needs the package datasets", "pip install 'agentrl[data]'.") from error
    saved = any((path / marker).is_file() for marker in ("state.json", "dataset_dict.json"))
    try:
        loaded = datasets.load_from_disk(str(path)) if saved else datasets.load_dataset(name, split=split)
    except Exception as error:  # the library raises dozens of kinds, among them those of its HTTP client
        reason = str(error).strip().splitlines() or [""]
        problem = f"cannot be loaded: {type(error).__name__}: {reason[0]}"
        raise DataError(FLAG, name, problem, "Give a .jsonl or .parquet file, a saved data set, or a hub name.") from error
    if isinstance(loaded, dict):
        if split not in loaded:
            raise DataError("--prompt-split", split, f"is no split of {name}", f"There is {', '.join(loaded)}.")
        loaded = loaded[split]
    return ((f"row {index}", row) for index, row in enumerate(loaded))


def _nearest_file(path: Path) -> str:
    folder = path.parent
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    close = difflib.get_close_matches(path.name, names, n=1)
    return f"Did you mean {folder / close[0]}?" if close else "Give a .jsonl or .parquet file, or a Hugging Face name."

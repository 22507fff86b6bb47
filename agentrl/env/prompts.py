"""Rows of data sets as prompts: which column is what."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.core.errors import DataError
from agentrl.core.types import Task, as_messages
from agentrl.env.data_files import RowFormat, is_readable, read_rows, stem_of
from agentrl.env.images import MARK, image_texts, with_marked_places
from agentrl.env.responses import PARAMS, chat_of

_ABSENT = object()
LABEL_KEY = "label"
"""Column with the label where no other is named; a data set may lack it."""
LABELS = (LABEL_KEY, "reward_model.ground_truth", "reward_spec.ground_truth")
"""Places of the label where none is named: ours, and those in data sets of verl and SkyRL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFormat(RowFormat):
    """The reading of data set rows as tasks.

    Attributes:
        input_key: Column with the prompt: text or chat messages; ``a.b`` is the key ``b`` of what stands in the column ``a``.
        label_key: Column with the label, in the same form; without the default column the label is that of
            verl's ``reward_model.ground_truth`` or SkyRL's ``reward_spec.ground_truth``, else `None`.
        marks: ``<image>`` in the texts of a prompt with images is the place of one; off for texts that no chat template renders.
        image_key: Column with the images of the prompt, a list of them or one; without it there are none.
        input_template: Text around a plain-text prompt, with ``{}`` in the prompt's place; ``{{`` and ``}}`` mean braces.
    """

    input_key: str = "prompt"
    label_key: str = LABEL_KEY
    image_key: str = "images"
    marks: bool = True
    input_template: str = ""


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
    short = [stem_of(path) if is_readable(path := Path(source)) else path.name for source in sources]
    return short if len(set(short)) == len(short) and all(short) else list(sources)


def _named(task: Task, index: int, name: str) -> Task:
    return dataclasses.replace(task, id=f"{name}/{index}", metadata={"source": name, **task.metadata})


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
    return Task(prompt, _label(row, form.label_key), metadata=rest, images=images)


def _label(row: Mapping[str, Any], key: str) -> Any:
    places = LABELS if key == LABEL_KEY else (key,)
    return next((column(row, place) for place in places if has_column(row, place)), None)


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

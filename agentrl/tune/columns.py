"""Columns of a row: which of them were read, and those that mean the same in every form, images among them. Loads no model library."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import lru_cache
from typing import Any, TypeAlias

from agentrl.config.tune import TuneDataConfig
from agentrl.core.types import Message
from agentrl.env.images import IMAGE_PARTS, image_texts, lifted, with_marked_places

Row: TypeAlias = Mapping[str, Any]

SYSTEM = ("system", "system_prompt")
"""Columns with a system message, of which the first that holds one counts."""
SHARED = (*SYSTEM, "history", "tools", "images", "image")
"""Columns that are read in every form."""
MEDIA = ("videos", "video", "audios", "audio")
"""Columns that no model here reads."""
MARKS = ("weight", "loss_weight", "loss", "loss_scale", "training", "train")
"""Keys of a message that say whether it is trained: OpenAI's, LLaMA-Factory's, two of ms-swift and two of Axolotl."""


class RowError(ValueError):
    """A row that cannot be used: the column, and what is wrong with it."""

    def __init__(self, key: str, problem: str, remedy: str = "") -> None:
        self.key, self.problem, self.remedy = key, problem, remedy
        super().__init__(f"column {key!r} {problem}")


class Columns(dict[str, Any]):
    """A row that notes the names of the columns which are looked up; copying it is no look-up."""

    def __init__(self, row: Row) -> None:
        super().__init__(row)
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """As for a dictionary."""
        self.read.add(name)
        return super().get(name, default)

    def unread(self) -> dict[str, Any]:
        """Return the columns that were not looked up and hold something."""
        return {name: value for name, value in self.items() if name not in self.read and is_given(value)}


def is_list(value: Any) -> bool:
    """Return True for a sequence that is no text."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def is_given(value: Any) -> bool:
    """Return True for a cell with contents: tables have empty ones where a row lacks a column."""
    return value is not None and not (isinstance(value, str | list | tuple | dict) and not value)


def refuse_media(row: Row) -> None:
    """Refuse a row with sound or moving pictures.

    Raises:
        RowError: If it has any.
    """
    plain = dict(row)  # its look-ups are not noted
    for name in MEDIA:
        if is_given(value := plain.get(name)):
            raise RowError(name, f"holds {value!r:.80}, and models here are trained on text and images alone", "Leave the row out.")


@lru_cache
def _named(data: TuneDataConfig) -> frozenset[str]:
    """Return the columns that settings name, which mean what the settings say."""
    return frozenset(getattr(data, field.name) for field in fields(data) if field.name.endswith("_key"))


def history(row: Row, data: TuneDataConfig) -> list[Any]:
    """Return the turns before the prompt, in column ``history``: pairs of a question and its answer, or messages.

    Raises:
        RowError: If the column is something else.
    """
    turns = () if "history" in _named(data) else _unpacked(row.get("history"), "history")
    if is_list(turns) and all(isinstance(turn, Mapping) for turn in turns):
        return list(turns)
    if not is_list(turns) or not all(is_list(turn) and len(turn) == 2 for turn in turns):
        raise RowError("history", "is no list of pairs of a question and its answer")
    return [{"role": role, "content": text} for turn in turns for role, text in zip(("user", "assistant"), turn, strict=True)]


def opened(value: Any, row: Row, data: TuneDataConfig) -> Any:
    """Return a prompt or a chat behind the system message and the turns in columns of their own, with the tools in its first message.

    Args:
        value: Text, which becomes a message if there is anything to go with it, or a list of messages.
        row: The row that it is of.
        data: Settings; columns that they name have no meaning of their own.

    Raises:
        RowError: If one of the columns is malformed, or the chat has a system message already.
    """
    taken, plain = _named(data), dict(row)
    key, system = next(((name, row[name]) for name in SYSTEM if name not in taken and is_given(plain.get(name))), ("", None))
    turns, tools = history(row, data), [] if "tools" in taken else _tools(row)
    if not (system or turns or tools):
        return value
    chat: list[Any] = [{"role": "user", "content": value}] if isinstance(value, str) else list(value) if is_list(value) else []
    if not chat:
        return value
    before = [chat.pop(0)] if isinstance(chat[0], Mapping) and "system" in (chat[0].get("role"), chat[0].get("from")) else []
    if system is not None and (not isinstance(system, str) or (before and system not in before[0].values())):
        problem = "is given, and the chat begins with a system message" if isinstance(system, str) else f"is no text: {system!r:.80}"
        raise RowError(key, problem, "Give one system message.")
    before = before or ([{"role": "system", "content": system}] if system else [])
    first, *rest = [*before, *turns, *chat]
    return [{**first, "tools": tools} if tools and isinstance(first, Mapping) else first, *rest]


def _tools(row: Row) -> list[Any]:
    """Return the functions in column ``tools``, a list of JSON schemas or its text."""
    tools = _unpacked(row.get("tools"), "tools")
    if not is_list(tools) or not all(isinstance(tool, Mapping) for tool in tools):
        raise RowError("tools", f"is no list of JSON schemas: {tools!r:.80}")
    return list(tools)


def _unpacked(value: Any, key: str) -> Any:
    """Return what a cell holds as JSON text, which tables and some data sets have in place of lists; of an empty cell, an empty list."""
    if not is_given(value):
        return []
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise RowError(key, f"is not JSON: {error}") from error


def pictures(row: Row) -> list[Any]:
    """Return the images in columns ``images`` and ``image``."""
    given = _unpacked(row.get("images"), "images")
    found = list(given) if is_list(given) else [given]
    return found or ([row["image"]] if is_given(row.get("image")) else [])


def read_marks(message: dict[str, Any], place: str, key: str) -> None:
    """Leave in a message of the marks that say whether it is trained only ``weight`` 0, for one that is not.

    Raises:
        RowError: If a mark is neither of the two, or a message that no assistant wrote is to be trained.
    """
    values = {name: message.pop(name) for name in MARKS if name in message}
    for name, value in values.items():
        if value not in (0, 1):
            raise RowError(key, f"holds a message whose {name} is {value!r}, {place}", "A message is trained or not: write 1 or 0.")
        if value and message["role"] != "assistant":
            problem = f"holds a message of {message['role']} that is marked to be trained ({name}), {place}"
            raise RowError(key, problem, "Answers of the assistant are trained; leave the mark out, or use --train-on all.")
    if not all(values.values()):
        message["weight"] = 0


def is_trained(message: Message) -> bool:
    """Return True for a message of the assistant without a mark against it."""
    return message["role"] == "assistant" and message.get("weight", 1) != 0


def with_images(value: Any, row: Row, key: str) -> tuple[Any, tuple[str, ...]]:
    """Return a prompt or a chat with places for its images, those of the columns ``images`` or ``image`` among them, and all images.

    Places are parts of messages, or ``<image>`` in their texts; without any the images come first in the last message of the user.

    Args:
        value: Text, or a list of messages; as it is if there are no images.
        row: The row that it is of.
        key: The column that it is of, for messages.

    Raises:
        RowError: If there are more or fewer images than places, or one is no image.
    """
    given = pictures(row)
    value = [with_role(item, place, key) for place, item in enumerate(value)] if is_list(value) else value
    parts = [part for item in value if isinstance(item, Mapping) for part in parts_of(item)] if is_list(value) else []
    if not given and not any(isinstance(part, Mapping) and part.get("type") in IMAGE_PARTS for part in parts):
        return value, ()
    try:
        chat = [Message(role="user", content=value)] if isinstance(value, str) else value
        prompt, found = lifted(with_marked_places(chat, len(given)), given)
        return prompt, image_texts(found)
    except (KeyError, TypeError, ValueError) as error:
        raise RowError(key, f"has images that cannot be used: {error}") from error


def parts_of(message: Row) -> Sequence[Any]:
    """Return the parts of a message; none if its content is text."""
    content: Any = message.get("content")
    return content if is_list(content) else ()


ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "observation": "tool"}
"""Roles of the ShareGPT form -> ours; ``function_call`` is a message of the assistant whose value is the JSON of its calls."""


def with_role(item: Any, index: int, key: str) -> Any:
    """Return a message of the ShareGPT form (``from`` and ``value``) with role and content, and parts with a ``value`` as usual ones.

    Raises:
        RowError: If it is a call that is not JSON.
    """
    if not isinstance(item, Mapping):
        return item
    if not ("from" in item and "value" in item):
        content: Any = item.get("content")
        return {**item, "content": [*map(_usual, content)]} if is_list(content) else item
    others = {name: part for name, part in item.items() if name not in ("from", "value")}
    role, value = item["from"], item["value"]
    if role != "function_call":
        return {**others, "role": ROLES.get(role, role), "content": [*map(_usual, value)] if is_list(value) else value}
    try:
        return {**others, "role": "assistant", "tool_calls": json.loads(value) if isinstance(value, str) else value}
    except ValueError as error:
        raise RowError(key, f"holds a function_call that is not JSON, at place {index}: {error}") from error


def _usual(part: Any) -> Any:
    """Return a part of a message, of LLaMA-Factory's ``type`` and ``value`` too, with its contents under the name of its type."""
    return {"type": part["type"], part["type"]: part["value"]} if isinstance(part, Mapping) and part.keys() == {"type", "value"} else part

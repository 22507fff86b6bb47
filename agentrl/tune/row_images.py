"""Images of the rows of a data set: those in columns of their own, and those in the parts of messages. Loads no model library."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from agentrl.core.types import Message
from agentrl.env.images import IMAGE_PARTS, image_texts, lifted, with_marked_places

Row: TypeAlias = Mapping[str, Any]


class RowError(ValueError):
    """A row that cannot be used: the column, and what is wrong with it."""

    def __init__(self, key: str, problem: str, remedy: str = "") -> None:
        self.key, self.problem, self.remedy = key, problem, remedy
        super().__init__(f"column {key!r} {problem}")


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
    given = row.get("images") or ([row["image"]] if row.get("image") is not None else [])
    parts = [part for item in value if isinstance(item, Mapping) for part in parts_of(item)] if is_list(value) else []
    if not given and not any(isinstance(part, Mapping) and part.get("type") in IMAGE_PARTS for part in parts):
        return value, ()
    try:
        asked = [Message(role="user", content=value)] if isinstance(value, str) else value
        chat = [with_role(item, place, key) for place, item in enumerate(asked)]
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
    """Return a message of the ShareGPT form (``from`` and ``value``) with role and content; anything else as it is.

    Raises:
        RowError: If it is a call that is not JSON.
    """
    if not (isinstance(item, Mapping) and "from" in item and "value" in item):
        return item
    role, value = item["from"], item["value"]
    if role != "function_call":
        return {"role": ROLES.get(role, role), "content": value}
    try:
        return {"role": "assistant", "tool_calls": json.loads(value) if isinstance(value, str) else value}
    except ValueError as error:
        raise RowError(key, f"holds a function_call that is not JSON, at place {index}: {error}") from error


def is_list(value: Any) -> bool:
    """Return True for a sequence that is no text."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)

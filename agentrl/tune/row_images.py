"""Images of the rows of a data set: those in columns of their own, and those in the parts of messages. Loads no model library."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.core.types import Message
from agentrl.env.images import IMAGE_PARTS, image_texts, lifted, with_marked_places
from agentrl.tune.columns import Row, RowError, is_list, pictures


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

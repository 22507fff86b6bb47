"""Images of the rows of a data set: those in columns of their own, and those in the parts of messages. Loads no model library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from agentrl.core.types import Message
from agentrl.env.images import IMAGE_PARTS, image_texts, lifted

Row: TypeAlias = Mapping[str, Any]


class RowError(ValueError):
    """A row that cannot be used: the column, and what is wrong with it."""

    def __init__(self, key: str, problem: str, remedy: str = "") -> None:
        self.key, self.problem, self.remedy = key, problem, remedy
        super().__init__(f"column {key!r} {problem}")


def with_images(value: Any, row: Row, key: str) -> tuple[Any, tuple[str, ...]]:
    """Return a prompt or a chat with places for its images, those of the columns ``images`` or ``image`` among them, and all images.

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
        prompt, found = lifted([Message(role="user", content=value)] if isinstance(value, str) else value, given)
        return prompt, image_texts(found)
    except (KeyError, TypeError, ValueError) as error:
        raise RowError(key, f"has images that cannot be used: {error}") from error


def parts_of(message: Row) -> Sequence[Any]:
    """Return the parts of a message; none if its content is text."""
    content: Any = message.get("content")
    return content if is_list(content) else ()


def is_list(value: Any) -> bool:
    """Return True for a sequence that is no text."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)

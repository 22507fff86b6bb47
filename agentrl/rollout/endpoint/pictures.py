"""Images in the messages of requests: a mark stands for each in the text, so that histories with other images are other histories."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable
from typing import Any, TypeVar

from agentrl.core.types import Message
from agentrl.rollout.endpoint.fields import OMITTED

_MARK = re.compile(r"\n?(\[image [0-9a-f]{32}\])\n?")
M = TypeVar("M", bound=Message)


def marks_in(message: Message, known: Container[str]) -> list[str]:
    """Return the marks of images in a message, in their order; text that spells an unknown one is text."""
    return [mark for mark in _MARK.findall(message["content"]) if mark in known]


def with_parts(message: Message, known: Container[str]) -> Message:
    """Return a message whose marks are parts that say where images go."""
    if not marks_in(message, known):
        return message
    parts: list[Any] = []
    for number, piece in enumerate(_MARK.split(message["content"])):
        is_mark = number % 2 and piece in known
        if is_mark or piece:
            parts.append({"type": "image"} if is_mark else {"type": "text", "text": piece})
    return {**message, "content": parts}


def without_images(message: M, marks: Iterable[str]) -> M:
    """Return a message that says of each image that it was left out."""
    content = message["content"]
    for mark in marks:
        content = content.replace(mark, OMITTED)
    return {**message, "content": content}  # type: ignore[return-value]

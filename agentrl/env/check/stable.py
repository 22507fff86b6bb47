"""A value as text that is the same in every process, whatever its hash seed and the identity of its parts."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from agentrl.core.types import Task

MAX_DEPTH = 20
MOMENTS = (datetime.date, datetime.time, datetime.timedelta)


def digest(task: Any) -> str:
    """Equal for tasks that are the same but for their ids."""
    if not isinstance(task, Task):
        return type(task).__name__
    parts = (task.prompt, task.label, task.seed, dict(task.metadata), task.images)
    return hashlib.blake2b(stable(parts).encode(errors="surrogatepass"), digest_size=16).hexdigest()


def stable(value: Any, depth: int = 0) -> str:
    """Text that is equal for equal values; of an object, its type and its attributes."""
    if value is None or isinstance(value, str | bytes | bool | int | float | complex):
        return repr(value)
    if isinstance(value, MOMENTS):
        return str(value)
    if depth > MAX_DEPTH:
        return type(value).__name__
    if isinstance(value, Mapping):
        return "{" + ",".join(sorted(f"{stable(key, depth + 1)}:{stable(item, depth + 1)}" for key, item in value.items())) + "}"
    if isinstance(value, AbstractSet):
        return "<" + ",".join(sorted(stable(item, depth + 1) for item in value)) + ">"
    if isinstance(value, list | tuple):
        return "[" + ",".join(stable(item, depth + 1) for item in value) + "]"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return type(value).__name__ + stable({item.name: getattr(value, item.name) for item in dataclasses.fields(value)}, depth + 1)
    if hasattr(value, "tolist"):
        return stable(value.tolist(), depth + 1)
    attributes = getattr(value, "__dict__", None)
    return type(value).__name__ + (stable(attributes, depth + 1) if isinstance(attributes, dict) else "")

"""Copies of values with some fields changed, where `dataclasses.replace` takes longer than what is done with the copy."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")


@cache
def _names(kind: type[Any]) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


def altered(value: T, **changes: Any) -> T:
    """Return a copy of a frozen dataclass in which fields are changed; its own checks (``__post_init__``) are not made again."""
    kind: type[Any] = type(value)
    copy, put = object.__new__(kind), object.__setattr__
    for name in _names(kind):
        put(copy, name, changes[name] if name in changes else getattr(value, name))
    return copy

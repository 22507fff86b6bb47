"""Copies of values with some fields changed, where `dataclasses.replace` takes longer than what is done with the copy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")


def altered(value: T, **changes: Any) -> T:
    """Return a copy of a frozen dataclass in which fields are changed; its own checks (``__post_init__``) are not made again."""
    copy, put = object.__new__(type(value)), object.__setattr__
    for name in value.__dataclass_fields__:
        put(copy, name, changes[name] if name in changes else getattr(value, name))
    return copy

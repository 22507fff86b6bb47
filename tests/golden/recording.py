"""Store of what the objects of a run received, by the part of the run that received it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

from tests.golden.values import Masks, plain


class Recorded(BaseException):
    """Ends a command where nothing more is to be recorded; no handler of errors takes it for one."""


class Recording:
    """What the parts of one run received, in the order in which they were made."""

    def __init__(self, masks: Masks) -> None:
        self._masks, self._prefix = masks, ""
        self._received: dict[str, list[Any]] = {}

    def add(self, part: str, value: Any) -> None:
        """Store what a part received."""
        self._received.setdefault(f"{self._prefix}{part}", []).append(plain(value, self._masks))

    @contextmanager
    def of(self, prefix: str) -> Iterator[None]:
        """Store what is received within the block under names that begin with `prefix`."""
        before, self._prefix = self._prefix, f"{prefix}."
        try:
            yield
        finally:
            self._prefix = before

    def has(self, part: str) -> bool:
        """Return True if a part has received something."""
        return f"{self._prefix}{part}" in self._received

    def result(self) -> dict[str, Any]:
        """Return everything by part: texts, or the number of objects, and what the first and the last one received where these differ."""
        return {part: _shortened(values) for part, values in sorted(self._received.items())}

    def spy(self, part: str, kind: type[Any], *, without: Collection[str] = ()) -> AbstractContextManager[Any]:
        """Store the arguments with which objects of a class are made, but those named in `without`; the objects are made as usual."""
        real = kind.__init__
        signature = inspect.signature(real)

        @functools.wraps(real)
        def init(self_: Any, *arguments: Any, **named: Any) -> None:
            bound = signature.bind(self_, *arguments, **named)
            bound.apply_defaults()
            _, *given = bound.arguments.items()
            self.add(part, {name: value for name, value in given if name not in without})
            real(self_, *arguments, **named)

        return patch.object(kind, "__init__", init)


def _shortened(values: list[Any]) -> Any:
    if all(isinstance(value, str) for value in values):
        return values
    first, last = values[0], values[-1]
    return {"count": len(values), "first": first} | ({"last": last} if last != first else {})

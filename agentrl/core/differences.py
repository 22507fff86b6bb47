"""Two plays of the same thing side by side, and the first value, in order of time, that is not the same.

A play is a sequence of turns; a turn is its values by name, in the order in which they came about.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

TurnValues: TypeAlias = Mapping[str, Any]

AGENT = "agent"
"""Name of the value that says which agent acts in a turn."""
END = "end"
"""Name of the difference of two plays where one has ended and the other goes on."""


class Tokens(NamedTuple):
    """A value made of tokens: their ids, which are compared, and their text for people."""

    ids: tuple[int, ...]
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first value that is not the same; `expected` and `got` are text for people, and the ids are those of values made of tokens."""

    turn: int  # from 0
    what: str  # name of the value, or `END`
    expected: str
    got: str
    agent: str = ""
    expected_ids: tuple[int, ...] = ()
    got_ids: tuple[int, ...] = ()

    @property
    def token(self) -> int:
        """Place of the first token that is not the same; 0 for values that are not made of tokens."""
        return first_place(self.expected_ids, self.got_ids) or 0


def first_place(expected: Sequence[Any], got: Sequence[Any]) -> int | None:
    """Return the first place at which two sequences differ, which may be the end of the shorter one; `None` if they are equal."""
    missing = object()
    pairs = itertools.zip_longest(expected, got, fillvalue=missing)
    return next((place for place, (one, other) in enumerate(pairs) if one != other), None)


def in_words(value: Any) -> str:
    """Return a value as text for people."""
    if isinstance(value, Tokens):
        return value.text
    return "none" if value is None else f"{value:.12g}" if isinstance(value, float) else str(value)


def first_difference(
    expected: Sequence[TurnValues], got: Sequence[TurnValues], *, tolerance: float = 0.0, show: Callable[[Any], str] = in_words
) -> Difference | None:
    """Return the first difference of two plays, `None` if there is none.

    Args:
        expected: The turns of the first play.
        got: The turns of the second play.
        tolerance: Difference of two numbers, absolute or as a share, up to which they are the same.
        show: Makes text of a value.
    """
    for turn, (before, after) in enumerate(itertools.zip_longest(expected, got)):
        if before is None or after is None:
            words = ["it has ended" if values is None else "it goes on" for values in (before, after)]
            return Difference(turn=turn, what=END, expected=words[0], got=words[1])
        for what in dict.fromkeys((*before, *after)):
            one, other = before.get(what), after.get(what)
            if not _same(one, other, tolerance):
                ids = [value.ids if isinstance(value, Tokens) else () for value in (one, other)]
                agent, texts = str(before.get(AGENT, "")), {"expected": show(one), "got": show(other)}
                return Difference(turn=turn, what=what, agent=agent, **texts, expected_ids=ids[0], got_ids=ids[1])
    return None


def _same(one: Any, other: Any, tolerance: float) -> bool:
    if isinstance(one, Tokens) and isinstance(other, Tokens):
        return one.ids == other.ids
    if isinstance(one, int | float) and isinstance(other, int | float):
        return math.isclose(one, other, rel_tol=tolerance, abs_tol=tolerance)
    return bool(one == other)

"""Picks the tests that can notice a planted bug: those that execute a line that it changes, the fastest first."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from tests.mutants.bugs import Mutant

LIMIT_S, ALL_LIMIT_S, FACTOR = 10.0, 60.0, 10.0
"""Seconds that a picked test may take, and all together, besides a multiple of those that they take without a bug."""


@dataclass(slots=True)
class Record:
    """The lines that each test executes without a bug, and its seconds."""

    imported: Mapping[str, Sequence[int]]
    """Lines of each file that were executed before the first test."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of each test, with those of the fixtures that it shares with others, in the order in which the tests were run."""
    lines: dict[str, dict[int, set[str]]] = field(default_factory=dict)
    """Tests that execute a line, by file and number."""

    def add(self, result: Mapping[str, Any]) -> None:
        """Add the result of a `Recorder`."""
        seconds, fixtures = result["seconds"], result["fixtures"]
        users: dict[str, set[str]] = {test: {test} for test in fixtures}
        for test, names in fixtures.items():
            self.seconds[test] = seconds[test] + sum(seconds[name] for name in names)
            for name in names:
                users.setdefault(name, set()).add(test)
        for file, lines in result["lines"].items():
            known = self.lines.setdefault(file, {})
            for line, owners in lines.items():
                known.setdefault(int(line), set()).update(*(users.get(owner, ()) for owner in owners))


@dataclass(frozen=True, slots=True)
class Pick:
    """The tests to be run for a bug."""

    limits_s: Mapping[str, float]
    """Seconds that each test may take, in the order in which they are to be run."""
    in_memory: bool
    """False if a changed line is executed before the first test, so that modules have to be imported with the bug."""
    limit_s: float
    """Seconds that all tests may take."""


def pick(mutant: Mutant, text: str, record: Record) -> Pick:
    """Return the tests for a bug in a file with this text.

    They are the tests of the group that execute a changed line. If such a line is executed by an import, or by no test, they are
    all tests of the group.
    """
    lines = changed_lines(text, mutant)
    known = record.lines.get(mutant.file, {})
    covering = {test for line in lines for test in known.get(line, ())}
    at_import = not lines.isdisjoint(record.imported.get(mutant.file, ()))
    group = [test for test in record.seconds if belongs(test, mutant.tests)]
    picked = [test for test in group if test in covering]
    if at_import or not picked:
        picked = group
    picked.sort(key=lambda test: (test not in covering, record.seconds[test]))
    seconds = {test: FACTOR * record.seconds[test] for test in picked}
    return Pick({test: LIMIT_S + seconds[test] for test in picked}, not at_import, ALL_LIMIT_S + sum(seconds.values()))


def changed_lines(text: str, mutant: Mutant) -> set[int]:
    """Return the numbers of the lines of the statements that a bug changes, of compound ones those before the body."""
    start, end = _changed_part(mutant)
    begin = text.index(mutant.old)
    first, last = (text.count("\n", 0, begin + place) + 1 for place in (start, max(start, end - 1)))
    changed = set(range(first, last + 1))
    statements = [_Statement.of(node) for node in ast.walk(ast.parse(text)) if isinstance(node, _Statement.KINDS)]
    heads = [statement.head for statement in statements if not changed.isdisjoint(statement.head)]
    if not heads:  # the line of an else, or of a comment
        around = [statement for statement in statements if first in statement.lines]
        heads = [max(around, key=lambda statement: statement.lines.start).head] if around else []
    return changed.union(*heads)


def belongs(test: str, listed: Sequence[str]) -> bool:
    """Return True if a test is one of those that a group lists, which are files and names."""
    return any(test == name or test.startswith((f"{name}::", f"{name}[")) for name in listed)


def _changed_part(mutant: Mutant) -> tuple[int, int]:
    """Return where the part of the old text begins and ends that the new text does not have at its beginning or end."""
    start = _common(mutant.old, mutant.new)
    return start, len(mutant.old) - _common(mutant.old[start:][::-1], mutant.new[start:][::-1])


def _common(text: str, other: str) -> int:
    """Return how many characters two texts have in common at their beginning."""
    return next((place for place, (one, two) in enumerate(zip(text, other, strict=False)) if one != two), min(len(text), len(other)))


@dataclass(frozen=True, slots=True)
class _Statement:
    """The lines of a statement; those before the body, if it has one, are its head."""

    KINDS: ClassVar = (ast.stmt, ast.ExceptHandler)
    lines: range
    head: range

    @classmethod
    def of(cls, node: Any) -> _Statement:
        first = _first_line(node)
        body = getattr(node, "body", ()) or getattr(node, "cases", ())
        end = max(first + 1, _first_line(body[0])) if body else node.end_lineno + 1
        return cls(range(first, node.end_lineno + 1), range(first, end))


def _first_line(node: Any) -> int:
    if isinstance(node, ast.match_case):
        return node.pattern.lineno
    return min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", ()))])

"""The list of planted bugs, and parts of it."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIST = Path(__file__).parents[1] / "mutants.toml"
PIECES = 4
"""Pieces of the list that a part consists of."""
COVERED = ("agentrl/algo/**/*.py", "agentrl/learner/*.py", "agentrl/tune/*.py", "agentrl/weights/*.py", "agentrl/rollout/chat.py")
"""Files in which a bug may leave a run that looks well and learns the wrong thing; each of them has at least one planted."""
WITHOUT_BEHAVIOUR = frozenset(
    {
        # A docstring alone.
        "agentrl/algo/__init__.py",
        "agentrl/learner/__init__.py",
        "agentrl/weights/__init__.py",
        # Public names alone, which the contract tests pin.
        "agentrl/tune/__init__.py",
    }
)
"""Files among those of `COVERED` in which no bug can be planted."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One bug."""

    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def __str__(self) -> str:
        """Return the file and the changed text in a line."""
        return f"{self.file}: {self.old.strip()!r} -> {self.new.strip()!r}"

    def planted(self, text: str) -> str:
        """Return the text of the file with the bug.

        Raises:
            ValueError: If the text to be replaced is not there exactly once.
        """
        if text.count(self.old) != 1:
            raise ValueError(f"{self.file} has {self.old!r} {text.count(self.old)} times; correct {LIST.name}")
        return text.replace(self.old, self.new)


def read_mutants(path: Path = LIST, only: str = "") -> list[Mutant]:
    """Return the bugs of the list, or those of files whose path has `only` in it."""
    groups = tomllib.loads(path.read_text())["group"]
    found = [Mutant(group["file"], old, new, tuple(group["tests"])) for group in groups for old, new in group["mutants"]]
    return [mutant for mutant in found if only in mutant.file]


def uncovered(mutants: Sequence[Mutant]) -> list[str]:
    """Return the files of `COVERED` in which no bug is planted."""
    files = {path.relative_to(ROOT).as_posix() for pattern in COVERED for path in ROOT.glob(pattern)}
    return sorted(files - WITHOUT_BEHAVIOUR - {mutant.file for mutant in mutants})


def part(mutants: Sequence[Mutant], number: int, count: int) -> list[Mutant]:
    """Return one of several parts of the bugs; each bug is in one of them.

    Bugs with the same tests stay together, for the tests of a part are run without a bug first. A part takes pieces from all over
    the list, because tests of some packages take longer than others.

    Args:
        mutants: The bugs.
        number: The number of the part, from 1.
        count: How many parts there are.
    """
    alike = sorted(mutants, key=lambda mutant: mutant.tests)
    pieces = PIECES * count
    bounds = [len(alike) * piece // pieces for piece in range(pieces + 1)]
    return [mutant for piece in range(number - 1, pieces, count) for mutant in alike[bounds[piece] : bounds[piece + 1]]]

"""Plants the bugs of `mutants.toml` one at a time in a copy of the project, and reports those that no test notices.

    python -m tests.mutants [--only algo] [--workers 2]

Each bug is a text of a file with another in its place; the tests that should fail stand beside it. First they must pass without it.
The last line is ``N mutants, N caught, 0 survived``; the exit code is 1 if one survived, and 2 if a file that `COVERED` names has no bug.
"""

from __future__ import annotations

import argparse
import os
import queue
import shutil
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.forks import Forks, end_all
from tests.mutant_forks import run_tests

ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_suffix(".toml")
LEFT_OUT = (".git", ".venv*", ".*cache", ".hypothesis", "runs", "__pycache__", "build", "dist")
LIMIT_S = 600.0
"""Seconds for the tests of one bug; one that makes them hang is noticed too."""
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
CAUGHT = 1
"""Exit code of pytest when a test failed; any other but 0 says that the tests could not be run."""


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


def passes(forks: Forks, copy: Path, tests: tuple[str, ...]) -> bool:
    """Run tests in a copy of the project until the first fails.

    Raises:
        RuntimeError: If they could not be run.
    """
    code, output = run_tests(forks, copy, tests, LIMIT_S)
    if code not in (0, CAUGHT, None):
        # A bug that keeps the tests from being collected has been noticed as well.
        if "error" in output.rpartition("\n\n")[2] or "Interrupted" in output:
            return False
        raise RuntimeError(f"{' '.join(tests)} ended with {code}:\n{output}")
    return code == 0


def main() -> int:
    """Plant every bug and report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="part of the path of a file: only its bugs")
    parser.add_argument("--workers", type=int, default=2, help="copies to be tested at once")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as tests/conftest.py has it, which is too late for processes that are forked
    mutants = read_mutants(only=options.only)
    if not options.only and (bare := uncovered(mutants)):
        print("no bug is planted in these files:", *bare, sep="\n  ")
        return 2
    for mutant in mutants:
        mutant.planted((ROOT / mutant.file).read_text())
    start, survivors = time.monotonic(), []
    with tempfile.TemporaryDirectory(prefix="agentrl-mutants-") as folder:
        copies: queue.Queue[tuple[Forks, Path]] = queue.Queue()
        for number in range(options.workers):
            copy = shutil.copytree(ROOT, Path(folder) / str(number), ignore=shutil.ignore_patterns(*LEFT_OUT))
            copies.put((Forks("tests.mutant_forks"), Path(copy)))

        def survives(mutant: Mutant | None, tests: tuple[str, ...]) -> bool:
            forks, copy = copies.get()
            try:
                if mutant is None:
                    return passes(forks, copy, tests)
                path = copy / mutant.file
                path.write_text(mutant.planted(text := path.read_text()))
                try:
                    return passes(forks, copy, tests)
                finally:
                    path.write_text(text)
            finally:
                copies.put((forks, copy))

        with ThreadPoolExecutor(options.workers) as pool:
            groups = list(dict.fromkeys(mutant.tests for mutant in mutants))
            broken = [tests for tests, fine in zip(groups, pool.map(lambda tests: survives(None, tests), groups), strict=True) if not fine]
            if broken:
                print("these tests fail without a bug:", *(" ".join(tests) for tests in broken), sep="\n  ")
                return 2
            for mutant, survived in zip(mutants, pool.map(lambda mutant: survives(mutant, mutant.tests), mutants), strict=True):
                print(f"{'SURVIVED' if survived else 'caught  '} {mutant}", flush=True)
                survivors += [mutant] * survived
    end_all()
    print(f"{time.monotonic() - start:.0f} s")
    print(f"{len(mutants)} mutants, {len(mutants) - len(survivors)} caught, {len(survivors)} survived")
    return int(bool(survivors))


if __name__ == "__main__":
    sys.exit(main())

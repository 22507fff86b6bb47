"""Plants the bugs of `mutants.toml` one at a time in a copy of the project, and reports those that no test notices.

    python -m tests.mutants [--only algo] [--part 1/20] [--workers 2] [--results FILE] [--skip FILE]

Each bug is a text of a file with another in its place; the tests that should fail stand beside it. First they must pass without it,
which also records the lines that each of them executes. A bug then meets the tests that execute its lines, the fastest first, and all
tests beside it only if none of those fails.
The last line is ``N mutants, N caught, 0 survived``; the exit code is 1 if one survived, and 2 if a test fails without a bug or a file
that `COVERED` names has no bug.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.forks import end_all
from tests.mutants.bugs import ROOT, Mutant, part, read_mutants, uncovered
from tests.mutants.copies import BrokenTests, Copy
from tests.mutants.picks import Record, pick

LIBRARIES = (
    *("deepspeed", "hypothesis.strategies", "numpy", "peft", "psutil"),
    *("transformers.models.llama.modeling_llama", "transformers.trainer", "verl.trainer.ppo.core_algos"),
    *("vllm.distributed.weight_transfer.factory", "vllm.model_executor.layers.utils", "vllm.model_executor.model_loader.reload"),
)
"""Libraries whose import takes longer than most tests."""


def main(words: Sequence[str] | None = None) -> int:
    """Plant every bug and report."""
    options = _options(words)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as tests/conftest.py has it, which is too late for processes that are forked
    mutants = read_mutants(only=options.only)
    if not options.only and (bare := uncovered(mutants)):
        print("no bug is planted in these files:", *bare, sep="\n  ")
        return 2
    for mutant in mutants:
        mutant.planted((ROOT / mutant.file).read_text(encoding="utf-8"))
    skipped = caught_before(options.skip) if options.skip else set()
    mutants = [mutant for mutant in part(mutants, *options.part) if str(mutant) not in skipped]
    start = time.monotonic()
    try:
        survivors = plant(mutants, options.workers, options.results)
    except BrokenTests as error:
        print("these tests fail without a bug:", error, sep="\n  ")
        return 2
    finally:
        end_all()
    print(f"{time.monotonic() - start:.0f} s")
    print(f"{len(mutants)} mutants, {len(mutants) - len(survivors)} caught, {len(survivors)} survived")
    return int(bool(survivors))


def plant(
    mutants: Sequence[Mutant], workers: int, results: Path | None, *, root: Path = ROOT, libraries: Sequence[str] = LIBRARIES
) -> list[Mutant]:
    """Plant bugs.

    Args:
        mutants: The bugs.
        workers: Copies of the project in which bugs are planted at the same time.
        results: A file to which a line is appended for each bug.
        root: The project.
        libraries: Libraries that the tests need.

    Returns:
        The bugs that no test noticed.

    Raises:
        BrokenTests: If a test fails without a bug.
    """
    if not mutants:
        return []
    files = sorted({mutant.file for mutant in mutants})
    tests = list(dict.fromkeys(test for mutant in mutants for test in mutant.tests))
    write, start = _Results(results), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="agentrl-mutants-") as name, ThreadPoolExecutor(workers) as pool:
        folder = Path(name).resolve()
        copies = [Copy(folder / str(number), files, tests, root, libraries) for number in range(workers)]
        imported, *_ = pool.map(Copy.collect, copies)
        record, idle = Record(imported), _Idle(copies)
        for result in pool.map(idle.record, dict.fromkeys(test.partition("::")[0] for test in tests)):
            record.add(result)
        print(f"{len(record.seconds)} tests pass without a bug ({time.monotonic() - start:.0f} s)", flush=True)

        def caught(mutant: Mutant) -> bool:
            picked = pick(mutant, (root / mutant.file).read_text(encoding="utf-8"), record)
            with idle.copy() as copy:
                begin = time.monotonic()
                noticed = copy.catches(mutant, picked)
                write(mutant, noticed, time.monotonic() - begin)
                return noticed

        survivors = []
        for mutant, noticed in zip(mutants, pool.map(caught, mutants), strict=True):
            print(f"{'caught  ' if noticed else 'SURVIVED'} {mutant}", flush=True)
            survivors += [mutant] * (not noticed)
        return survivors


def caught_before(path: Path) -> set[str]:
    """Return the bugs that a file of results has as caught."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else ()
    return {result["id"] for result in map(json.loads, lines) if result["outcome"] == "passed"}


class _Idle:
    """Copies of the project that no thread is using."""

    def __init__(self, copies: Sequence[Copy]) -> None:
        self._copies: queue.Queue[Copy] = queue.Queue()
        for copy in copies:
            self._copies.put(copy)

    @contextmanager
    def copy(self) -> Iterator[Copy]:
        copy = self._copies.get()
        try:
            yield copy
        finally:
            self._copies.put(copy)

    def record(self, file: str) -> dict[str, Any]:
        with self.copy() as copy:
            return copy.record(file)


class _Results:
    """A file with a line of JSON for each bug, written as soon as it is judged."""

    def __init__(self, path: Path | None) -> None:
        self._path, self._lock = path, threading.Lock()

    def __call__(self, mutant: Mutant, caught: bool, seconds: float) -> None:
        line = json.dumps({"id": str(mutant), "outcome": "passed" if caught else "failed", "seconds": round(seconds, 3)})
        if self._path is not None:
            with self._lock, self._path.open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")


def _options(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="part of the path of a file: only its bugs")
    parser.add_argument("--part", type=_part, default=(1, 1), metavar="K/N", help="the K-th of N parts of the bugs")
    parser.add_argument("--workers", type=int, default=2, help="copies to be tested at once")
    parser.add_argument("--results", type=Path, metavar="FILE", help="append a line of JSON for each bug")
    parser.add_argument("--skip", type=Path, metavar="FILE", help="results: bugs that they have as caught are not planted again")
    return parser.parse_args(words)


def _part(text: str) -> tuple[int, int]:
    number, _, count = text.partition("/")
    if not (number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)):
        raise argparse.ArgumentTypeError(f"{text} is no part; the second of four is 2/4")
    return int(number), int(count)


if __name__ == "__main__":
    sys.exit(main())

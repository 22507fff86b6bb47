"""Runs the tests that `make test` leaves out: all of them, or the part whose turn it is.

    python -m tests.suites all          # make test-all: every test there is, continued where it was ended, with a table at the end
    python -m tests.suites turn         # make test-turn: one part of `TURNS`; what .ci/run does with the time that is left
    python -m tests.suites needs        # what the part of this turn needs of the machine, in words
    python -m tests.suites simulate     # files and minutes of the next turns
    python -m tests.suites next         # raise the number of the turn, once for each change that lands
    python -m tests.suites table FILE   # the table of results that pytest wrote with --results FILE

A file of tests belongs to one part, so that the parts together have all of them. ``tests/suites.json`` has the number of the next turn
and the seconds that each file took, by which the parts are balanced; a file that is not in it belongs to a part by its name.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pytest

from tests.results import SUITES, Result, read, table

ROOT = Path(__file__).parents[1]
RECORD, RESULTS = Path(__file__).with_suffix(".json"), ROOT / "build" / "test-all.jsonl"
ALONE = ("faults", "planted")
"""Suites whose tests kill processes, fill file systems, or use every core."""
TURNS = 8
FORGOTTEN = 25
"""Commits after which the turn changes although nobody has raised its number."""
UNKNOWN_S = 60.0
MARKED = re.compile(rf"\bmark\.({'|'.join(SUITES)})\b")
BROWSER = "tests/browser/"
INSTALLED = (BROWSER, "tests/clients/")
"""Folders whose tests need packages of their own."""
TARGETS = {"clients": ".venv-clients/.installed", "browser": ".venv-browser/.installed", "real_model": ".venv/.real-model"}
"""Need -> what the Makefile installs for it."""


def files() -> dict[str, set[str]]:
    """Return the files that have tests of `SUITES`, with what their tests need: "clients", "browser", "real_model", "containers"."""
    texts = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in sorted((ROOT / "tests").rglob("*.py"))}
    helpers = {  # modules that mark the parameters of tests
        f"from {name.removesuffix('.py').replace('/', '.')} import": marks
        for name, text in texts.items()
        if "/test_" not in name and (marks := set(MARKED.findall(text)))
    }
    found: dict[str, set[str]] = {}
    for name, text in texts.items():
        if "/test_" not in name:
            continue
        marks = set(MARKED.findall(text)) | ({"browser"} if name.startswith(BROWSER) else set())
        marks = marks.union(*(more for line, more in helpers.items() if line in text))
        if marks:
            found[name] = {mark for mark in marks if mark in TARGETS} | ({"containers"} if "container_engine" in text else set())
    return found


def parts(names: Iterable[str], seconds: Mapping[str, float], count: int = TURNS) -> dict[str, int]:
    """Return the part of each file.

    Args:
        names: The files. Those of a folder with packages of its own stay together, so that one part installs them.
        seconds: Seconds that files took, perhaps also of some that are gone. The largest is laid first, each into the part with the
            least, so that a new file changes the part of no other.
        count: Number of parts.
    """
    sizes: defaultdict[str, float] = defaultdict(float)
    for name, size in seconds.items():
        sizes[_together(name)] += size
    loads, laid = [0.0] * count, {}
    for unit, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        laid[unit] = least = min(range(count), key=loads.__getitem__)
        loads[least] += size
    return {name: laid.get(unit := _together(name), zlib.crc32(unit.encode()) % count) for name in names}


def _together(name: str) -> str:
    return next((folder for folder in INSTALLED if name.startswith(folder)), name)


def turn_of(number: int, commits: int) -> int:
    """Return the part that is tested, `commits` after the number of the turn was raised."""
    return (number + commits // FORGOTTEN) % TURNS


def this_turn() -> int:
    """Return the part that is tested in this checkout."""
    last = _git("log", "-1", "--format=%H", "--", RECORD.relative_to(ROOT).as_posix())
    commits = int(_git("rev-list", "--count", f"{last}..HEAD") or 0) if last else 0
    return turn_of(_record()[0], commits)


def files_of(turn: int) -> list[str]:
    """Return the files of a part, the longest first."""
    _, seconds = _record()
    mine = [name for name, part in parts(files(), seconds).items() if part == turn]
    return sorted(mine, key=lambda name: -seconds.get(name, UNKNOWN_S))


def needs_of(names: Iterable[str]) -> set[str]:
    """Return what the tests of some files need."""
    known = files()
    return {need for name in names for need in known[name]}


def prepare(needs: Iterable[str]) -> None:
    """Install what tests need, as the Makefile does."""
    for need in sorted(set(needs) & TARGETS.keys()):
        subprocess.run(["make", "--no-print-directory", TARGETS[need]], cwd=ROOT, check=True)


def run_turn(words: Sequence[str]) -> int:
    """Run the part whose turn it is, with more words for pytest."""
    turn = this_turn()
    mine = files_of(turn)
    prepare(needs_of(mine))
    print(f"part {turn + 1} of {TURNS}: {len(mine)} files", flush=True)
    return _pytest("-m", " or ".join(SUITES), *words, *mine)


def run_all(words: Sequence[str]) -> int:
    """Run every test that this commit has not passed, and print the table; `words` are for pytest."""
    commit = f"{_git('rev-parse', 'HEAD')} {zlib.crc32(_git('diff', 'HEAD').encode())}"
    head = RESULTS.with_suffix(".commit")
    if not head.exists() or head.read_text() != commit:
        RESULTS.unlink(missing_ok=True)
        RESULTS.parent.mkdir(exist_ok=True)
        head.write_text(commit)
    prepare(TARGETS)
    begun, results = time.monotonic(), (f"--results={RESULTS}",)  # in one word: pytest takes a path that is there for a folder of tests
    by_file = ("--dist=loadfile", "--no-loadscope-reorder")  # as `make test` has it
    beside = " or ".join(suite for suite in SUITES if suite not in ALONE)
    codes = {
        _pytest("-n", os.environ.get("PYTEST_WORKERS", "3"), *by_file, *results, *words),
        _pytest("-n", "2", *by_file, "-m", f"({beside}) and not ({' or '.join(ALONE)})", *results, *words),
        _pytest("-m", " or ".join(ALONE), *results, "--faults-report=faults-report.md", *words),
    }
    failed = print_table(RESULTS)
    print(f"{(time.monotonic() - begun) / 60:.1f} minutes this time")
    # A session in which every test has passed before has none to run.
    return int(failed or not codes <= {pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED})


def print_table(path: Path) -> bool:
    """Print why tests were skipped, a table of the suites, the tests that failed, and the sum; return True if one failed."""
    found = read(path).values()
    for reason, count in sorted(reasons(found).items()):
        print(f"skipped {count}: {reason}")
    print(*table(found), sep="\n")
    counts = [sum(result.outcome == outcome for result in found) for outcome in ("passed", "failed", "skipped")]
    for result in found:
        if result.outcome == "failed":
            print(f"FAILED {result.id}")
    print(f"{counts[0]} passed, {counts[1]} failed, {counts[2]} skipped", flush=True)
    return counts[1] > 0


def reasons(results: Iterable[Result]) -> dict[str, int]:
    """Return why tests were skipped, with the number of tests."""
    found: defaultdict[str, int] = defaultdict(int)
    for result in results:
        if result.outcome == "skipped":
            found[result.reason.removeprefix("Skipped: ")] += 1
    return found


def simulate() -> None:
    """Print the parts of the next turns, with the minutes that their files took."""
    (_, seconds), begin, seen = _record(), this_turn(), set()
    for turn in [(begin + number) % TURNS for number in range(TURNS)]:
        mine = files_of(turn)
        seen.update(mine)
        minutes = sum(seconds.get(name, UNKNOWN_S) for name in mine) / 60
        print(f"part {turn + 1}: {len(mine)} files, {minutes:.1f} minutes; needs {', '.join(sorted(needs_of(mine))) or 'nothing'}")
    print(f"{len(seen)} of {len(files())} files")


def write_record(*, turn: int, seconds: Mapping[str, float]) -> None:
    """Write the number of the next turn, and the seconds of each file."""
    rounded = {name: round(seconds[name], 1) for name in sorted(seconds)}
    RECORD.write_text(json.dumps({"turn": turn, "seconds": rounded}, indent=1) + "\n", encoding="utf-8")


def raise_turn() -> None:
    """Raise the number of the turn; when a round begins, lay the parts by the seconds of the last `run_all`, if that had all files."""
    turn, seconds = _record()
    took: defaultdict[str, float] = defaultdict(float)
    for result in read(RESULTS).values():
        if result.suite != "test":
            took[result.id.partition("::")[0]] += result.seconds
    begins = (turn + 1) % TURNS == 0 and took.keys() >= files().keys()
    write_record(turn=turn + 1, seconds=took if begins else seconds)


def _record() -> tuple[int, dict[str, float]]:
    found = json.loads(RECORD.read_text(encoding="utf-8"))
    return found["turn"], found["seconds"]


def _git(*words: str) -> str:
    """Return what git says; nothing where there is no git, or no repository."""
    try:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        return ""


def _pytest(*words: str) -> int:
    return subprocess.run([sys.executable, "-m", "pytest", *words], cwd=ROOT, check=False).returncode


def main(words: Sequence[str]) -> int:
    """Do what the first word says; the others are for pytest."""
    match words:
        case ["all", *rest]:
            return run_all(rest)
        case ["turn", *rest]:
            return run_turn(rest)
        case ["needs"]:
            print(*sorted(needs_of(files_of(this_turn()))))
        case ["simulate"]:
            simulate()
        case ["table", path]:
            return int(print_table(Path(path)))
        case ["next"]:
            raise_turn()
        case _:
            print(__doc__)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

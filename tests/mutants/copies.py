"""Copies of the project, in which bugs are planted and tests are run."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.forks import Forks
from tests.mutants.bugs import Mutant
from tests.mutants.picks import ALL_LIMIT_S, Pick
from tests.mutants.session import NOT_SWAPPED

LEFT_OUT = (".git", ".venv*", ".*cache", ".hypothesis", "runs", "__pycache__", "build", "dist")
LIMIT_S = 600.0
"""Seconds for the tests of one bug; one that makes them hang is noticed too."""
CAUGHT = 1
"""Exit code of pytest when a test failed; any other but 0 says that the tests could not be run."""


class BrokenTests(Exception):
    """Tests that fail without a bug."""


class Copy:
    """A copy of the project with two processes: one has collected its tests, the other has the libraries loaded alone.

    Args:
        folder: The folder of the copy; files beside it have its name at the beginning of theirs.
        files: Files in which bugs are planted.
        tests: Files and names of the tests that are collected.
        root: The project.
        libraries: Modules of other projects that are loaded before those of the project.
    """

    def __init__(self, folder: Path, files: Sequence[str], tests: Sequence[str], root: Path, libraries: Sequence[str]) -> None:
        self._folder = Path(shutil.copytree(root, folder, ignore=shutil.ignore_patterns(*LEFT_OUT)))
        self._log, settings = self._beside(".log"), self._beside(".json")
        self._log.touch()
        wanted = {"files": files, "tests": tests, "imported": str(self._beside(".imported")), "log": str(self._log)}
        settings.write_text(json.dumps({"copy": str(folder), **wanted}))
        self._collected, self._fresh = Forks("tests.mutants.session", str(settings)), Forks("tests.mutants.fresh", *libraries)
        self._alone: dict[str, bool] = {}
        self._together: dict[tuple[str, ...], bool] = {}

    def collect(self) -> dict[str, list[int]]:
        """Collect the tests, which comes before any bug is planted; return the lines of each file that imports execute."""
        self._first_failure({"picked": {}}, LIMIT_S)
        return json.loads(self._beside(".imported").read_text())

    def record(self, file: str) -> dict[str, Any]:
        """Run the tests of a file without a bug, and return the result of the `Recorder`.

        Raises:
            BrokenTests: If one fails.
        """
        result = self._beside(".record")
        code, failed = self._first_failure({"record": file, "result": str(result)}, LIMIT_S)
        if code:
            raise BrokenTests(failed or file)
        return json.loads(result.read_text())

    def catches(self, mutant: Mutant, pick: Pick) -> bool:
        """Plant a bug and run tests: those that are picked, then those of its group unless a test that passes by itself has failed.

        Raises:
            BrokenTests: If the tests of the group do not pass together without a bug.
        """
        with self._planted(mutant) as text:
            code, failed = self._run_picked(mutant, pick, text)
        if code is None or (failed and self._passes_alone(failed, pick.limits_s[failed])):
            return True
        with self._planted(mutant):
            if self._passes(mutant.tests):
                return False
        if not self._passes_together(mutant.tests):
            raise BrokenTests(" ".join(mutant.tests))
        return True

    def _run_picked(self, mutant: Mutant, pick: Pick, text: str) -> tuple[int | None, str]:
        picked = {"picked": pick.limits_s}
        if pick.in_memory:
            code, failed = self._first_failure({**picked, "file": mutant.file, "text": text}, pick.limit_s)
            if code != NOT_SWAPPED:
                return code, failed
        return self._first_failure({**picked, "tests": mutant.tests}, pick.limit_s)

    def _first_failure(self, order: dict[str, Any], limit_s: float) -> tuple[int | None, str]:
        """Return the exit code of pytest, None if it was killed, and the name of the test that failed, if one did."""
        failed = self._beside(".failed")
        failed.unlink(missing_ok=True)
        forks = self._fresh if "tests" in order else self._collected
        code = self._ask(forks, {**order, "failed": str(failed)}, limit_s)
        return code, failed.read_text(encoding="utf-8") if code == CAUGHT and failed.exists() else ""

    def _passes_alone(self, test: str, limit_s: float) -> bool:
        if test not in self._alone:
            self._alone[test] = self._first_failure({"picked": {test: limit_s}}, ALL_LIMIT_S + limit_s)[0] == 0
        return self._alone[test]

    def _passes_together(self, tests: tuple[str, ...]) -> bool:
        if tests not in self._together:
            self._together[tests] = self._passes(tests)
        return self._together[tests]

    def _passes(self, tests: tuple[str, ...]) -> bool:
        self._log.write_text("")
        code = self._ask(self._fresh, {"tests": tests}, LIMIT_S)
        if code not in (0, CAUGHT, None):
            output = self._end_of_log()
            # A bug that keeps the tests from being collected has been noticed as well.
            if "error" in output.rpartition("\n\n")[2] or "Interrupted" in output:
                return False
            raise RuntimeError(f"{' '.join(tests)} ended with {code}:\n{output}")
        return code == 0

    def _ask(self, forks: Forks, order: dict[str, Any], limit_s: float) -> int | None:
        try:
            return forks.run({"input": os.devnull, "output": str(self._log), "copy": str(self._folder), **order}, limit_s)
        except RuntimeError as error:
            raise RuntimeError(f"{error}:\n{self._end_of_log()}") from None

    def _end_of_log(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")[-4000:]

    def _beside(self, suffix: str) -> Path:
        return self._folder.with_suffix(suffix)

    @contextlib.contextmanager
    def _planted(self, mutant: Mutant) -> Iterator[str]:
        path = self._folder / mutant.file
        text = path.read_text(encoding="utf-8")
        path.write_text(mutant.planted(text), encoding="utf-8")
        try:
            yield text
        finally:
            path.write_text(text, encoding="utf-8")

"""Runs the checks in a process of their own, and gives an answer whatever becomes of it."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import subprocess
from collections.abc import Callable, Mapping
from typing import IO, Any, TypeAlias

from agentrl.check.findings import CheckSettings, Report
from agentrl.core.errors import ConfigError
from agentrl.core.files import scratch_directory
from agentrl.core.types import Task

GIVEN = "AGENTRL_CHECK_GIVEN"
"""Environment variable that names a file with an environment that was given as an object in Python, pickled."""
GRACE_S = 2.0
END_S = 5.0
TAIL = 600

Run: TypeAlias = Callable[[bytes, Mapping[str, str], IO[bytes], float], int | None]
"""Runs the process that checks, and ends all that it has started: standard input, environment variables to add, file for standard
output and error, and seconds that it may take -> exit code, negative for a signal; `None` if its time was up."""


def command(*words: str, on_start: Callable[[int], object] = bool, **more: str) -> Run:
    """Return a function that runs a command in a process, and a session, of its own, with more environment variables.

    `on_start` is told the id of the process, and of its session.
    """

    def run(request: bytes, names: Mapping[str, str], output: IO[bytes], limit_s: float) -> int | None:
        variables = {**os.environ, **names, **more}
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=output, stderr=output, env=variables, start_new_session=True)
        on_start(process.pid)
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(request, timeout=limit_s)
            return process.poll()
        finally:
            if process.poll() is None:
                process.terminate()  # a guardian ends what left the session, too
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(END_S)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    return run


def check(settings: CheckSettings, run: Run, task: Task | None = None) -> Report:
    """Return what was found in an environment, or in one episode of a task; it is a finding too that it hangs or ends the process.

    The process reads the pickled settings and task from its standard input. It writes events, one JSON object a line, to the file that the
    environment variable ``AGENTRL_CHECK_EVENTS`` names, and the name of the latest call to ``AGENTRL_CHECK_STATUS``.

    Raises:
        ConfigError: If the request itself was wrong.
    """
    # The last call may begin just before the budget ends, and then has its own deadline.
    limit = settings.check.budget_s + settings.check.timeout_s + GRACE_S
    with scratch_directory() as folder, open(folder / "output", "w+b") as output:
        events, status = str(folder / "events"), str(folder / "status")
        names = {"AGENTRL_CHECK_EVENTS": events, "AGENTRL_CHECK_STATUS": status}
        code = run(pickle.dumps((settings, task)), names, output, limit)
        return _report(_read_events(events), _read(status), code, _tail(output), settings.env, limit)


def _report(events: list[dict[str, Any]], method: str, code: int | None, tail: str, env: str, limit: float) -> Report:
    if not events:
        raise RuntimeError(f"the process that checks did not start (exit code {code}); it wrote:\n{tail}")
    last = events[-1]
    if last["phase"] == "refused":
        raise ConfigError(last["field"], last["value"], last["problem"], last["remedy"])
    report = Report.from_dict(last["report"])
    if last["phase"] == "failed":
        raise RuntimeError(f"the check itself failed:\n{last['error']}")
    if last["phase"] == "done":
        return report
    where = f"{report.env.get('source', env)}: {report.env.get('name', '')}.{method or last['phase']}"
    if code is None:
        report.add("hangs", where, f"no answer after {limit:g} s, while checking {last['phase']}")
        report.seconds = limit
    else:
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        seen = f"the process ended with {how}, while checking {last['phase']}"
        report.add("crashes", where, f"{seen}; it wrote: {tail}" if tail else seen)
    report.skipped.append("everything after this")
    return report


def _read_events(path: str) -> list[dict[str, Any]]:
    """Every whole line; the last may be cut where the process ended."""
    events = []
    for line in _read(path).splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            events.append(json.loads(line))
    return events


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except FileNotFoundError:
        return ""


def _tail(output: IO[bytes]) -> str:
    size = output.seek(0, os.SEEK_END)
    output.seek(max(size - TAIL, 0))
    return output.read().decode(errors="replace").strip()

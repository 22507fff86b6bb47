"""Runs the checks in a process of their own, and gives an answer whatever becomes of it."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from typing import IO, Any, Protocol

from agentrl.check.findings import CheckSettings, Report, Rule, Severity
from agentrl.core.errors import ConfigError

GRACE_S = 2.0
TAIL = 600

RULES = (
    Rule(
        id="hangs",
        severity=Severity.ERROR,
        title="user code holds the process and does not come back",
        why="Nothing in a worker moves any more, not even deadlines, and the whole run stalls.",
        remedy="Put limits on loops and deadlines on waiting, or write the method as a plain def, which runs on a thread.",
        snippet="for _ in range(max_tries):  # not: while True",
    ),
    Rule(
        id="crashes",
        severity=Severity.ERROR,
        title="the environment ends its process",
        why="A worker, and every episode in it, would be lost with it.",
        remedy="Do not call exit() or os._exit(); run native code that may crash in a process of its own.",
        snippet="subprocess.run([sys.executable, 'simulate.py'], timeout=10, check=True)",
    ),
)


class Run(Protocol):
    """Runs the process that checks."""

    def __call__(self, request: bytes, names: Mapping[str, str], output: IO[bytes], limit_s: float) -> int | None:
        """Run it to its end, or end it, with all that it has started.

        Args:
            request: For its standard input.
            names: Environment variables to add.
            output: Its standard output and error.
            limit_s: Seconds that it may take.

        Returns:
            Its exit code, negative for a signal; `None` if its time was up.
        """
        ...


def command(*words: str) -> Run:
    """Runs a command in a process, and a session, of its own."""

    def run(request: bytes, names: Mapping[str, str], output: IO[bytes], limit_s: float) -> int | None:
        process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=output, stderr=output, env={**os.environ, **names}, start_new_session=True
        )
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(request, timeout=limit_s)
            return process.poll()
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    return run


def check(settings: CheckSettings, run: Run) -> Report:
    """Check an environment.

    Args:
        settings: Settings of the check.
        run: Runs a process that reads the pickled settings from its standard input, and writes events, one JSON object a
            line, to the file that the environment variable ``AGENTRL_CHECK_EVENTS`` names, and the latest call's name to
            ``AGENTRL_CHECK_STATUS``.

    Returns:
        What was found; an environment that hangs or ends the process is a finding too.

    Raises:
        ConfigError: If the request itself was wrong.
    """
    limit = settings.budget_s + settings.timeout_s + GRACE_S
    with tempfile.TemporaryDirectory(prefix="agentrl-check-") as folder, open(os.path.join(folder, "output"), "w+b") as output:
        events, status = os.path.join(folder, "events"), os.path.join(folder, "status")
        names = {"AGENTRL_CHECK_EVENTS": events, "AGENTRL_CHECK_STATUS": status}
        code = run(pickle.dumps(settings), names, output, limit)
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
        seen = f"no answer after {limit:g} s, while checking {last['phase']}"
        report.add("hangs", where, seen)
        report.seconds = limit
    else:
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        report.add(
            "crashes", where, f"the process ended with {how}, while checking {last['phase']}" + (f"; it wrote: {tail}" if tail else "")
        )
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

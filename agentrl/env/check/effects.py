"""What the whole process shares, and an environment should leave alone: directory, environment, signals, output."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from agentrl.env.check.findings import Report, Rule, Severity

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM", "SIGCHLD", "SIGUSR1") if hasattr(signal, name))

RULES = (
    Rule(
        id="changes-cwd",
        severity=Severity.ERROR,
        title="a call changes the current directory",
        why="The directory belongs to the process: every other episode, and the run's own relative paths, move with it.",
        remedy="Use absolute paths; give subprocesses their directory with cwd=.",
        snippet="subprocess.run(command, cwd=self.folder, check=True)  # in place of os.chdir(self.folder)",
    ),
    Rule(
        id="changes-environ",
        severity=Severity.WARNING,
        title="a call changes environment variables",
        why="They belong to the process: other episodes see the change, in an order that depends on timing.",
        remedy="Give subprocesses their variables with env=, or set them once when the file is imported.",
        snippet='subprocess.run(command, env={**os.environ, "SEED": str(seed)}, check=True)',
    ),
    Rule(
        id="changes-signals",
        severity=Severity.ERROR,
        title="a call replaces a signal handler",
        why="Handlers belong to the process: a run may no longer end, or save, when it is interrupted.",
        remedy="Use a deadline instead of SIGALRM, and leave the other signals to the run.",
        snippet="async with asyncio.timeout(5):\n    await work()",
    ),
    Rule(
        id="writes-output",
        severity=Severity.NOTE,
        title="the environment writes to standard output or standard error",
        why="With hundreds of episodes at once the terminal is of no use any more, and logs grow.",
        remedy="Log with the logging module, or return numbers in info.",
        snippet='logging.getLogger(__name__).debug("reward %s", reward)',
    ),
)


@dataclass(frozen=True, slots=True)
class _Shared:
    cwd: str
    environ: dict[str, str]
    handlers: dict[int, Any]


class Effects:
    """Compares the process before and after calls, and puts back what was changed.

    Args:
        report: Gets the findings.
        where: Gives file, class and method for a method's name.
    """

    def __init__(self, report: Report, where: Callable[[str], str]) -> None:
        self._report, self._where = report, where
        self._first = self.before()
        self._once: set[str] = set()

    def before(self) -> _Shared:
        """The state to compare with."""
        return _Shared(_cwd(), dict(os.environ), {number: signal.getsignal(number) for number in SIGNALS})

    def compare(self, before: _Shared, method: str) -> None:
        """Report what differs from `before`."""
        after = self.before()
        if after == before:
            return
        where = self._where(method)
        if after.cwd != before.cwd:
            self._report.add("changes-cwd", where, f"{method} changed it to {after.cwd!r}")
            os.chdir(before.cwd)
        self._compare_environ(before.environ, after.environ, method)
        names = [signal.Signals(number).name for number in SIGNALS if before.handlers[number] != after.handlers[number]]
        if names:
            self._report.add("changes-signals", where, f"{method} replaced the handler of {', '.join(names)}")
            self.restore_signals()

    def _compare_environ(self, before: dict[str, str], after: dict[str, str], method: str) -> None:
        """A variable that is set once, as some modules do when they are imported, is left alone."""
        changed = sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
        if not changed:
            return
        again = [key for key in changed if key in self._once]
        self._once.update(changed)
        if again:
            self._report.add("changes-environ", self._where(method), f"{method} changed {', '.join(again[:5])}")
        os.environ.clear()
        os.environ.update(before)

    def restore_signals(self) -> None:
        """Put the first handlers back, where this is the main thread, which alone may do so."""
        if threading.current_thread() is threading.main_thread():
            for number, handler in self._first.handlers.items():
                if handler is not None and signal.getsignal(number) != handler:
                    signal.signal(number, handler)


def output_size() -> int:
    """Bytes that this process has written to standard output and standard error, if they are files."""
    sys.stdout.flush()
    sys.stderr.flush()
    return sum(os.fstat(number).st_size for number in (1, 2))


def _cwd() -> str:
    try:
        return os.getcwd()
    except OSError:
        return ""

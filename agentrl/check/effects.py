"""Checks of process-wide state that an environment should not change: directory, environment, signals, output."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psutil

from agentrl.check.findings import Report, Rule, Severity

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM", "SIGCHLD", "SIGUSR1") if hasattr(signal, name))

NEVER_AWAITED = re.compile(r"coroutine '(.+)' was never awaited")
OWN = ("_async_method.", "_timed", "EnvSession.")

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
        id="import-effects",
        severity=Severity.WARNING,
        title="importing the file changes the process, or starts something",
        why="Every worker imports it, and the command too: what is started runs everywhere, and a thread does not follow into a fork.",
        remedy="Start it in preload, which is called once per worker, or in reset, and end it in close.",
        snippet="@classmethod\ndef preload(cls):\n    cls.index = load_index()",
    ),
    Rule(
        id="never-awaited",
        severity=Severity.ERROR,
        title="a coroutine is made and never awaited",
        why="What it was to do is not done, and only a line among the warnings says so.",
        remedy="Write await before the call.",
        snippet="await self.save(answer)  # not: self.save(answer)",
    ),
    Rule(
        id="background-error",
        severity=Severity.ERROR,
        title="a task or a thread in the background ends with an error that nobody sees",
        why="The episode goes on without it, and is trained on as if nothing had happened.",
        remedy="Keep the task or thread and wait for it, so that its error becomes the episode's.",
        snippet="await self.task  # in close, or where its result is needed",
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


@contextmanager
def importing(report: Report, where: str) -> Iterator[None]:
    """Report what importing a file does to the process; environment variables it may set, as some libraries ask for."""
    cwd, handlers = _cwd(), {number: signal.getsignal(number) for number in SIGNALS}
    threads, children = set(threading.enumerate()), {child.pid for child in psutil.Process().children()}
    yield
    started = [thread.name for thread in threading.enumerate() if thread not in threads and thread.name != "agentrl-env"]
    new = [child for child in psutil.Process().children() if child.pid not in children]
    names = [signal.Signals(number).name for number in SIGNALS if signal.getsignal(number) != handlers[number]]
    seen = (
        f"the current directory is {_cwd()!r} after it" if _cwd() != cwd else "",
        f"it replaced the handler of {', '.join(names)}" if names else "",
        f"it started {len(started)} threads: {', '.join(started[:3])}" if started else "",
        f"it started {len(new)} processes" if new else "",
    )
    for words in filter(None, seen):
        report.add("import-effects", where, words)
    if _cwd() != cwd:
        os.chdir(cwd)


def watch_background(report: Report, where: Callable[[str], str]) -> None:
    """From now on report coroutines that are never awaited, and errors that end threads."""

    def warned(message: Warning | str, category: type[Warning], *rest: Any, **options: Any) -> None:
        found = NEVER_AWAITED.match(str(message))
        if found and issubclass(category, RuntimeWarning) and not found.group(1).startswith(OWN):
            report.add("never-awaited", where(found.group(1).rpartition(".")[2]), str(message))

    def ended(error: threading.ExceptHookArgs) -> None:
        if error.exc_type is not SystemExit:
            name = error.thread.name if error.thread else "a thread"
            report.add("background-error", where("step"), f"{name} ended with {error.exc_type.__name__}: {error.exc_value}")

    warnings.simplefilter("always", RuntimeWarning)
    warnings.showwarning = warned
    threading.excepthook = ended


def watch_tasks(loop: asyncio.AbstractEventLoop, report: Report, where: Callable[[str], str]) -> None:
    """From now on report errors that end tasks for which nobody waits."""

    def lost(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error, task = context.get("exception"), context.get("task") or context.get("future")
        if error is not None and task is not None:
            name = getattr(task.get_coro(), "__qualname__", "a task") if isinstance(task, asyncio.Task) else "a future"
            report.add("background-error", where("step"), f"{name} ended with {type(error).__name__}: {error}")

    loop.set_exception_handler(lost)


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

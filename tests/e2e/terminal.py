"""A command in a pseudo-terminal, typed at as a person would."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import termios
import time
from types import TracebackType

import psutil

from tests.e2e.runs import ROOT, command


class Terminal:
    """Runs a command whose standard streams are a terminal; a context manager that leaves no process behind."""

    def __init__(self, *words: str, env: dict[str, str] | None = None) -> None:
        self.shown = ""
        self._mark = 0
        self._master, slave = pty.openpty()
        self.at_start = termios.tcgetattr(slave)
        termios.tcsetwinsize(slave, (40, 200))
        environment = {**os.environ, "TERM": "xterm", "PYTHONWARNINGS": "ignore", **(env or {})}
        self._slave = slave
        self.process = subprocess.Popen(
            command(*words), cwd=ROOT, env=environment, stdin=slave, stdout=slave, stderr=slave, start_new_session=True
        )

    def type(self, text: str) -> None:
        """Type text as it is; end it with a line feed for the Enter key."""
        os.write(self._master, text.encode())

    def until(self, pattern: str, timeout_s: float = 60.0) -> str:
        """Wait until what was shown since the last match matches; returns what was shown until then, without its colours."""
        deadline = time.monotonic() + timeout_s
        while not (found := re.search(pattern, self.shown[self._mark :])):
            self._read(deadline, pattern)
        seen = self.shown[self._mark : self._mark + found.end()]
        self._mark += found.end()
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen)

    def until_it_waits(self, timeout_s: float = 60.0) -> None:
        """Wait until the process waits for a key: `input` forgets a signal that comes between its prompt and that moment."""
        deadline, process = time.monotonic() + timeout_s, psutil.Process(self.process.pid)
        while process.status() != psutil.STATUS_SLEEPING and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.05)

    def end(self, timeout_s: float = 60.0) -> int:
        """Wait for the end of the process; returns its exit code."""
        deadline = time.monotonic() + timeout_s
        while self.process.poll() is None:
            self._read(deadline, "the end", step_s=0.1)
        return self.process.returncode

    def _read(self, deadline: float, waited_for: str, step_s: float = 1.0) -> None:
        if time.monotonic() > deadline:
            raise AssertionError(f"{waited_for!r} was not shown in time; this was:\n{self.shown}")
        if select.select([self._master], [], [], step_s)[0]:
            self.shown += os.read(self._master, 65536).decode("utf-8", "replace")

    def attributes(self) -> list[object]:
        """The terminal's settings now."""
        return list(termios.tcgetattr(self._slave))

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        os.close(self._master)
        os.close(self._slave)

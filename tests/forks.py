"""Work in processes that are forked from one that has its modules loaded, which saves every piece of work that time.

A module that is run as a program and calls `serve` is that one; `Forks` starts it when the first order comes.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

_all: list[Forks] = []


class Forks:
    """A process that forks one child for each order.

    Args:
        module: The program; it calls `serve`.
        arguments: The words after it.
    """

    def __init__(self, module: str, *arguments: str) -> None:
        self._command = [sys.executable, "-m", module, *arguments]
        self._process: subprocess.Popen[bytes] | None = None
        _all.append(self)

    def run(self, order: Mapping[str, Any], limit_s: float) -> int | None:
        """Have an order carried out.

        Args:
            order: What the child is told, anything that JSON can say. ``input`` and ``output`` name the files that are its standard
                input and its standard output and error.
            limit_s: Seconds after which the child and its process group are killed.

        Returns:
            The exit code of the child, negative if a signal ended it; None if it was killed after `limit_s`.

        Raises:
            RuntimeError: If the process that forks has ended by itself.
        """
        process = self._server()
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(order).encode() + b"\n")
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"{' '.join(self._command)} ended with {process.wait()}")
        child = int(line)
        ready, _, _ = select.select([process.stdout], [], [], limit_s)
        if not ready:
            kill_group(child)
        code = int(process.stdout.readline())
        return code if ready else None

    def end(self) -> None:
        """End the process that forks, if there is one."""
        if self._process is not None:
            try:
                self._process.communicate(timeout=10)
            except subprocess.TimeoutExpired:  # a busy machine
                self._process.kill()
                self._process.wait()
            self._process = None

    def _server(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        return self._process


def end_all() -> None:
    """End every process that forks."""
    for forks in _all:
        forks.end()


def serve(load: Callable[[], None], work: Callable[[dict[str, Any]], int], *, after: Callable[[int], None] = lambda child: None) -> None:
    """Fork a child for each order on standard input, one after the other.

    Args:
        load: Loads what the children share; it may print.
        work: Carries out an order in the child; returns the exit code.
        after: Called in this process with the process id of each child that has ended.
    """
    channel = Channel()
    load()
    channel.serve(work, after=after)


class Channel:
    """The orders on standard input and the answers on standard output, which is standard error for all else from here on."""

    def __init__(self) -> None:
        self._orders = os.fdopen(os.dup(0), encoding="utf-8")
        self._answers = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)

    def serve(self, work: Callable[[dict[str, Any]], int], *, after: Callable[[int], None] = lambda child: None) -> None:
        """Fork a child for each order until there are no more; see `serve`."""
        for line in self._orders:
            order = json.loads(line)
            child = os.fork()
            if not child:
                self._answers.close()
                self._orders.close()
                os.setsid()
                _redirect(order["input"], os.O_RDONLY, 0)
                _redirect(order["output"], os.O_WRONLY | os.O_APPEND, 1)
                os.dup2(1, 2)
                sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
                sys.exit(work(order))
            self._answers.write(f"{child}\n")
            _, status = os.waitpid(child, 0)
            after(child)
            self._answers.write(f"{os.waitstatus_to_exitcode(status)}\n")


def kill_group(leader: int) -> None:
    """Kill a process group, if it is still there."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def _redirect(path: str, flags: int, number: int) -> None:
    descriptor = os.open(path, flags)
    os.dup2(descriptor, number)
    os.close(descriptor)

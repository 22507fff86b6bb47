"""A parent of a command that ends whatever the command leaves behind, however it ends.

The system gives an orphan to the nearest ancestor that has asked for orphans, here the guardian. So no process of an environment escapes
by leaving its session or by losing its parent, a forked copy of the trainer included. The guardian does nothing else: it may collect
every child, and takes no exit code away from code that waits for it.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time
from collections.abc import Callable
from typing import NoReturn

from agentrl.core.operating_system import end_with_parent, on_linux
from agentrl.env.isolation import launcher, system
from agentrl.env.isolation.leftovers import command_line, command_lines, family, is_helper, listed

HEARD = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD)
GRACE_S = 2.0
"""Seconds in which processes may end by themselves once the command has ended."""
HELPERS_S = 30.0
"""Seconds for those that tidy up after others."""
POLL_S = 0.02


def stand_by(*, gently: bool = True) -> None:
    """Go on in a child; the present process becomes its guardian, which ends as the child did; on Linux only.

    Args:
        gently: Hand signals on to the child. If not, SIGTERM or the end of the parent kills the child and all that it started.
    """
    if not on_linux():
        return
    guardian = os.getpid()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HEARD)  # before there is a child that a signal could leave alone
    child = os.fork()
    if not child:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        end_with_parent(guardian)
        return
    with contextlib.suppress(OSError):  # a system without the call has no guardian, and the command goes on
        launcher.become("agentrl-guard", death_signal=0 if gently else signal.SIGTERM)
    code = _follow(child, gently=gently)
    _report(_end_family(), code)
    _end_as(code)


def _follow(child: int, *, gently: bool) -> int:
    """Collect processes until the child ends; return its exit code. Waits for signals, which are blocked; each end of a process is one.

    A signal of the terminal goes to all its processes, and so is not handed on.
    """
    while child not in (ended := system.collect()):
        told = signal.sigwaitinfo(HEARD)
        # Codes above 0 are of signals that the kernel sends, as at Ctrl-C in a terminal; others come from a process.
        if told.si_signo != signal.SIGCHLD and told.si_code <= 0:
            launcher.send([child], told.si_signo if gently else signal.SIGKILL)
    return ended[child]


def _end_family() -> list[str]:
    """End the descendants, and return the command lines of those that did not end by themselves."""
    _collect_while(lambda: bool(command_lines(family(os.getpid()))), GRACE_S)
    ended: dict[int, str] = {}

    def kill() -> bool:
        left = command_lines(family(os.getpid()))
        ended.update(left)
        system.kill_families(left)
        return bool(left)

    _collect_while(kill, GRACE_S)
    # Helpers come last: they end by themselves once the processes are gone that they tidy up after.
    _collect_while(lambda: bool(_helpers()), HELPERS_S)
    system.kill_families(_helpers())
    return list(ended.values())


def _helpers() -> list[int]:
    return [pid for pid in family(os.getpid()) if is_helper(command_line(pid))]


def _collect_while(there_are: Callable[[], bool], seconds: float) -> None:
    """Collect descendants as long as there are some of a kind, for so many seconds at most."""
    deadline = time.monotonic() + seconds
    while system.has_children() and there_are() and time.monotonic() < deadline:
        time.sleep(POLL_S)
        system.collect()


def _report(ended: list[str], code: int) -> None:
    if ended:
        how = f"the command was ended by {signal.Signals(-code).name}; " if code < 0 else ""
        count = f"{len(ended)} process{'es' * (len(ended) > 1)}"
        with contextlib.suppress(OSError):
            os.write(2, f"agentrl: {how}ended {count} that the command had left behind: {listed(ended)}\n".encode(errors="replace"))


def _end_as(code: int) -> NoReturn:
    """End with an exit code, or by the signal that a negative one stands for."""
    if code < 0:
        # The guardian ends by the same signal as the command did, and is to leave no second dump.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError, ValueError):
            signal.signal(-code, signal.SIG_DFL)  # SIGKILL has no handler to set
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 128 - code)

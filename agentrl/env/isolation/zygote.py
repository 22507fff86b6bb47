"""The zygote: a clean process that loads the user's file once, forks a process per episode, and lets none of them survive.

It is started with `subprocess`, not forked, so nothing of the rollout worker is in it: no threads, no secrets, no model.
Whatever a process of an episode leaves behind becomes the zygote's child, because it has asked the system for that; so a
child that it does not know is to be killed.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import pickle
import select
import signal
import socket
import sys
import threading
import time
from typing import Any

from agentrl.core.errors import EnvLoadError
from agentrl.env.agent import AgentClass
from agentrl.env.boundary import EnvLimits
from agentrl.env.isolation import linux
from agentrl.env.isolation.limits import MIB, ProcessLimits
from agentrl.env.isolation.worker import CLEAN, run
from agentrl.env.load import AgentSpec, preload

MAX_PACKET = 2**16
TICK_S = 0.05
SCAN_S = 1.0
BURST = 64
"""So many new processes on the machine since the last look make it time for another."""
END_S = 5.0


class Zygote:
    """Consumes orders (fork, kill), reports deaths; waits for orders, for children, for `parent` to end, and for the clock."""

    def __init__(self, control: socket.socket, parent: int, limits: EnvLimits) -> None:
        self._control, self._parent, self._limits = control, parent, limits
        self._process = limits.process or ProcessLimits()
        self._class: AgentClass | None = None
        self._source = ""
        self._workers: dict[int, int] = {}  # process id -> number
        self._reasons: dict[int, str] = {}  # number -> why it was killed
        self._own: set[int] = set()  # started by the user's file when it was loaded
        self._wake, self._woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._resident = 0
        self._next_scan, self._last_pid = 0.0, 0
        self._suspect = False

    def load(self, agent: AgentSpec) -> None:
        """Load the user's file and get ready to fork; `EnvLoadError` if it cannot be loaded."""
        self._class, self._source = preload(agent), agent.source
        self._own = {pid for pid, info in linux.processes().items() if info.parent == os.getpid()}
        gc.collect()
        gc.freeze()  # so that collections in the children do not copy what they share
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)
        self._resident = linux.processes()[os.getpid()].resident

    def serve(self) -> None:
        """Work until the other side closes the connection or ends."""
        poll = select.poll()
        for descriptor in (self._control.fileno(), self._parent, self._wake):
            poll.register(descriptor, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in poll.poll(TICK_S * 1000 if self._workers else None)}
            if self._wake in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake, 4096)
            self._collect()
            if self._parent in ready or (self._control.fileno() in ready and not self._obey()):
                return
            self._watch()

    def end(self) -> None:
        """Kill everything that was started and wait for it."""
        until = time.monotonic() + END_S
        while linux.has_children() and time.monotonic() < until:
            linux.kill_families({pid for pid, info in linux.processes().items() if info.parent == os.getpid()})
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            time.sleep(0.005)

    def tell(self, **report: Any) -> None:
        """Send a report; nobody may be there to read it."""
        with contextlib.suppress(OSError):
            self._control.send(json.dumps(report).encode()[:MAX_PACKET])

    def _obey(self) -> bool:
        try:
            packet, descriptors, _, _ = socket.recv_fds(self._control, MAX_PACKET, 1)
        except ConnectionError:  # closed with reports unread
            packet = b""
        if not packet:
            return False
        order, number = pickle.loads(packet)
        if order == "fork":
            self._fork(number, descriptors[0])
        else:
            found = [pid for pid, other in self._workers.items() if other == number]
            if found:
                linux.kill_families(found)
                self._suspect = True
        return True

    def _fork(self, number: int, descriptor: int) -> None:
        assert self._class is not None
        try:
            pid = os.fork()
        except OSError as error:
            self.tell(died=number, why=f"its process could not be started: {error}")
            os.close(descriptor)
            return
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for own in (self._wake, self._woken, self._parent):
                os.close(own)
            self._control.close()
            run(socket.socket(fileno=descriptor), self._class, self._source, self._limits)
        os.close(descriptor)
        self._workers[pid] = number

    def _collect(self) -> None:
        """Take note of the children that have ended, kill what they left behind, then report them."""
        dead: list[tuple[int, int]] = []
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            if pid in self._workers:
                dead.append((self._workers.pop(pid), os.waitstatus_to_exitcode(status)))
        if self._suspect or any(code != CLEAN for _, code in dead):
            self._kill_strays()
        for number, code in dead:
            self.tell(died=number, code=code, why=self._reasons.pop(number, ""))

    def _kill_strays(self) -> None:
        self._suspect = False
        me = os.getpid()
        known = self._own | self._workers.keys()
        strays = {pid for pid, info in linux.processes().items() if info.parent == me and info.state not in "ZX"} - known
        if strays:
            linux.kill_families(strays)
            self._suspect = True  # look once more when they are gone

    def _watch(self) -> None:
        """Look for episodes that have too many processes or too much memory: now and then, and when many processes are new."""
        now = time.monotonic()
        with open("/proc/loadavg", encoding="ascii") as file:
            last_pid = int(file.read().split()[4])
        burst = not 0 <= last_pid - self._last_pid < BURST
        if not self._workers or (now < self._next_scan and not burst):
            return
        self._last_pid = last_pid
        table = linux.processes()
        over = {}
        for pid, family in linux.families(table, self._workers.keys()).items():
            memory = sum(max(table[member].resident - self._resident, 0) for member in family)
            if len(family) - 1 > self._process.processes:
                over[pid] = f"it had {len(family) - 1} processes, more than --env-processes {self._process.processes}"
            elif memory > self._process.memory_mib * MIB:
                over[pid] = f"it used {memory // MIB} MiB, more than --env-memory-mib {self._process.memory_mib}"
        if over:
            for pid, why in over.items():
                self._reasons[self._workers[pid]] = why
            linux.kill_families(over)
            self._suspect = True
        self._next_scan = time.monotonic() + max(SCAN_S, 20 * (time.monotonic() - now))


def main(descriptor: int, expected_parent: int) -> None:
    """Be the zygote of the process that started this one."""
    linux.become("agentrl-envs", death_signal=signal.SIGTERM)  # ends a load that hangs; nothing has been forked yet
    parent = os.pidfd_open(expected_parent)
    if os.getppid() != expected_parent:
        return
    control = socket.socket(fileno=descriptor)
    agent, limits = pickle.loads(socket.recv_fds(control, MAX_PACKET, 0)[0])
    start = time.monotonic()
    zygote = Zygote(control, parent, limits)
    try:
        zygote.load(agent)
        linux.become("agentrl-envs", death_signal=0)
        zygote.tell(ready=os.getpid(), seconds=time.monotonic() - start, threads=threading.active_count() - 1)
        zygote.serve()
    except EnvLoadError as error:
        zygote.tell(failed=[error.field, str(error.value), error.problem, error.remedy])
    finally:
        zygote.end()
    sys.stdout.flush()
    os._exit(0)

"""The fork server: a clean process that loads the user's file once, forks a process per episode, and lets none of them survive.

It is started with `subprocess`, not forked, so nothing of the rollout worker is in it: no threads, no secrets, no model.
Whatever a process of an episode leaves behind becomes the fork server's child, because it has asked the system for that; so a
child that it does not know is to be killed. A process of an episode calls the user's code and answers over a socket.
`multiprocessing.forkserver` is not enough: it knows the processes that it forked, not what they leave behind, and has no limits.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from typing import Any

from agentrl.core.errors import EnvLoadError
from agentrl.env.agent import AgentClass
from agentrl.env.agent_spec import AgentSpec, preload
from agentrl.env.boundary import EnvLimits
from agentrl.env.isolation import launcher, system
from agentrl.env.isolation.episode_process import CLEAN, run
from agentrl.env.isolation.launcher import MIB
from agentrl.env.isolation.system import ProcessLimits

MAX_PACKET = 2**16
MAX_PROBLEM = 2500
"""Characters of each part of an error that are reported, so that four fit into a packet, however they are escaped."""
TICK_S = 0.05
SCAN_S = 1.0
BURST = 64
"""So many new processes on the machine since the last look make it time for another."""
END_S = 5.0


class ForkServer:
    """Consumes orders (fork, kill), reports deaths; waits for orders, for `parent` to end, and for the clock."""

    def __init__(self, control: socket.socket, parent: int, limits: EnvLimits) -> None:
        self._control, self._parent, self._limits = control, parent, limits
        self._process = limits.process or ProcessLimits()
        self._class: AgentClass | None = None
        self._source = ""
        self._workers: dict[int, int] = {}  # process id -> number
        self._reasons: dict[int, str] = {}  # number -> why it was killed
        self._own: set[int] = set()  # started by the user's file when it was loaded
        self._resident = 0
        self._next_scan, self._last_pid = 0.0, 0
        self._suspect = False
        self._copying = 0  # processes that are being copied: children that are not known yet may be copies
        self._ended: dict[int, int] = {}  # exit codes of such children that have ended before they are known

    def load(self, agent: AgentSpec) -> None:
        """Load the user's file and get ready to fork; `EnvLoadError` if it cannot be loaded."""
        self._class, self._source = preload(agent), agent.source
        self._own = {pid for pid, info in system.processes().items() if info.parent == os.getpid()}
        gc.collect()
        gc.freeze()  # so that collections in the children do not copy what they share
        self._resident = system.processes()[os.getpid()].resident

    def serve(self) -> None:
        """Work until the other side closes the connection or ends."""
        while True:
            ready = wait([self._control, self._parent], TICK_S if self._workers or self._suspect else None)
            self._collect()
            if self._parent in ready or (self._is_ordered() and not self._obey()):
                return
            self._watch()

    def end(self) -> None:
        """Kill everything that was started and wait for it."""
        until = time.monotonic() + END_S
        while system.has_children() and time.monotonic() < until:
            system.kill_families({pid for pid, info in system.processes().items() if info.parent == os.getpid()})
            system.collect()
            time.sleep(0.005)

    def tell(self, **report: Any) -> None:
        """Send a report; nobody may be there to read it."""
        with contextlib.suppress(OSError):
            self._control.send(json.dumps(report).encode())

    def _is_ordered(self) -> bool:
        """Return True if an order is there, or there will be none."""
        return bool(wait([self._control], 0))

    def _obey(self) -> bool:
        """Take an order; False if there will be none.

        A number with sockets is a process to fork, one without is to be killed. ``+`` says that a process is about to be copied, ``=`` with
        the number and the id of a process that this is a copy, ``-`` that there will be no more of them.
        """
        try:
            packet, descriptors, _, _ = socket.recv_fds(self._control, MAX_PACKET, 2)
        except ConnectionError:  # closed with reports unread
            return False
        if descriptors:
            self._fork(int(packet), descriptors)
        elif packet[:1] in (b"+", b"-"):
            self._copying += 1 if packet[:1] == b"+" else -1
            self._suspect = True
        elif packet[:1] == b"=":
            self._adopt(*map(int, packet[1:].split()))
        elif packet and (ordered := [pid for pid, number in self._workers.items() if number == int(packet)]):
            system.kill_families(ordered)
            self._suspect = True
        return bool(packet)

    def _adopt(self, number: int, pid: int) -> None:
        """Take a copy of a process for what it says it is, if it is a child that nobody knows; it may have ended meanwhile."""
        info = system.processes().get(pid)
        if pid in self._ended:
            self._suspect = True
            self.tell(died=number, code=self._ended.pop(pid), why="")
        elif info is None or info.parent != os.getpid() or pid in self._own | self._workers.keys():
            self.tell(died=number, code=0, why="its process could not be copied")
        else:
            self._workers[pid] = number

    def _fork(self, number: int, descriptors: Sequence[int]) -> None:
        assert self._class is not None
        try:
            pid = os.fork()
        except OSError as error:
            self.tell(died=number, code=0, why=f"its process could not be started: {error}")
            pid = -1
        if pid == 0:
            os.close(self._parent)
            self._control.close()
            connection, lane, *_ = [*(socket.socket(fileno=each) for each in descriptors), None]
            assert connection is not None
            run(connection, lane, self._class, self._source, self._limits)
        for descriptor in descriptors:
            os.close(descriptor)
        if pid < 0:
            return
        self._workers[pid] = number

    def _collect(self) -> None:
        """Take note of the children that have ended, kill what they left behind, then report them."""
        ended = system.collect()
        dead = [(self._workers.pop(pid), ended.pop(pid)) for pid in ended.keys() & self._workers.keys()]
        self._ended = {**self._ended, **ended} if self._copying else {}
        if self._suspect or any(code != CLEAN for _, code in dead):
            self._kill_strays()
        for number, code in dead:
            self.tell(died=number, code=code, why=self._reasons.pop(number, ""))

    def _kill_strays(self) -> None:
        self._suspect = False
        me = os.getpid()
        known = self._own | self._workers.keys()
        strays = {pid for pid, info in system.processes().items() if info.parent == me and info.state not in "ZX"} - known
        while strays and self._is_ordered() and self._obey():
            pass  # the order to copy a process is there before its copies are
        strays -= self._workers.keys()
        if self._copying:
            self._suspect = True
        elif strays:
            system.kill_families(strays)
            self._suspect = True  # look once more when they are gone

    def _watch(self) -> None:
        """Look for episodes that have too many processes or too much memory: now and then, and when many processes are new."""
        now = time.monotonic()
        # One small file says how many processes are new, at every tick. A look at all processes costs far more.
        with open("/proc/loadavg", encoding="ascii") as file:
            last_pid = int(file.read().split()[4])
        # Numbers of processes begin again at the end of their range, so a smaller one than before counts as a burst too.
        burst = not 0 <= last_pid - self._last_pid < BURST
        if not self._workers or (now < self._next_scan and not burst):
            return
        self._last_pid = last_pid
        table = system.processes()
        over = {}
        for pid, family in system.families(table, self._workers.keys()).items():
            # What the fork server has loaded counts in each process that shares it, so it is taken off.
            memory = sum(max(table[member].resident - self._resident, 0) for member in family)
            if len(family) - 1 > self._process.processes:
                over[pid] = f"it had {len(family) - 1} processes, more than --env-limits processes={self._process.processes}"
            elif memory > self._process.memory_mib * MIB:
                over[pid] = f"it used {memory // MIB} MiB, more than --env-limits memory_mib={self._process.memory_mib}"
        if over:
            for pid, why in over.items():
                self._reasons[self._workers[pid]] = why
            system.kill_families(over)
            self._suspect = True
        # Where many processes make a look slow, looks take a twentieth of the time at most.
        self._next_scan = time.monotonic() + max(SCAN_S, 20 * (time.monotonic() - now))


def main(descriptor: int, expected_parent: int) -> None:
    """Be the fork server of the process that started this one; standard input holds the environment's class and its limits."""
    launcher.become("agentrl-envs", death_signal=signal.SIGTERM)  # ends a load that hangs; nothing has been forked yet
    parent = os.pidfd_open(expected_parent)
    # Asked after the descriptor is open: if the parent ended before, its number may already be that of another process.
    if os.getppid() != expected_parent:
        return
    agent, limits = pickle.load(sys.stdin.buffer)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), sys.stdin.fileno())
    server = ForkServer(socket.socket(fileno=descriptor), parent, limits)
    try:
        server.load(agent)
        # From here on processes of episodes may leave others behind, which nobody would end after a signal. `serve` sees the end of the
        # parent.
        launcher.become("agentrl-envs", death_signal=0)
        server.tell(threads=threading.active_count() - 1)
        server.serve()
    except EnvLoadError as error:
        server.tell(failed=[str(text)[:MAX_PROBLEM] for text in (error.field, error.value, error.problem, error.remedy)])
    finally:
        server.end()
    sys.stdout.flush()
    os._exit(0)

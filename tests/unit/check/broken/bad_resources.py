"""Defects of `close` and of cancellation."""

import asyncio
import os
import socket
import subprocess
import tempfile
import threading
import time
from typing import ClassVar

from sound import AsyncTries, Sums


class LeavesFilesOpen(Sums):
    files: ClassVar = []

    def reset(self, state):
        self.files.append(tempfile.TemporaryFile())  # noqa: SIM115


class LeavesSocketsOpen(Sums):
    pairs: ClassVar = []

    def reset(self, state):
        self.pairs.append(socket.socketpair())


class LeavesThreads(Sums):
    def reset(self, state):
        threading.Thread(target=threading.Event().wait, daemon=True).start()


class LeavesTasks(AsyncTries):
    async def reset(self, state):
        self.ticker = asyncio.create_task(asyncio.sleep(3600))


class LeavesProcesses(Sums):
    children: ClassVar = []

    def reset(self, state):
        self.children.append(subprocess.Popen(["sleep", "3600"]))


class LeavesDaemons(Sums):
    """Its processes have lost their parent, and are in a session of their own."""

    def reset(self, state):
        subprocess.run(["sh", "-c", "setsid sleep 3600 > /dev/null 2>&1 &"], check=True)


class LeavesForks(Sums):
    def reset(self, state):
        if not os.fork():
            time.sleep(3600)


class ReplacesServer(Sums):
    """Right: one process serves all episodes."""

    server: ClassVar = []

    def reset(self, state):
        if not self.server:
            self.server.append(subprocess.Popen(["sleep", "3600"]))


class KeepsPages(Sums):
    pages: ClassVar = []

    def step(self, state):
        self.pages.append(bytearray(100_000))
        return super().step(state)


class NeedsGigabytes(Sums):
    def step(self, state):
        len(bytearray(10**9))
        return super().step(state)


class LeavesFilesWhenCancelled(AsyncTries):
    files: ClassVar = []

    async def step(self, state):
        file = tempfile.TemporaryFile()  # noqa: SIM115
        self.files.append(file)
        await asyncio.sleep(0.001)
        file.close()
        return await super().step(state)


class ClosesAll(AsyncTries):
    """Right: a file, a thread and a task, all ended in close."""

    async def reset(self, state):
        self.file = tempfile.TemporaryFile()  # noqa: SIM115
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self.stopped.wait)
        self.thread.start()
        self.ticker = asyncio.create_task(asyncio.sleep(3600))

    async def close(self):
        self.file.close()
        self.stopped.set()
        self.thread.join()
        self.ticker.cancel()


class SwallowsCancellation(AsyncTries):
    async def step(self, state):
        for _ in range(300):
            try:
                await asyncio.sleep(0.01 if state.turn else 0.001)
                break
            except BaseException:
                await asyncio.sleep(2)
        return await super().step(state)

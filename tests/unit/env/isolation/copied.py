"""An environment whose state is everything that a process can hold."""

import asyncio
import os
import random
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np

from agentrl import AgentInstance, ResetResult, StepResult
from agentrl.env.isolation import copying

SERVED = [0]  # of the module


class Everything(AgentInstance):
    """What it says next depends on everything before; the label says what else it holds."""

    def reset(self, state: Any) -> ResetResult:
        self.random, self.generator = random.Random(state.seed), np.random.default_rng(state.seed)
        self.told: list[str] = []
        SERVED[0] = 0
        (getattr(self, f"hold_{state.label}", lambda: None))()
        return ResetResult("begin")

    def hold_file(self) -> None:
        path = Path(tempfile.mkdtemp()) / "lines.txt"
        path.write_text("".join(f"line {number}\n" for number in range(100)))
        self.file = path.open(buffering=1)

    def hold_late(self) -> None:
        copying.WAIT_S = 0.3
        self.hold_file()

    def hold_written_file(self) -> None:
        self.file = (Path(tempfile.mkdtemp()) / "log.txt").open("w")

    def hold_socket(self) -> None:
        self.socket = socket.socket()

    def hold_pipe(self) -> None:
        self.pipe = os.pipe()

    def hold_program(self) -> None:
        self.program = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        self.program.stdin, _ = None, self.program.stdin.close()  # type: ignore[union-attr]
        self.program = subprocess.Popen(["sleep", "30"])

    def hold_thread(self) -> None:
        self.thread = threading.Thread(target=threading.Event().wait, name="watcher", daemon=True)
        self.thread.start()

    def hold_shared(self) -> None:
        import mmap

        self.memory = mmap.mmap(-1, 4096)

    def step(self, state: Any) -> StepResult:
        SERVED[0] += 1
        self.told.append(state.action_text)
        numbers = [self.random.random(), float(self.generator.random()), random.random(), float(np.random.random())]
        if state.action_text == "crash":
            os._exit(3)
        if state.action_text == "big":
            self.big = bytearray(10**9)
        line = os.read(self.file.fileno(), 8).decode() if state.label in ("file", "late") else ""
        seen = f"{SERVED[0]} {self.told} {numbers} {hash('text')} {line}"
        return StepResult(float(len(self.told)), seen, terminated=state.action_text == "end")


class Asynchronous(Everything):
    """The same with methods that the event loop runs, and a lock of its own."""

    async def reset(self, state: Any) -> ResetResult:  # type: ignore[override]
        self.lock = asyncio.Lock()
        result = super().reset(state)
        if state.label == "task":
            self.task = asyncio.create_task(asyncio.sleep(60), name="heartbeat")
        return result

    async def step(self, state: Any) -> StepResult:  # type: ignore[override]
        async with self.lock:
            await asyncio.sleep(0)
            return super().step(state)

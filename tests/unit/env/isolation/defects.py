"""An environment that does to its process what the action says."""

import asyncio
import ctypes
import logging
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from agentrl import AgentInstance, StepResult

KEPT = []
SEEN = {"episodes": 0}


class Defects(AgentInstance):
    def reset(self, state):
        SEEN["episodes"] += 1

    def step(self, state):
        word, _, rest = state.action_text.partition(" ")
        reward = getattr(self, word)(rest) if word != "draw" else 0.0
        if word == "huge_result":
            return StepResult(0.0, reward)
        info = {"random": random.random(), "numpy": np.random.rand(), "episodes": SEEN["episodes"]}
        return StepResult(reward or 0.0, f"{word} done", info=info)

    def close(self):
        time.sleep(0)

    def hang(self, rest):
        time.sleep(100)

    def stubborn(self, rest):
        for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
            ctypes.CDLL(None).signal(int(number), 1)
        while True:
            time.sleep(1)

    def spin_in_c(self, rest):
        ctypes.PyDLL(None).usleep(100_000_000)  # holds the interpreter's lock

    def exit_now(self, rest):
        os._exit(int(rest))

    def sys_exit(self, rest):
        sys.exit(3)

    def segfault(self, rest):
        ctypes.string_at(0)

    def allocate(self, rest):
        while True:
            KEPT.append(bytearray(2**24))

    def allocate_numpy(self, rest):
        KEPT.append(np.ones(2**34))

    def shared_memory(self, rest):
        import mmap

        for _ in range(64):
            pages = mmap.mmap(-1, 2**24)
            for place in range(0, 2**24, 4096):
                pages[place] = 1
            KEPT.append(pages)
        time.sleep(100)

    def fork_bomb(self, rest):
        while True:
            os.fork()

    def daemon(self, rest):
        """Detaches a process as daemons do."""
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.setsid()
                Path(rest).write_text(str(os.getpid()))
                time.sleep(1000)
            os._exit(0)
        os.wait()
        while not Path(rest).exists() or not Path(rest).read_text():
            time.sleep(0.01)

    def daemon_exit(self, rest):
        self.daemon(rest)
        os._exit(1)

    def child(self, rest):
        process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True, env={})
        Path(rest).write_text(str(process.pid))

    def reseed(self, rest):
        random.seed(1)
        np.random.seed(1)
        os.environ["PATH"] = "gone"
        os.chdir("/")

    def huge_file(self, rest):
        with open(rest, "wb") as file:
            while True:
                file.write(bytes(2**20))

    def files(self, rest):
        while True:
            KEPT.append(os.open(os.devnull, os.O_RDONLY))

    def huge_result(self, rest):
        return [{"role": "user", "content": "x" * 2**28}]

    def spin(self, rest):
        while True:
            pass

    def raises(self, rest):
        return {}["missing"]

    def nan(self, rest):
        return float("nan")

    def environment(self, rest):
        return float(rest in os.environ)

    def garbage(self, rest):
        """Writes to every socket there is."""
        for descriptor in range(3, 32):
            try:
                os.write(descriptor, bytes.fromhex(rest))
            except OSError:
                continue
        time.sleep(100)


def note(path, text):
    with open(path, "a") as file:
        file.write(text)


def block():
    time.sleep(100)


class Async(AgentInstance):
    async def step(self, state):
        action = state.action_text
        if action == "wait":
            try:
                await asyncio.sleep(100)
            finally:
                note(state.label, "ended")
        if action == "block":
            block()
        if action == "task":
            KEPT.append(asyncio.create_task(asyncio.sleep(100)))
        return StepResult(1.0, terminated=True)

    async def close(self):
        await asyncio.sleep(0)
        note(f"{self.label}.closed", "closed")

    async def reset(self, state):
        self.label = state.label


class BadClose(AgentInstance):
    def step(self, state):
        return StepResult(1.0, terminated=True)

    def close(self):
        logging.getLogger("mine").error("about to fail")
        raise OSError("cannot close")

"""Defects that reach beyond the environment."""

import ctypes
import json
import os
import signal
import sys
from typing import ClassVar

from sound import AsyncTries, Sums


class ChangesDirectory(Sums):
    def reset(self, state):
        os.chdir("/")


class ChangesEnviron(Sums):
    def reset(self, state):
        os.environ["EPISODE_SEED"] = str(state.seed)


class SetsAlarmHandler(AsyncTries):
    async def reset(self, state):
        signal.signal(signal.SIGALRM, lambda *_: None)


class LeavesTimer(AsyncTries):
    async def step(self, state):
        signal.setitimer(signal.ITIMER_REAL, 60)
        return await super().step(state)


class ReplacesJson(Sums):
    def reset(self, state):
        json.dumps = json.loads = lambda *values, **options: ""


class ReplacesCalls(Sums):
    def reset(self, state):
        def refuse(*values, **options):
            raise OSError("no")

        os.fstat = os.getcwd = os.kill = refuse


class ClearsModules(Sums):
    def reset(self, state):
        sys.modules.clear()


class OpensAllFiles(Sums):
    files: ClassVar = []

    def reset(self, state):
        try:
            while True:
                self.files.append(os.open(os.devnull, os.O_RDONLY))
        except OSError:
            pass


class Prints(Sums):
    """Only worth a note."""

    def step(self, state):
        print("step", state.turn)
        return super().step(state)


class ClosesOutput(Sums):
    def step(self, state):
        sys.stdout.close()
        return super().step(state)


class ClosesInput(Sums):
    def close(self):
        os.close(0)


class ReadsInput(Sums):
    def step(self, state):
        input("Go on? ")
        return super().step(state)


class ReadsLine(Sums):
    def step(self, state):
        sys.stdin.readline()
        return super().step(state)


class SetsDefaultType(Sums):
    def reset(self, state):
        import torch

        torch.set_default_dtype(torch.float64)


class SetsThreads(Sums):
    def step(self, state):
        import torch

        torch.set_num_threads(77)
        return super().step(state)


class ExitsProcess(Sums):
    def step(self, state):
        os._exit(7)


class CallsExit(Sums):
    def step(self, state):
        if "<|" in state.action_text:
            sys.exit("bad answer")
        return super().step(state)


class Segfaults(Sums):
    def step(self, state):
        ctypes.string_at(0)

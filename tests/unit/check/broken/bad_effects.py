"""Defects that reach beyond the environment."""

import ctypes
import os
import signal
import sys

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

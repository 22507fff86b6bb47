"""Defects of time."""

import re
import time

from sound import AsyncTries, Sums

from agentrl import StepResult


class SleepsInAsync(AsyncTries):
    async def step(self, state):
        time.sleep(0.07)  # noqa: ASYNC251
        return await super().step(state)


class ComputesInAsync(AsyncTries):
    async def step(self, state):
        end = time.thread_time() + 0.07
        while time.thread_time() < end:
            pass
        return await super().step(state)


class SlowStep(Sums):
    def step(self, state):
        time.sleep(0.03)
        return super().step(state)


class QuadraticInText(Sums):
    def step(self, state):
        time.sleep(2e-8 * len(state.action_text) ** 2 / 2.5)
        return super().step(state)


class HangsInAsync(AsyncTries):
    async def step(self, state):
        while True:
            time.sleep(0.01)  # noqa: ASYNC251


class HangsInTasks(Sums):
    @classmethod
    def tasks(cls):
        time.sleep(3600)


class BacktracksWithGil(Sums):
    def step(self, state):
        if re.fullmatch(r"(\w+\s?)+!", "a" * 40):  # holds the interpreter for ever
            return StepResult(1.0, terminated=True)
        return super().step(state)

"""Environments of the benchmarks: the model talks for a set number of turns, and the environment takes its time or none."""

from __future__ import annotations

import asyncio
import random
from typing import ClassVar

from agentrl import AgentInstance, StepResult, StepState, Task

MEDIAN_S, SIGMA = 0.3, 1.0


class Talk(AgentInstance):
    """Asks the same question again and again; whether the answer has an even digit earns the reward, so that groups differ."""

    turns: ClassVar[int] = 4

    @classmethod
    def tasks(cls) -> list[Task]:
        """A few hundred questions."""
        return [Task(f"What is {a}+{b}?", id=f"{a}+{b}") for a in range(20) for b in range(20)]

    async def step(self, state: StepState) -> StepResult:
        """Judge the turn and ask again."""
        await self.wait()
        reward = float(any(digit in state.action_text for digit in "02468")) / self.turns
        if state.turn + 1 == self.turns:
            return StepResult(reward, terminated=True)
        return StepResult(reward, "And now?")

    async def wait(self) -> None:
        """Answer at once."""


class OneTurn(Talk):
    """A single question."""

    turns = 1


class SlowTalk(Talk):
    """One turn, judged after a time that is lognormal with median 0.3 s and sigma 1."""

    turns = 1
    _random: ClassVar[random.Random] = random.Random(0)

    async def wait(self) -> None:
        """Wait that long."""
        await asyncio.sleep(MEDIAN_S * self._random.lognormvariate(0.0, SIGMA))

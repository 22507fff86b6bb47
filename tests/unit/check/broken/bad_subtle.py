"""Defects that a review of the code passes over easily."""

from __future__ import annotations

import asyncio
import datetime
import random
import time

from agentrl import AgentInstance, StepResult, Task


class Sums(AgentInstance):
    """What is right about the others."""

    @classmethod
    def tasks(cls):
        return [Task(f"What is {a}+{b}?", label=str(a + b)) for a in range(4, 9) for b in range(4, 9)]

    def step(self, state):
        return StepResult(float(state.action_text.strip() == state.label), terminated=True)


class DebugLineInPrompt(Sums):
    @classmethod
    def tasks(cls):
        return [Task(f"{task.prompt} (id {i}, gold={task.label}, split train)", label=task.label) for i, task in enumerate(super().tasks())]


class TellsAfterAnEmptyAnswer(Sums):
    def step(self, state):
        right = state.action_text.strip() == state.label
        if right or state.turn:
            return StepResult(float(right), terminated=True)
        return StepResult(0.0, f"That is not {state.label}. Once more, please.")


class SharedDefaultArgument(Sums):
    def __init__(self, seen=[]):  # noqa: B006
        self.seen = seen

    def step(self, state):
        new = state.action_text not in self.seen
        self.seen.append(state.action_text)
        return StepResult(float(state.action_text.strip() == state.label) * (1.0 if new else 0.5), terminated=True)


class TasksFromSet(Sums):
    @classmethod
    def tasks(cls):
        names = {"Ann", "Bob", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hal"}
        return [Task(f"Which letter comes first in {name}?", label=name[0]) for name in names]


class PromptOrderFromSet(Sums):
    def reset(self, state):
        options = {"pear", "apple", "plum", "fig", "lime", state.label}
        return {"observation": f"{state.task.prompt} One of {', '.join(options)}.\n<|assistant|>"}


class HintsByHash(Sums):
    def reset(self, state):
        self.rng = random.Random(hash(state.task.prompt))

    def step(self, state):
        noise = self.rng.random() / 100
        return StepResult(0.9 * (state.action_text.strip() == state.label) + noise, terminated=True)


class HigherOnWeekends(Sums):
    def step(self, state):
        bonus = datetime.datetime.now().toordinal() % 9 / 10
        return StepResult((state.action_text.strip() == state.label) * (0.1 + bonus), terminated=True)


class NightShift(Sums):
    def step(self, state):
        day = int(time.time() // 86400) % 1000
        return StepResult((state.action_text.strip() == state.label) * day / 1000, terminated=True)


class ForgetsAwait(Sums):
    async def save(self, text):
        self.saved = text

    async def step(self, state):
        self.save(state.action_text)
        return StepResult(float(state.action_text.strip() == state.label), terminated=True)


class JudgeFailsInBackground(Sums):
    async def judge(self, text):
        self.value = int(text)

    async def step(self, state):
        self.task = asyncio.create_task(self.judge("x" + state.action_text))
        await asyncio.sleep(0)
        return StepResult(float(state.action_text.strip() == state.label), terminated=True)


class CloseNeverReturns(Sums):
    async def close(self):
        await asyncio.Event().wait()


class NumberNeverEqualsText(Sums):
    @classmethod
    def tasks(cls):
        return [Task(task.prompt, label=int(task.label)) for task in super().tasks()]

    def solve(self, state):
        return str(state.label)

    def step(self, state):
        tried = state.action_text.strip().isdigit()
        return StepResult(0.1 * tried + 0.9 * (state.action_text.strip() == state.label), terminated=True)


class SolveRaises(Sums):
    def solve(self, state):
        return state.answer


class Solves(Sums):
    def solve(self, state):
        return state.label

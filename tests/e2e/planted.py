"""Environments with one planted error each, for which a run with the bundled model does not learn; `Sound` has none."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from agentrl import AgentInstance, StepResult, StepState, Task
from agentrl.core.protocols import GenerationRequest
from agentrl.core.types import Generation
from agentrl.engine.transformers_engine import TransformersEngine


class Sums(AgentInstance):
    """Sums of two digits, which the bundled model answers right about every second time."""

    @classmethod
    def tasks(cls) -> Iterable[Task]:
        return [Task(f"What is {a}+{b}?", label=a + b, id=f"{a}+{b}") for a in range(10) for b in range(10)]


class Sound(Sums):
    def step(self, state: StepState) -> StepResult:
        return StepResult(float(state.action_text.strip() == str(state.label)), terminated=True)


class FewTasks(Sound):
    @classmethod
    def tasks(cls) -> Iterable[Task]:
        return list(super().tasks())[:60:5]


class LabelType(Sums):
    def step(self, state: StepState) -> StepResult:
        return StepResult(float(state.action_text.strip() == state.label), terminated=True)


class Format(Sums):
    def step(self, state: StepState) -> StepResult:
        boxed = re.search(r"\\boxed\{(-?\d+)\}", state.action_text)
        return StepResult(float(boxed is not None and boxed[1] == str(state.label)), terminated=True)


class Impossible(Sums):
    @classmethod
    def tasks(cls) -> Iterable[Task]:
        return [Task(f"What is {a}+{b}?", label=f"the sum is {a + b}", id=f"{a}+{b}") for a in range(10) for b in range(10)]

    def step(self, state: StepState) -> StepResult:
        return StepResult(float(state.action_text.strip() == str(state.label)), terminated=True)


class Easy(Sums):
    def step(self, state: StepState) -> StepResult:
        return StepResult(1.0, terminated=True)


class Length(Sums):
    def step(self, state: StepState) -> StepResult:
        return StepResult(min(len(state.action_text.strip()) / 10, 1.0), terminated=True)


class OneAnswer(Sums):
    def step(self, state: StepState) -> StepResult:
        words = state.action_text.split()
        return StepResult(float("1" in "".join(words)), terminated=True)


class Failing(Sums):
    def step(self, state: StepState) -> StepResult:
        if int(state.label) % 2:
            raise RuntimeError("the service does not answer")
        return StepResult(float(state.action_text.strip() == str(state.label)), terminated=True)


class LongObservation(Sums):
    def step(self, state: StepState) -> StepResult:
        if state.turn == 0:
            return StepResult(0.0, observation="Look at this first. " * 60)
        return StepResult(float(state.action_text.strip() == str(state.label)), terminated=True)


class SameTasks(Sound):
    @classmethod
    def eval_tasks(cls) -> Iterable[Task]:
        return list(cls.tasks())[:20]


class DriftingEngine(TransformersEngine):
    """Says from the third version on that its tokens were less likely than they are, as an engine with wrong weights would."""

    async def generate(self, request: GenerationRequest) -> Generation:
        answer = await super().generate(request)
        return replace(answer, logprobs=answer.logprobs - 0.5 * (answer.versions >= 2))

"""`envs/arithmetic.py` with a system prompt that says what is asked for, as prompts outside of benchmarks have one."""

from __future__ import annotations

import dataclasses

from agentrl import AgentInstance, StepResult, StepState, Task
from agentrl.suites.load import load_agent
from tests.e2e.runs import ENVS

Arithmetic = load_agent(str(ENVS / "arithmetic.py")).load()
RULES = (
    "You are a helpful assistant. You are asked for the sum or the difference of two digits. "
    "Work it out with care, then answer with the number alone: no words, no sign of equality, nothing after it. "
    "An answer with anything else than the number is wrong."
)


class WithRules(AgentInstance):
    """The same questions and judgement, after a system prompt."""

    @classmethod
    def tasks(cls) -> list[Task]:
        """All questions."""
        system = {"role": "system", "content": RULES}
        return [dataclasses.replace(task, prompt=[system, {"role": "user", "content": str(task.prompt)}]) for task in Arithmetic.tasks()]

    def step(self, state: StepState) -> StepResult:
        """As in arithmetic."""
        result: StepResult = Arithmetic().step(state)
        return result

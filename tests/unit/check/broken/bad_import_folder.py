"""Does something when it is imported."""

import os

os.chdir("/")

from agentrl import AgentInstance, StepResult, Task  # noqa: E402


class Sums(AgentInstance):
    @classmethod
    def tasks(cls):
        return [Task(f"What is {a}+{b}?", label=str(a + b)) for a in range(4, 9) for b in range(4, 9)]

    def step(self, state):
        return StepResult(float(state.action_text.strip() == state.label), terminated=True)

"""Sums with a mistake in the reward: the answer is text and the label a number, and they are never equal."""

from collections.abc import Iterable

from agentrl import AgentInstance, StepResult, StepState, Task


class Sums(AgentInstance):
    """Sums of two digits."""

    @classmethod
    def tasks(cls) -> Iterable[Task]:
        return [Task(f"What is {a}+{b}?", label=a + b, id=f"{a}+{b}") for a in range(10) for b in range(10)]

    def step(self, state: StepState) -> StepResult:
        return StepResult(float(state.action_text.strip() == state.label), terminated=True)

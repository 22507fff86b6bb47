"""The smallest environment: one question, one answer, one reward.

Run it with::

    agentrl train --agent examples/parity.py --async
"""

from collections.abc import Iterable

from agentrl import AgentInstance, StepResult, StepState, Task


class Parity(AgentInstance):
    """Is a number even?"""

    @classmethod
    def tasks(cls) -> Iterable[Task]:
        """One hundred questions; the label is the right answer."""
        return [Task(f"Is {number} even?", label="no" if number % 2 else "yes") for number in range(100)]

    def step(self, state: StepState) -> StepResult:
        """Compare the model's text with the label."""
        right = state.action_text.strip() == state.label
        return StepResult(reward=float(right), terminated=True)

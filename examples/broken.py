"""An environment whose reward can be gamed, as `agentrl check` finds: it looks for the label anywhere in the answer.

Run it with::

    agentrl check examples/broken.py
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
        """Reward an answer that holds the label."""
        return StepResult(reward=float(state.label in state.action_text), terminated=True)

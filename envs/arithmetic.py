"""Mental arithmetic: one question, one answer, the smallest environment there is.

It teaches the shape of an environment. `tasks` says what to ask and carries the right answer as the label; `step` judges
what the model wrote. There is no `reset`, so the model sees the task's own prompt. Run it with::

    agentrl train --agent envs/arithmetic.py --async

    user       What is 3+4?
    assistant  7
"""

import re
from collections.abc import Iterable

from agentrl import AgentInstance, StepResult, StepState, Task


class Arithmetic(AgentInstance):
    """Sums of two digits, and differences that are not negative."""

    @classmethod
    def tasks(cls) -> Iterable[Task]:
        """All 155 questions; the order is up to ``--shuffle`` and the seed."""
        digits = range(10)
        sums = [Task(f"What is {a}+{b}?", label=a + b, id=f"{a}+{b}") for a in digits for b in digits]
        differences = [Task(f"What is {a}-{b}?", label=a - b, id=f"{a}-{b}") for a in digits for b in digits if a >= b]
        return sums + differences

    def solve(self, state: StepState) -> str:
        """Return a right answer, for `agentrl check`."""
        return str(state.label)

    def step(self, state: StepState) -> StepResult:
        """Compare the last number of the answer with the label, so that "The answer is 7." counts too."""
        numbers = re.findall(r"-?\d+", state.action_text)
        right = bool(numbers) and numbers[-1] == str(state.label)
        return StepResult(1.0 if right else 0.0, terminated=True)

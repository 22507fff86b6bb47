"""Nothing is wrong here; every broken environment is one of these with one thing changed."""

from agentrl import AgentInstance, StepResult, Task


class Sums(AgentInstance):
    """One turn."""

    @classmethod
    def tasks(cls):
        return [Task(f"What is {a}+{b}?", label=str(10 * a + b)) for a, b in ((1, 2), (2, 5), (3, 3), (4, 8), (5, 1), (6, 9))]

    def step(self, state):
        return StepResult(float(state.action_text.strip() == state.label), terminated=True)


class Tries(Sums):
    """Up to three turns."""

    def step(self, state):
        right = state.action_text.strip() == state.label
        return StepResult(float(right), "No. Again?", terminated=right or state.turn == 2)


class AsyncTries(Tries):
    """Up to three turns, on the event loop."""

    async def step(self, state):
        return Tries.step(self, state)

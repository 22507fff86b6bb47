"""The environment of a single answer that somebody else judges: reward models of the run."""

from __future__ import annotations

from agentrl.env.agent import AgentInstance, StepResult, StepState


class Answer(AgentInstance):
    """One turn without a reward of its own; the models of ``--reward-model`` say what it is worth."""

    def step(self, state: StepState) -> StepResult:
        """End the episode."""
        return StepResult(0.0, terminated=True)


def load_answer(spec: str) -> type[AgentInstance]:
    """Return the class of the environment that ``answer:`` names."""
    return Answer

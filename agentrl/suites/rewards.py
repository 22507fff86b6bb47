"""Schemes of environments that end after one answer: ``reward:URL``, judged by servers, and ``answer:``, judged by reward models."""

from __future__ import annotations

from agentrl.env.agent import AgentInstance, StepResult, StepState
from agentrl.env.rewards.server import load_reward_servers
from agentrl.suites.scheme import Scheme


class Answer(AgentInstance):
    """One turn without a reward of its own; the models of ``--reward-model`` say what it is worth."""

    def step(self, state: StepState) -> StepResult:
        """End the episode."""
        return StepResult(0.0, terminated=True)


def load_answer(spec: str) -> type[AgentInstance]:
    """Return the class of the environment that ``answer:`` names."""
    return Answer


REWARD_SERVERS = Scheme(name="reward", load=load_reward_servers, is_remote=True)
ANSWER = Scheme(name="answer", load=load_answer)

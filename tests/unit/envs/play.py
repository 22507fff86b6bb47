"""Plays an environment with scripted answers, by calling its methods as a rollout does."""

from pathlib import Path

from agentrl import AgentInstance, ResetState, StepResult, StepState, Task
from agentrl.suites.load import load_agent

ENVS = Path(__file__).parents[3] / "envs"


def load(name: str) -> type[AgentInstance]:
    return load_agent(str(ENVS / f"{name}.py")).load()


def play(cls: type[AgentInstance], task: Task, *answers: str) -> list[StepResult]:
    """The result of every step; fails if the episode is over before the answers are used up."""
    env, results = cls(), []
    assert env.reset(ResetState(task=task, observation=task.prompt, label=task.label, seed=0)) is None
    for turn, answer in enumerate(answers):
        assert not results or not results[-1].terminated
        results.append(env.step(StepState(task=task, label=task.label, action_text=answer, turn=turn, finish_reason="stop")))
    env.close()
    return results


def total(results: list[StepResult]) -> float:
    return sum(result.reward for result in results)

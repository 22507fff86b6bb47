"""States that user code gets: complete, and copies of what a run goes on with."""

from __future__ import annotations

from agentrl.core.types import Sampling, Task
from agentrl.env.agent import ResetState, SamplingParams, StepState


def make_sampling_params(sampling: Sampling) -> SamplingParams:
    """The copy of the sampling settings that user code gets; the seed is left out, so that handing it back fixes no later turn's."""
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_tokens,
        stop=list(sampling.stop),
        stop_token_ids=list(sampling.stop_token_ids),
    )


def make_reset_state(*, task: Task, seed: int) -> ResetState:
    """The complete state that `reset` gets, in a run and in every tool; chat messages are copied.

    Args:
        task: The task, with the prompt as the environment is to see it.
        seed: Seed for the environment.
    """
    prompt = task.prompt if isinstance(task.prompt, str) else [dict(message) for message in task.prompt]
    return ResetState(observation=prompt, label=task.label, task=task, seed=seed)


def make_step_state(
    *,
    task: Task,
    agent: str,
    turn: int,
    turns_left: int,
    observation_text: str,
    action_text: str,
    finish_reason: str,
    sampling_params: SamplingParams,
) -> StepState:
    """The complete state that `step` gets, in a run and in every tool; `StepState` describes the entries."""
    return StepState(
        observation_text=observation_text,
        action_text=action_text,
        label=task.label,
        sampling_params=sampling_params,
        task=task,
        agent=agent,
        turn=turn,
        turns_left=turns_left,
        finish_reason=finish_reason,
    )

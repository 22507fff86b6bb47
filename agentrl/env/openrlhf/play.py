"""The `execute` of OpenRLHF's own executors, for overrides that call ``super().execute(...)``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from agentrl.core.protocols import GenerationRequest
from agentrl.core.types import FinishReason, Generation, Task, Trajectory, floats, ints
from agentrl.env.agent import AgentClass, AgentInstance, SamplingParams, StepResult, StepState
from agentrl.env.executor import Sampler
from agentrl.env.results import SAMPLING_KEYS, RawText


class StepPlayer(Protocol):
    """A policy that also plays step environments; the runtime's does."""

    async def play(
        self, cls: AgentClass, task: Task, *, sampling: Mapping[str, Any], max_length: int, sampler: Sampler
    ) -> tuple[Trajectory, list[StepResult]]:
        """Play one episode of an environment with the loop of a run.

        Args:
            cls: The environment.
            task: The task, with its prompt as the model is to read it.
            sampling: Sampling settings to change for the first turn and those after it.
            max_length: Tokens that the episode may have.
            sampler: Samples the turns.

        Returns:
            What was sampled, and what `step` returned for each turn.

        Raises:
            EnvError: If the environment failed.
        """
        ...

    def encode(self, text: str) -> list[int]:
        """As `agentrl.env.executor.Policy.encode`."""
        ...


class Unjudged(AgentInstance):
    """An environment of one turn that earns nothing: the override of `execute` says what it is worth."""

    def step(self, state: StepState, /) -> StepResult:
        """End the episode."""
        return StepResult(terminated=True)


def chosen_sampling(params: Any) -> dict[str, Any]:
    """The settings that are set in vLLM's `SamplingParams`, or in an object with the same names."""
    settings = {key: getattr(params, key, None) for key in SAMPLING_KEYS}
    return {key: value for key, value in settings.items() if value is not None}


async def play(player: StepPlayer, cls: AgentClass | None, task: Task, params: Any, max_length: int, llm_engine: Any) -> dict[str, Any]:
    """Play one episode, sampling with the engine that the executor was given.

    Args:
        player: Runs the loop.
        cls: The environment; `None` if nothing judges the only turn.
        task: The task; its prompt is the rendered text.
        params: Settings of the first turn, as vLLM's `SamplingParams`; `step` may change those of the next ones.
        max_length: Tokens that the episode may have.
        llm_engine: Samples, as vLLM does.

    Returns:
        The dictionary that an executor's `execute` returns. Its reward is `None` if there is no environment.

    Raises:
        EnvError: If the environment failed.
    """

    async def sample(request: GenerationRequest) -> Generation:
        asked = request.sampling
        settings = SamplingParams({key: getattr(asked, key) for key in SAMPLING_KEYS if getattr(asked, key) is not None}, n=1)
        output = (await llm_engine.generate(request.prompt_ids.tolist(), settings)).outputs[0]
        return Generation(
            token_ids=ints(output.token_ids),
            logprobs=floats([entry[token].logprob for token, entry in zip(output.token_ids, output.logprobs, strict=True)]),
            versions=ints([0] * len(output.token_ids)),  # those that are trained on are recorded where llm_engine samples
            finish_reason=FinishReason(output.finish_reason),
        )

    trajectory, results = await player.play(cls or Unjudged, task, sampling=chosen_sampling(params), max_length=max_length, sampler=sample)
    last = results[-1].observation if results and (results[-1].terminated or results[-1].truncated) else None
    return {
        "prompt": task.prompt,
        "label": task.label,
        **_tokens(trajectory, player.encode(last) if isinstance(last, RawText) else []),
        **_earned(trajectory, results if cls is not None else []),
    }


def _tokens(trajectory: Trajectory, feedback: Sequence[int]) -> dict[str, Any]:
    """Every token of the episode, the ranges of the sampled ones, and their log-probabilities."""
    tokens: list[int] = []
    logprobs: list[float] = []
    ranges: list[tuple[int, int]] = []
    for turn in trajectory.turns:
        tokens += turn.prompt_ids.tolist()
        ranges.append((len(tokens), len(tokens) + len(turn.token_ids)))
        tokens += turn.token_ids.tolist()
        logprobs += [*[0.0] * len(turn.prompt_ids), *turn.logprobs.tolist()]
    return {
        "observation_tokens": [*tokens, *feedback],
        "action_ranges": ranges,
        "rollout_log_probs": [*logprobs, *[0.0] * len(feedback)],
    }


def _earned(trajectory: Trajectory, results: Sequence[StepResult]) -> dict[str, Any]:
    reward = sum(result.reward for result in results) if results else None
    score = results[-1].score if results else None
    return {
        "reward": reward,
        "scores": reward if score is None else score,
        "truncated": trajectory.truncated_by_length or trajectory.status == "truncated",
        "extra_logs": dict(trajectory.metrics),
    }

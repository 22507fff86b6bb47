"""What OpenRLHF's own executors do in `execute`, for those that call it from an override with ``super().execute(...)``."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from agentrl.core.metrics import average
from agentrl.core.types import Task
from agentrl.env.agent import AgentClass, SamplingParams, StepResult, StepState
from agentrl.env.boundary import EnvLimits, EnvSession, Threads
from agentrl.env.results import SAMPLING_KEYS, bad_result

EPISODE_S = 86_400.0
"""The environment has no deadlines of its own here: that of the episode ends everything."""


def chosen_sampling(params: Any) -> dict[str, Any]:
    """The settings that are set in vLLM's `SamplingParams`, or in what has the same names."""
    settings = {key: getattr(params, key, None) for key in SAMPLING_KEYS}
    return {key: value for key, value in settings.items() if value is not None}


class Play:
    """One episode of an executor: the environment is asked after every turn, until it is over or the context is full.

    Args:
        cls: The environment, `None` if nothing judges the only turn.
        tokenizer: The model's Hugging Face tokenizer.
        engine: Samples, as vLLM does.
        max_length: Tokens that the episode may have.
    """

    def __init__(self, cls: AgentClass | None, tokenizer: Any, engine: Any, max_length: int) -> None:
        self._class, self._tokenizer, self._engine, self._max_length = cls, tokenizer, engine, max_length
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._ranges: list[tuple[int, int]] = []
        self._results: list[StepResult] = []
        self._is_cut = False

    async def run(self, prompt: str, label: Any, sampling: Any) -> dict[str, Any]:
        """Play it.

        Args:
            prompt: The rendered prompt.
            label: The task's label.
            sampling: Settings of the first turn; `step` may change those of the next ones.

        Returns:
            What an executor's `execute` returns. The reward is `None` if nothing judges it.

        Raises:
            EnvError: If the environment failed.
        """
        settings = SamplingParams(chosen_sampling(sampling))
        if self._class is None:
            self._read(prompt)
            await self._sample(settings)
        else:
            await self._play(self._class, Task(prompt, label), settings)
        return self._outcome(prompt, label)

    async def _play(self, cls: AgentClass, task: Task, settings: SamplingParams) -> None:
        threads = Threads(1)
        limits = EnvLimits(reset_timeout_s=EPISODE_S, step_timeout_s=EPISODE_S)
        session = EnvSession(cls, inspect.getsourcefile(cls) or cls.__module__, threads, limits)
        try:
            start = await session.reset(task, 0)
            settings.update(start.sampling or {})
            text = self._read(task.prompt if start.observation is None else start.observation)
            while not self._ranges or len(self._tokens) < self._max_length:
                action = await self._sample(settings)
                result = await session.step(self._state(task, text, action, settings))
                self._results.append(result)
                text += action + self._read(result.observation or "")
                settings.update(result.sampling or {})
                if result.terminated or result.truncated:
                    return
            self._is_cut = True
        finally:
            await session.close()
            threads.close()

    def _state(self, task: Task, text: str, action: str, settings: Mapping[str, Any]) -> StepState:
        return StepState(
            observation_text=text,
            action_text=action,
            label=task.label,
            sampling_params=SamplingParams(settings),
            task=task,
            agent="",
            turn=len(self._results),
            turns_left=max(self._max_length - len(self._tokens), 0),  # at least a token each
            finish_reason="length" if self._is_cut else "stop",
        )

    def _read(self, observation: Any) -> str:
        """Append what the model reads."""
        if not isinstance(observation, str):
            where = "openrlhf.utils.agent: execute"
            raise bad_result(where, "observation", observation, "must be text here; chat messages need an agent without super().execute")
        ids = self._tokenizer(str(observation), add_special_tokens=False)["input_ids"]
        self._tokens += ids
        self._logprobs += [0.0] * len(ids)
        return str(observation)

    async def _sample(self, settings: Mapping[str, Any]) -> str:
        room = self._max_length - len(self._tokens)
        params = SamplingParams(settings, max_tokens=max(min(settings.get("max_tokens", room), room), 1), n=1)
        output = (await self._engine.generate(list(self._tokens), params)).outputs[0]
        self._ranges.append((len(self._tokens), len(self._tokens) + len(output.token_ids)))
        self._tokens += output.token_ids
        self._logprobs += [entry[token].logprob for token, entry in zip(output.token_ids, output.logprobs, strict=True)]
        self._is_cut = output.finish_reason == "length"
        return str(output.text)

    def _outcome(self, prompt: str, label: Any) -> dict[str, Any]:
        reward = sum(result.reward for result in self._results) if self._results else None
        score = self._results[-1].score if self._results else None
        return {
            "prompt": prompt,
            "label": label,
            "observation_tokens": self._tokens,
            "action_ranges": self._ranges,
            "rollout_log_probs": self._logprobs,
            "reward": reward,
            "scores": reward if score is None else score,
            "truncated": self._is_cut,
            "extra_logs": average(result.info for result in self._results),
        }

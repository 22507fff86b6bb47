"""One episode: the model and the environment take turns until it ends, a budget runs out, or something fails."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from agentrl.core.errors import EngineError, EnvError, EnvTimeoutError
from agentrl.core.metrics import average
from agentrl.core.protocols import Engine, GenerationRequest
from agentrl.core.seeding import derive_seed
from agentrl.core.types import Generation, Sampling, Status, Ticket, Trajectory, Turn, ints
from agentrl.env.agent import SamplingParams, StepResult, StepState
from agentrl.env.boundary import EnvSession
from agentrl.env.results import RawText
from agentrl.rollout.chat import ChatCodec
from agentrl.rollout.penalties import penalize
from agentrl.rollout.prompt import encode_prompt
from agentrl.rollout.settings import EpisodeSettings


class Episode:
    """Plays member number `index` of a ticket's group, once.

    Tokens only ever grow: a turn's context is every token so far followed by the tokens of the environment's answer.

    The reward is the sum of the turns' rewards, less the penalties for length. The score is the last turn's; if the
    environment gave none there, it is the reward so far, before penalties, clipped to 0..1. A metric is the mean over the
    calls of `reset` and `step` that logged it.

    Args:
        ticket: The group.
        index: Number of the member, from 0.
        engine: Samples the turns.
        codec: Of the model's tokenizer.
        env: The member's own environment; closed at the end, whatever happens.
        settings: Budgets, deadlines and sampling.
    """

    def __init__(self, ticket: Ticket, index: int, *, engine: Engine, codec: ChatCodec, env: EnvSession, settings: EpisodeSettings) -> None:
        self._task, self._ticket, self._index = ticket.task, ticket, index
        self._engine, self._codec, self._env, self._settings = engine, codec, env, settings
        self._sampling = settings.sampling
        self._images: list[Any] = list(ticket.task.images)
        self._context: list[int] = []  # every token up to the end of the last sampled turn
        self._prompt: list[int] = []  # what comes before the next sampled turn
        self._text = ""
        self._turns: list[Turn] = []
        self._unanswered: Turn | None = None
        self._budgets: list[int] = []  # tokens that each turn was allowed
        self._logs: list[Mapping[str, float]] = []
        self._parts: dict[str, float] = {}
        self._score: float | None = None
        self._seconds = {"generate_s": 0.0, "env_s": 0.0}

    async def run(self) -> Trajectory:
        """Play to the end.

        Consumes nothing, produces the trajectory, waits for engine and environment; the environment's own deadlines and
        the episode's unblock it. Failures of user code and engine become a status; cancellation passes through.
        """
        start = time.perf_counter()
        error: str | None = None
        limit = asyncio.timeout(self._settings.episode_timeout_s)
        try:
            async with limit:
                status = await self._play()
        except EnvTimeoutError as raised:
            status, error = Status.TIMEOUT, str(raised)
        except EnvError as raised:
            status, error = Status.ENV_ERROR, str(raised)
        except EngineError as raised:
            status, error = Status.ENGINE_ERROR, f"{type(raised).__name__}: {raised}"
        except TimeoutError:
            if not limit.expired():
                raise
            status, error = Status.TIMEOUT, f"the episode was not over after {self._settings.episode_timeout_s:g} s (--episode-timeout-s)"
        finally:
            await self._env.close()
        return self._trajectory(status, error, time.perf_counter() - start)

    async def _play(self) -> Status:
        await self._reset()
        for number in range(self._settings.max_turns):
            generation = await self._generate(number)
            result = await self._step(number, generation)
            if result.terminated:
                return Status.FINISHED
            if result.truncated or result.observation is None or number + 1 == self._settings.max_turns:
                break
            messages = result.observation
            if isinstance(messages, RawText):
                self._prompt = self._codec.encode_text(messages)
            elif not isinstance(messages, str):
                self._prompt = self._codec.encode_next(messages, self._context[-1])
            if self._room() < 1:
                break
        return Status.TRUNCATED

    async def _reset(self) -> None:
        task = self._task
        seed = task.seed if task.seed is not None else derive_seed(self._settings.seed, task.id, task.epoch)
        with self._timed("env_s"):
            result = await self._env.reset(task, seed)
        prompt = task.prompt if result.observation is None else result.observation
        self._prompt = encode_prompt(self._codec, prompt, apply_chat_template=self._settings.apply_chat_template)
        self._logs.append(result.info)
        self._images += result.images
        self._sampling = replace(self._sampling, **(result.sampling or {}))
        if self._room() < 1 or not self._prompt:
            flag = "--max-episode-tokens" if self._limit() == self._settings.max_episode_tokens else "--max-model-len"
            size = len(self._prompt)
            raise EnvError(f"the first prompt of task {task.id!r} has {size} tokens; it needs 1 to {self._limit() - 1} ({flag})")

    async def _generate(self, number: int) -> Generation:
        name = trajectory_id(self._ticket, self._index)
        request = GenerationRequest(
            request_id=f"{name}-{number}",
            prompt_ids=ints(self._context + self._prompt),
            sampling=self._turn_sampling(number),
            session=name,
            images=tuple(self._images),
        )
        with self._timed("generate_s"):
            generation = await self._engine.generate(request)
        if not len(generation.token_ids) or not np.isfinite(generation.logprobs).all():
            raise EngineError(f"request {request.request_id}: the engine gave no token, or a log-probability that is not finite")
        return generation

    def _turn_sampling(self, number: int) -> Sampling:
        sampling = self._sampling
        task, retry = self._task, (self._ticket.attempt,) if self._ticket.attempt else ()
        seed = (
            derive_seed(self._settings.seed, task.id, task.epoch, self._index, number, *retry) if sampling.seed is None else sampling.seed
        )
        ends = tuple(dict.fromkeys((*sampling.stop_token_ids, *self._codec.end_token_ids)))
        return replace(sampling, seed=seed, max_tokens=min(sampling.max_tokens, self._room()), stop_token_ids=ends)

    async def _step(self, number: int, generation: Generation) -> StepResult:
        """Let the environment judge a turn, and record it."""
        sampled = generation.token_ids.tolist()
        prompt_text = self._codec.decode(self._prompt)
        state = StepState(
            observation_text=self._text + prompt_text,
            action_text=self._codec.decode_action(sampled),
            label=self._task.label,
            sampling_params=_given(self._sampling),
            task=self._task,
            turn=number,
            finish_reason=str(generation.finish_reason),
        )
        self._unanswered = turn = Turn(
            prompt_ids=ints(self._prompt),
            token_ids=generation.token_ids,
            logprobs=generation.logprobs,
            versions=generation.versions,
            finish_reason=generation.finish_reason,
            temperature=self._sampling.temperature,
            prompt_text=prompt_text,
            text=self._codec.decode(sampled),
        )
        with self._timed("env_s"):
            result = await self._env.step(state)
        self._unanswered = None
        self._record(replace(turn, reward=result.reward, info=result.info), result)
        return result

    def _record(self, turn: Turn, result: StepResult) -> None:
        self._turns.append(turn)
        self._budgets.append(self._sampling.max_tokens)
        self._context += [*self._prompt, *turn.token_ids.tolist()]
        self._text += turn.prompt_text + turn.text
        self._logs.append(result.info)
        self._images += result.images
        for name, value in result.reward_parts.items():
            self._parts[name] = self._parts.get(name, 0.0) + value
        so_far = sum(done.reward for done in self._turns)
        self._score = min(max(so_far, 0.0), 1.0) if result.score is None else result.score
        self._sampling = replace(self._sampling, **(result.sampling or {}))

    def _limit(self) -> int:
        return min(self._engine.max_model_len, self._settings.max_episode_tokens or self._engine.max_model_len)

    def _room(self) -> int:
        return self._limit() - len(self._context) - len(self._prompt)

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[phase] += time.perf_counter() - start

    def _trajectory(self, status: Status, error: str | None, seconds: float) -> Trajectory:
        name = trajectory_id(self._ticket, self._index)
        turns = penalize(self._turns, self._budgets, self._settings.penalties) if status.trainable else tuple(self._turns)
        return Trajectory(
            trajectory_id=name,
            episode_id=name,
            group_id=self._ticket.group_id,
            turns=turns,
            status=status,
            reward=math.fsum(turn.reward for turn in turns) if status.trainable else None,
            score=self._score if status.trainable else None,
            reward_parts=self._parts,
            metrics=average(self._logs),
            error=error,
            timings={**self._seconds, "total_s": seconds},
            unanswered=self._unanswered,
        )


def trajectory_id(ticket: Ticket, index: int) -> str:
    """Name of one member of a group: group, attempt and place in the group."""
    return f"{ticket.group_id}-{ticket.attempt}-{index}"


def _given(sampling: Sampling) -> SamplingParams:
    """What the user sees; the seed is left out, so that handing the settings back does not fix it for all later turns."""
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_tokens,
        stop=list(sampling.stop),
        stop_token_ids=list(sampling.stop_token_ids),
    )

"""One episode of an executor: user code calls the model, and what it sampled becomes a trajectory."""

from __future__ import annotations

import math
import time
from dataclasses import replace

from agentrl.core.errors import EngineError
from agentrl.core.protocols import Engine
from agentrl.core.seeding import derive_seed
from agentrl.core.types import Status, Ticket, Trajectory
from agentrl.env.agent import StepResult
from agentrl.env.executor import ExecutorSession
from agentrl.rollout.chat import ChatCodec
from agentrl.rollout.episode import episode_id, guarded
from agentrl.rollout.penalties import penalize
from agentrl.rollout.recording import RecordingPolicy, turns_of
from agentrl.rollout.settings import EpisodeSettings


class Execution:
    """Plays member number `index` of a ticket's group, once; the counterpart of `Episode` for an `Executor`.

    The reward is earned at the end, less the penalties for length. The number of calls is not limited, their time is.

    Args:
        ticket: The group.
        index: Number of the member, from 0.
        engine: Samples.
        codec: Of the model's tokenizer.
        env: The member's own executor; closed at the end, whatever happens.
        settings: Budgets, deadlines and sampling.
    """

    def __init__(
        self, ticket: Ticket, index: int, *, engine: Engine, codec: ChatCodec, env: ExecutorSession, settings: EpisodeSettings
    ) -> None:
        self._ticket, self._index, self._codec, self._env, self._settings = ticket, index, codec, env, settings
        self._id = episode_id(ticket, index)
        images = ticket.task.images
        self._llm = RecordingPolicy(self._id, engine=engine, codec=codec, settings=settings, seed_of=self._seed, images=images)
        self._result = StepResult()

    async def run(self) -> tuple[Trajectory]:
        """Play to the end.

        Consumes nothing, produces the trajectory, waits for user code; the episode's deadline unblocks it. Failures of user
        code and engine become a status; cancellation passes through.
        """
        start = time.perf_counter()
        status, error = await guarded(self._play, self._close, self._settings.episode_timeout_s)
        total_s = time.perf_counter() - start
        timings = {"generate_s": self._llm.generate_s, "env_s": max(0.0, total_s - self._llm.generate_s), "total_s": total_s}
        return (self._trajectory(status, error, timings),)

    async def _play(self) -> Status:
        try:
            self._result = await self._env.execute(self._ticket.task, self._llm, self._settings.episode_timeout_s)
        except Exception as error:
            if self._llm.failure is not None and _caused(error, self._llm.failure):
                raise self._llm.failure from error
            raise
        return Status.TRUNCATED if self._result.truncated else Status.FINISHED

    async def _close(self) -> None:
        self._llm.end()
        await self._env.close()

    def _seed(self, number: int) -> int:
        task, attempt = self._ticket.task, self._ticket.attempt
        return derive_seed(self._settings.seed, task.id, task.epoch, self._index, number, *((attempt,) if attempt else ()))

    def _trajectory(self, status: Status, error: str | None, timings: dict[str, float]) -> Trajectory:
        result, ended = self._result, status.trainable
        turns, budgets = turns_of(self._llm.calls, self._codec.decode)
        if ended and turns:
            turns = penalize((*turns[:-1], replace(turns[-1], reward=result.reward)), budgets, self._settings.penalties)
        reward = math.fsum(turn.reward for turn in turns) if turns else result.reward
        score = min(max(result.reward, 0.0), 1.0) if result.score is None else result.score
        return Trajectory(
            trajectory_id=self._id,
            episode_id=self._id,
            group_id=self._ticket.group_id,
            turns=turns,
            status=status,
            reward=reward if ended else None,
            score=score if ended else None,
            reward_parts=dict(result.reward_parts),
            metrics=dict(result.info),
            error=error,
            timings=timings,
        )


def _caused(error: BaseException, failure: EngineError) -> bool:
    """Whether `failure` is what user code ended with."""
    seen: BaseException | None = error
    while seen is not None:
        if seen is failure:
            return True
        seen = seen.__cause__ or seen.__context__
    return False

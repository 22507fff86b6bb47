"""One episode of a program that calls the model itself."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from agentrl.core.protocols import Engine
from agentrl.core.types import GroupRequest, Span, Status, Trajectory, Turn
from agentrl.env.agent import StepResult
from agentrl.rollout.chat import ChatCodec
from agentrl.rollout.episode import episode_id, guarded, turn_seed
from agentrl.rollout.episode_plan import EpisodePlan
from agentrl.rollout.penalties import penalize
from agentrl.rollout.recorder import Context, Recorder


class ProgramEpisode(ABC):
    """Runs member number `index` of a requested group, once; the counterpart of `Episode` for user code that calls the model itself."""

    def __init__(
        self,
        group_request: GroupRequest,
        index: int,
        *,
        engine: Engine,
        codec: ChatCodec,
        settings: EpisodePlan,
        tools: Callable[[], tuple[Span, ...]],
    ) -> None:
        self._group_request, self._settings, self._take_tools = group_request, settings, tools
        self._id = episode_id(group_request, index)
        self._recorder = Recorder(
            self._id, engine=engine, codec=codec, settings=settings, seed_of=turn_seed(group_request, index, settings.seed)
        )
        self._result = StepResult()  # what user code returned
        self._start_s = self._called_s = time.perf_counter()
        self._spans: tuple[Span, ...] = ()

    async def run(self) -> tuple[Trajectory, ...]:
        """Run to the end.

        Consumes nothing, produces a trajectory, or one per branch with a reward of its own; waits for user code, which waits for the
        engine; the episode's deadline unblocks it. Failures of user code and engine become a status; cancellation passes through.
        """
        self._start_s = time.perf_counter()
        status, error = await guarded(self._play, self._close, self._settings.rollout.episode_timeout_s)
        total_s, generate_s = time.perf_counter() - self._start_s, self._recorder.generate_s
        # Requests may overlap, and the sum of their times may be longer than the episode.
        timings = {"generate_s": generate_s, "env_s": max(0.0, total_s - generate_s), "total_s": total_s}
        self._spans = self._ordered_spans()
        return self._trajectories(status, error, timings)

    def _ordered_spans(self) -> tuple[Span, ...]:
        """Requests to the engine and tools of the agent by their end; a tool belongs to the last request answered before it."""
        waits, offset = self._recorder.waits, self._called_s - self._start_s
        spans = [Span("generate", number, start - self._start_s, end - start) for number, start, end in waits]
        for tool in self._take_tools():
            begin_s = offset + tool.start_s
            answered = [span for span in spans[: len(waits)] if span.start_s + span.seconds <= begin_s]
            turn = max(answered, key=lambda span: span.start_s + span.seconds).turn if answered else None
            spans.append(replace(tool, start_s=begin_s, turn=turn))
        return tuple(sorted(spans, key=lambda span: span.start_s + span.seconds))

    @abstractmethod
    async def _play(self) -> Status:
        """Run user code."""

    @abstractmethod
    async def _close(self) -> None:
        """Release what the episode holds."""

    @abstractmethod
    def _trajectories(self, status: Status, error: str | None, timings: Mapping[str, float]) -> tuple[Trajectory, ...]:
        """Trajectories of what was recorded."""

    def _trajectory(
        self, status: Status, error: str | None, timings: Mapping[str, float], contexts: Sequence[Context], earned: float, name: str = ""
    ) -> Trajectory:
        """The trajectory of the turns of some contexts, whose rewards are added to what was `earned`; `name` is that of a branch."""
        result, ended = self._result, status.trainable
        turns = [turn for context in contexts for turn in context.turns]
        # Before the penalties for length, which leave the score as it is.
        total = math.fsum(turn.reward for turn in turns) + earned
        if ended and turns:
            turns = self._paid(turns, [budget for context in contexts for budget in context.budgets], earned)
        reward = math.fsum(turn.reward for turn in turns) if turns else earned
        score = min(max(total, 0.0), 1.0) if result.score is None else result.score
        return Trajectory(
            trajectory_id=f"{self._id}-{name}" if name else self._id,
            episode_id=self._id,
            group_id=self._group_request.group_id,
            turns=tuple(turns),
            status=status,
            reward=reward if ended else None,
            score=score if ended else None,
            agent=name,
            reward_parts=dict(result.reward_parts),
            metrics={**result.info, **self._metrics()},
            error=error,
            timings=timings,
            spans=self._spans,
        )

    def _paid(self, turns: list[Turn], budgets: Sequence[int], earned: float) -> list[Turn]:
        """The turns with what was earned on the last that is trained, less the penalties for length of all that are."""
        trained = [index for index, turn in enumerate(turns) if not turn.masked] or [len(turns) - 1]
        turns[trained[-1]] = replace(turns[trained[-1]], reward=turns[trained[-1]].reward + earned)
        paid = penalize([turns[index] for index in trained], [budgets[index] for index in trained], self._settings.penalty)
        for index, turn in zip(trained, paid, strict=True):
            turns[index] = turn
        return turns

    def _metrics(self) -> Mapping[str, float]:
        """Figures for logs beside those that user code returned."""
        return {}

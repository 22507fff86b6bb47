"""Seams of the episode loop: a watcher of what engine and environment answer, and an engine that is a plain function.

The episode itself runs as always.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from agentrl.core.errors import StructureError
from agentrl.core.protocols import Engine, EngineStats, GenerationRequest, WeightUpdate
from agentrl.core.types import FinishReason, Generation, Span, Task, floats, ints
from agentrl.env.agent import ResetResult, StepResult, StepState
from agentrl.env.session import Session, Snapshot


@dataclass(frozen=True, slots=True)
class ResetEvent:
    """The environment was reset with this task and seed."""

    task: Task
    seed: int
    result: ResetResult


@dataclass(frozen=True, slots=True)
class SampleEvent:
    """The engine answered a request."""

    request: GenerationRequest
    generation: Generation


@dataclass(frozen=True, slots=True)
class StepEvent:
    """The environment answered a turn."""

    state: StepState
    result: StepResult


Watcher: TypeAlias = Callable[[ResetEvent | SampleEvent | StepEvent], None]


class WatchedSession:
    """An environment whose results are told to a watcher, once they were checked; see `agentrl.env.boundary.Session`."""

    def __init__(self, session: Session, watcher: Watcher) -> None:
        self._session, self._watcher = session, watcher

    async def reset(self, task: Task, seed: int) -> ResetResult:
        """As `Session.reset`."""
        result = await self._session.reset(task, seed)
        self._watcher(ResetEvent(task, seed, result))
        return result

    async def step(self, state: StepState) -> StepResult:
        """As `Session.step`."""
        result = await self._session.step(state)
        self._watcher(StepEvent(state, result))
        return result

    async def snapshot(self, count: int) -> list[Snapshot]:
        """As `Session.snapshot`."""
        return await self._session.snapshot(count)

    async def restore(self, snapshot: Snapshot, task: Task) -> None:
        """As `Session.restore`."""
        await self._session.restore(snapshot, task)

    def take_spans(self) -> tuple[Span, ...]:
        """As `Session.take_spans`."""
        return self._session.take_spans()

    async def close(self) -> None:
        """As `Session.close`."""
        await self._session.close()


def written_turn(ids: Sequence[int], budget: int) -> Generation:
    """Return the turn of a text that no model sampled, cut to `budget` tokens; log-probabilities and versions are 0."""
    kept = ids[:budget]
    zeros = [0] * len(kept)
    reason = FinishReason.LENGTH if len(kept) < len(ids) else FinishReason.STOP
    return Generation(token_ids=ints(kept), logprobs=floats(zeros), versions=ints(zeros), finish_reason=reason)


class SamplerEngine:
    """An engine made of a function, for tools and for loops within an episode; see `agentrl.core.protocols.Engine`."""

    def __init__(
        self,
        sampler: Callable[[GenerationRequest], Awaitable[Generation]],
        *,
        max_model_len: int,
        end_token_ids: tuple[int, ...] = (),
        keeps_structure: bool = False,
    ) -> None:
        self.max_model_len, self.end_token_ids, self._sampler = max_model_len, end_token_ids, sampler
        self._keeps_structure = keeps_structure

    async def start(self) -> None:
        """Do nothing."""

    async def generate(self, request: GenerationRequest) -> Generation:
        """Call the function; `StructureError` for a structure, unless the function keeps to structures."""
        if request.structure is not None and not self._keeps_structure:
            raise StructureError(f"request {request.request_id}: this engine cannot constrain what it writes; leave the text free")
        return await self._sampler(request)

    async def abort(self, request_id: str) -> None:
        """The function goes on."""

    async def load_weights(self, update: WeightUpdate) -> int:
        """Return the version as it is; there are no weights."""
        return update.version

    def stats(self) -> EngineStats:
        """Return empty statistics."""
        return EngineStats()

    async def close(self) -> None:
        """Do nothing."""


class WatchedEngine:
    """An engine whose requests first wait for `leave` and whose answers are told to a watcher; see `agentrl.core.protocols.Engine`."""

    def __init__(self, engine: Engine, watcher: Watcher, leave: Callable[[GenerationRequest], Awaitable[object]]) -> None:
        self._engine, self._watcher, self._leave = engine, watcher, leave

    @property
    def max_model_len(self) -> int:
        """Context length in tokens; known once started."""
        return self._engine.max_model_len

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a turn; known once started."""
        return self._engine.end_token_ids

    async def start(self) -> None:
        """As `Engine.start`."""
        await self._engine.start()

    async def generate(self, request: GenerationRequest) -> Generation:
        """As `Engine.generate`."""
        await self._leave(request)
        generation = await self._engine.generate(request)
        self._watcher(SampleEvent(request, generation))
        return generation

    async def abort(self, request_id: str) -> None:
        """As `Engine.abort`."""
        await self._engine.abort(request_id)

    async def load_weights(self, update: WeightUpdate) -> int:
        """As `Engine.load_weights`."""
        return await self._engine.load_weights(update)

    def stats(self) -> EngineStats:
        """As `Engine.stats`."""
        return self._engine.stats()

    async def close(self) -> None:
        """As `Engine.close`."""
        await self._engine.close()

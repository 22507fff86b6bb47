"""A reward model behind a queue: texts that arrive while it computes make its next batch."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from agentrl.core.errors import AgentRLError, RewardError
from agentrl.core.scoring import ScoreAnswer, ScoreRequest, ScorerFacts

Waiting = tuple[ScoreRequest, asyncio.Future[ScoreAnswer]]


class Scores(Protocol):
    """A model as `BatchedScorer` needs it; its methods are called on one thread."""

    @property
    def facts(self) -> ScorerFacts:
        """Facts about the model; known once loaded."""
        ...

    def load(self) -> None:
        """Load everything."""

    def check_texts(self, *, as_messages: bool) -> None:
        """Make sure that texts, which come as chat messages or not, can be scored; else `ConfigError`."""

    def score(self, requests: Sequence[ScoreRequest]) -> list[ScoreAnswer]:
        """Score texts."""
        ...


class BatchedScorer:
    """A `Scorer` in this process, with the model on a thread of its own.

    Its loop consumes waiting requests, at most `batch_size` at a time, and produces their answers; it waits for the model, and is
    unblocked by it or by `close`. A request that nobody waits for any more is left out. A batch that fails is scored one by one, so
    that one bad text does not spoil the others.
    """

    def __init__(self, model: Scores, *, batch_size: int, name: str, as_messages: bool = False) -> None:
        self._model, self._batch_size, self._name, self._as_messages = model, batch_size, name, as_messages
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reward-model")
        self._waiting: list[Waiting] = []
        self._loop: asyncio.Task[None] | None = None
        self._closed = False
        self.num_scored = 0

    @property
    def pending(self) -> int:
        """Requests that wait for a batch."""
        return len(self._waiting)

    async def start(self) -> None:
        """As `Scorer.start`."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._model.load)
        self._model.check_texts(as_messages=self._as_messages)

    async def facts(self) -> ScorerFacts:
        """As `Scorer.facts`."""
        return self._model.facts

    async def score(self, request: ScoreRequest) -> ScoreAnswer:
        """As `Scorer.score`."""
        if self._closed:
            raise RewardError(f"{self._name}: the reward model was closed")
        future: asyncio.Future[ScoreAnswer] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, future))
        if self._loop is None:
            self._loop = asyncio.create_task(self._run(), name=f"reward model {self._name}")
        return await future

    async def close(self) -> None:
        """As `Scorer.close`; those who wait get an error."""
        self._closed = True
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.cancel()
            await asyncio.gather(loop, return_exceptions=True)
        self._fail(RewardError(f"{self._name}: the reward model was closed"))
        self._thread.shutdown(wait=False)

    async def _run(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting[: self._batch_size], self._waiting[self._batch_size :]
            wanted = [(request, future) for request, future in batch if not future.done()]
            try:
                await self._answer(wanted)
            except asyncio.CancelledError:
                # `close` cancels this loop and fails those who wait, among whom the present batch has to be.
                self._waiting = wanted + self._waiting
                raise
        self._loop = None

    async def _answer(self, wanted: Sequence[Waiting]) -> None:
        if not wanted:
            return
        loop = asyncio.get_running_loop()
        try:
            answers = await loop.run_in_executor(self._thread, self._model.score, [request for request, _ in wanted])
            self._check(answers)
        except Exception as error:  # of torch, of many types
            if len(wanted) > 1:
                for item in wanted:
                    await self._answer([item])
                return
            problem = error if isinstance(error, AgentRLError) else RewardError(f"{self._name}: {type(error).__name__}: {error}")
            if not wanted[0][1].done():
                wanted[0][1].set_exception(problem)
            return
        self.num_scored += len(wanted)
        for (_, future), answer in zip(wanted, answers, strict=True):
            if not future.done():
                future.set_result(answer)

    def _check(self, answers: Sequence[ScoreAnswer]) -> None:
        for answer in answers:
            if not all(map(math.isfinite, answer.values)):
                raise RewardError(f"{self._name}: the model gave a score that is not finite: {answer.values}")

    def _fail(self, error: Exception) -> None:
        waiting, self._waiting = self._waiting, []
        for _, future in waiting:
            if not future.done():
                future.set_exception(error)

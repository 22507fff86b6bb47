"""An engine without a model, for tests and simulations: tokens, delays and failures come from a script."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from agentrl.core.errors import ContextLengthError, EngineDeadError, WeightSyncError
from agentrl.core.protocols import EngineStats, GenerationRequest, WeightUpdate
from agentrl.core.types import FinishReason, Generation, floats, ints

Answer = Callable[[GenerationRequest], Sequence[int] | BaseException]
Delay = Callable[[GenerationRequest], float]


def endless(request: GenerationRequest) -> Sequence[int]:
    """As many tokens as the request allows, none of them an end token."""
    return range(10, 10 + request.sampling.max_tokens)


def _part(generation: Generation, kept: int) -> Generation:
    return Generation(
        token_ids=generation.token_ids[:kept],
        logprobs=generation.logprobs[:kept],
        versions=generation.versions[:kept],
        finish_reason=FinishReason.ABORTED,
    )


@dataclass(slots=True)
class ScriptedEngine:
    """Implements `agentrl.core.protocols.Engine`."""

    answer: Answer = endless  # token ids for a request, cut to its `max_tokens`, or the error that the request ends with
    delay: Delay = lambda request: 0.0  # seconds that a request takes
    step_s: float = 0.0  # seconds of each token of a request whose tokens are told, besides its delay; 0: they are not told
    max_model_len: int = 256
    end_token_ids: tuple[int, ...] = (1,)  # tokens that end a turn
    version: int = 0  # stamped on every token; set by `load_weights`
    reported: Callable[[int], int] = lambda version: version  # the version that `load_weights` reports for an update's
    fault: str = ""  # why it can no longer be used, as in `EngineStats`
    requests: list[GenerationRequest] = field(default_factory=list)  # every request seen, in order
    updates: list[WeightUpdate] = field(default_factory=list)  # every weight update seen, in order
    _tokens: int = 0
    _busy_s: float = 0.0
    _running: int = 0
    _since: float = 0.0
    _started: float | None = None
    _aborted: dict[str, asyncio.Event] = field(default_factory=dict)

    async def start(self) -> None:
        """Become ready."""
        self._started = time.monotonic()

    async def generate(self, request: GenerationRequest) -> Generation:
        """Answer as scripted; the log-probability of a token is -(its id mod 7 + 1) / 8.

        Raises:
            ContextLengthError: If the prompt leaves no room for one token.
            EngineDeadError: If the engine was not started or was closed.
        """
        if self._started is None:
            raise EngineDeadError("the scripted engine is not running")
        self.requests.append(request)
        room = self.max_model_len - len(request.prompt_ids)
        if room < 1:
            raise ContextLengthError(f"request {request.request_id}: no room in a context of {self.max_model_len}")
        self._begin()
        aborted = self._aborted[request.request_id] = asyncio.Event()
        try:
            if delay := self.delay(request):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(delay):
                        await aborted.wait()
            else:
                await asyncio.sleep(0)
        finally:
            self._end()
            del self._aborted[request.request_id]
        answer = self.answer(request)
        if isinstance(answer, BaseException):
            raise answer
        generation = self._generation(list(answer), min(room, request.sampling.max_tokens), request)
        if aborted.is_set():
            return _part(generation, len(generation.token_ids) // 2)
        return await self._told(request, generation)

    async def abort(self, request_id: str) -> None:
        """End a request that waits; half of its answer was sampled by then."""
        if request_id in self._aborted:
            self._aborted[request_id].set()

    async def _told(self, request: GenerationRequest, generation: Generation) -> Generation:
        """Tell the tokens of a request one by one; returns those that were told when it is aborted."""
        if request.on_tokens is None or not self.step_s:
            return generation
        aborted = self._aborted[request.request_id] = asyncio.Event()
        self._begin()
        try:
            for place, token in enumerate(generation.token_ids.tolist()):
                try:
                    await asyncio.wait_for(aborted.wait(), self.step_s)
                except TimeoutError:
                    request.on_tokens([token])
                else:
                    return _part(generation, place)
        finally:
            self._end()
            del self._aborted[request.request_id]
        return generation

    async def load_weights(self, update: WeightUpdate) -> int:
        """Stamp the new version.

        Raises:
            WeightSyncError: If the script reports another version.
        """
        self.updates.append(update)
        reported = self.reported(update.version)
        if reported != update.version:
            raise WeightSyncError(f"the scripted engine reports version {reported}, not {update.version}")
        self.version = reported
        return reported

    def stats(self) -> EngineStats:
        """Counters since the start."""
        now = time.monotonic()
        busy = self._busy_s + (now - self._since if self._running else 0.0)
        prompt_tokens = sum(len(request.prompt_ids) for request in self.requests)
        clock = now - self._started if self._started is not None else 0.0
        return EngineStats(busy_s=busy, clock_s=clock, tokens=self._tokens, prompt_tokens=prompt_tokens, fault=self.fault)

    async def close(self) -> None:
        """Refuse further requests."""
        self._started = None

    def _begin(self) -> None:
        if not self._running:
            self._since = time.monotonic()
        self._running += 1

    def _end(self) -> None:
        self._running -= 1
        if not self._running:
            self._busy_s += time.monotonic() - self._since

    def _generation(self, tokens: list[int], limit: int, request: GenerationRequest) -> Generation:
        kept = tokens[:limit]
        ended = bool(kept) and kept[-1] in (*self.end_token_ids, *request.sampling.stop_token_ids)
        self._tokens += len(kept)
        return Generation(
            token_ids=ints(kept),
            logprobs=floats([-(token % 7 + 1) / 8 for token in kept]),
            versions=ints([self.version] * len(kept)),
            finish_reason=FinishReason.STOP if ended or len(kept) < limit else FinishReason.LENGTH,
        )

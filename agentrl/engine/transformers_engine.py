"""The `Engine` protocol on a model of transformers: continuous batching in one thread of this process, without vLLM."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from agentrl.core.errors import ConfigError, EngineDeadError, EngineError
from agentrl.core.protocols import EngineStats, GenerationRequest, Memory, TokenListener, WeightUpdate
from agentrl.core.types import Generation
from agentrl.engine.failures import reason_of
from agentrl.engine.fenced import FencedEngine
from agentrl.engine.settings import EngineSettings, without_gc
from agentrl.engine.usage import UsageMeter
from agentrl.weights.digests import DIGESTS


class TransformersEngine(FencedEngine):
    """Generates with a model of transformers; see `agentrl.core.protocols.Engine`.

    A thread owns the model: it computes new prompts and then decodes all sequences together. A publication comes between two steps;
    keys and values of old weights are thrown away, so the tokens of a request so far are processed again by the new weights.
    Asleep, with either level, it has its weights in CPU memory.
    """

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings)
        self._batcher: Any = None

    @property
    def max_model_len(self) -> int:
        """Context length in tokens; known once started."""
        self._check_alive()
        return int(self._batcher.context)

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a turn; known once started."""
        self._check_alive()
        ids: tuple[int, ...] = self._batcher.end_ids
        return ids

    async def start(self) -> None:
        """Load the model; returns when ready to generate with version 0.

        Raises:
            ConfigError: If the attention of the model is of a kind that this engine does not compute.
            EngineError: If transformers cannot load the model.
        """
        if self._batcher is not None:
            return
        started: Future[Any] = Future()
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._run, args=(started, loop), name="agentrl-transformers", daemon=True).start()
        try:
            self._batcher = await asyncio.wrap_future(started)
        except ConfigError:
            raise
        except Exception as error:
            raise EngineError(f"transformers did not start with model {self._settings.model.model!r}: {reason_of(error)}") from error
        self._vocabulary, self._placeholders = self._batcher.vocabulary, self._batcher.placeholders
        self._meter, self._is_started = UsageMeter(), True

    async def abort(self, request_id: str) -> None:
        """End a request now: its `generate` returns what was sampled so far, perhaps nothing. Requests that are over are passed over."""
        if self._batcher is not None and not self._dead:
            self._batcher.post(lambda: self._batcher.abort(request_id))

    def stats(self) -> EngineStats:
        """Counters since the start, and why the engine cannot be used if so."""
        if self._batcher is not None:
            self._load_now = self._batcher.load_now
        return super().stats()

    async def close(self) -> None:
        """Release thread and memory; safe to call twice."""
        batcher, self._batcher = self._batcher, None
        self._dead = self._dead or "it was closed"
        if batcher is not None:
            batcher.end(self._dead)
            await asyncio.to_thread(batcher.ended.wait, 30.0)

    async def _sample(self, request: GenerationRequest) -> Generation:
        batcher, answer = self._batcher, Future[Generation]()
        # As running it is not ended by a caller that is cancelled; the thread could not set a result any more, and would end.
        answer.set_running_or_notify_cancel()
        try:
            batcher.post(lambda: batcher.add(request, answer))
            return await asyncio.wrap_future(answer)
        except asyncio.CancelledError:
            with contextlib.suppress(EngineDeadError):
                batcher.post(lambda: batcher.abort(request.request_id))
            raise

    async def _load_weights(self, update: WeightUpdate) -> int:
        if update.transport != "shm":
            raise ValueError(f"the update comes by {update.transport!r} but the engine expects 'shm'")
        batcher, path = self._batcher, update.payload["update"]["path"]
        version = int(await asyncio.wrap_future(batcher.call(lambda: batcher.load(path, update.version))))
        if (wanted := update.payload.get(DIGESTS)) is not None:
            self._verify(update, await asyncio.wrap_future(batcher.call(lambda: batcher.digests(wanted["dtype"]))))
        return version

    async def _sleep(self, level: int) -> None:
        await asyncio.wrap_future(self._batcher.call(self._batcher.sleep))

    async def _wake(self, *parts: Memory) -> None:
        await asyncio.wrap_future(self._batcher.call(lambda: self._batcher.wake(*parts)))

    def _fault(self) -> str:
        return self._batcher.dead or "" if self._batcher is not None else ""

    def _end_requests(self, reason: str) -> None:
        if self._batcher is not None:
            self._batcher.end(reason)

    def _structure_problem(self) -> str:
        return "the engine of transformers cannot hold a text to a structure; use --engine vllm"

    def _check(self, request: GenerationRequest) -> None:
        super()._check(request)
        sampling = request.sampling
        if sampling.temperature < 0 or not 0 < sampling.top_p <= 1 or sampling.top_k < 0 or sampling.max_tokens < 1:
            raise EngineError(f"request {request.request_id}: {sampling} is out of range")

    def _run(self, started: Future[Any], loop: asyncio.AbstractEventLoop) -> None:
        """The thread: load, then serve until the end; new tokens are told on the event loop."""

        def tell(news: Sequence[tuple[TokenListener, int]]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(_tell, news)

        try:
            with without_gc():
                from agentrl.engine.batcher import Batcher
            batcher = Batcher(self._settings, tell)
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(batcher)
        batcher.serve()


def _tell(news: Sequence[tuple[TokenListener, int]]) -> None:
    for listener, token in news:
        listener((token,))

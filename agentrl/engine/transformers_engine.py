"""The `Engine` protocol on a model of transformers: continuous batching in one thread of this process, without vLLM."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from agentrl.core.errors import ContextLengthError, EngineDeadError, EngineError, StructureError, WeightSyncError
from agentrl.core.protocols import EngineLoad, EngineStats, GenerationRequest, Memory, WeightUpdate
from agentrl.core.types import Generation
from agentrl.engine.settings import CPU_CONTEXT_LIMIT, EngineSettings, without_gc
from agentrl.engine.usage import UsageMeter


class TransformersEngine:
    """Generates with a model of transformers; see `agentrl.core.protocols.Engine`.

    A thread owns the model: it computes new prompts and then decodes all sequences together. A publication comes between two steps;
    keys and values of old weights are thrown away, so the tokens of a request so far are processed again by the new weights.
    If weights fail to load, every present and later request gets `EngineDeadError`.
    """

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._meter = UsageMeter()
        self._batcher: Any = None
        self._dead: str | None = None
        self._publishing = asyncio.Lock()
        self._asleep: set[Memory] = set()

    @property
    def max_model_len(self) -> int:
        """Context length in tokens; known once started."""
        return int(self._running().context)

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a turn; known once started."""
        ids: tuple[int, ...] = self._running().end_ids
        return ids

    async def start(self) -> None:
        """Load the model; returns when ready to generate with version 0.

        Raises:
            EngineError: If transformers cannot load the model, or its attention is of a kind that this engine does not compute.
        """
        if self._batcher is not None:
            return
        started: Future[Any] = Future()
        threading.Thread(target=self._run, args=(started,), name="agentrl-transformers", daemon=True).start()
        try:
            self._batcher = await asyncio.wrap_future(started)
        except Exception as error:
            raise EngineError(f"transformers did not start with model {self._settings.model.model!r}: {_reason(error)}") from error
        self._meter = UsageMeter()

    async def generate(self, request: GenerationRequest) -> Generation:
        """Sample one continuation; cancelling the call drops the request from the engine.

        Raises:
            ContextLengthError: If the prompt leaves no room for one token.
            StructureError: If the request asks for a structure, which this engine cannot hold a text to.
            EngineDeadError: If the engine is gone or fenced.
            EngineError: If this request is malformed.
        """
        batcher = self._running()
        self._check(request)
        self._meter.begin(len(request.prompt_ids))
        answer: Future[Generation] = Future()
        answer.set_running_or_notify_cancel()
        try:
            batcher.post(lambda: batcher.add(request, answer))
            generation = await asyncio.wrap_future(answer)
        except asyncio.CancelledError:
            with contextlib.suppress(EngineDeadError):
                batcher.post(lambda: batcher.abort(request.request_id))
            raise
        finally:
            self._meter.end()
        self._meter.produced(len(generation.token_ids), generation.cached_tokens)
        return generation

    async def abort(self, request_id: str) -> None:
        """End a request now: its `generate` returns what was sampled so far, perhaps nothing. Requests that are over are passed over."""
        if self._batcher is not None and not self._dead:
            self._batcher.post(lambda: self._batcher.abort(request_id))

    async def load_weights(self, update: WeightUpdate) -> int:
        """Load between two steps, and stamp the version.

        Raises:
            EngineDeadError: If the engine was gone or fenced before.
            WeightSyncError: If loading failed; the engine is fenced.
        """
        async with self._publishing:
            batcher = self._running()
            self._meter.pause()
            try:
                if update.transport != "shm":
                    raise ValueError(f"the update comes by {update.transport!r} but the engine expects 'shm'")
                path = update.payload["update"]["path"]
                return int(await asyncio.wrap_future(batcher.call(lambda: batcher.load(path, update.version))))
            except BaseException as error:
                self._dead = self._dead or f"weights of version {update.version} did not load: {_reason(error)}"
                batcher.end(self._dead)
                if not isinstance(error, Exception):
                    raise
                raise WeightSyncError(f"engine {self._settings.index}: {self._dead}") from error
            finally:
                self._meter.resume()

    async def sleep(self, level: int) -> None:
        """As `SleepingEngine.sleep`; with either level the weights go to CPU memory.

        Raises:
            EngineDeadError: If the engine was gone before.
        """
        async with self._publishing:
            batcher = self._running()
            if not self._asleep:
                self._meter.pause()
                await asyncio.wrap_future(batcher.call(batcher.sleep))
            self._asleep = {"weights", "kv_cache"}

    async def wake(self, *parts: Memory) -> None:
        """As `SleepingEngine.wake`.

        Raises:
            EngineDeadError: If the engine was gone before, or its memory is not free.
        """
        async with self._publishing:
            batcher, slept = self._running(), bool(self._asleep)
            try:
                await asyncio.wrap_future(batcher.call(lambda: batcher.wake(*parts)))
            except RuntimeError as error:  # of CUDA
                self._dead = self._dead or f"the engine could not take back its memory: {_reason(error)}"
                batcher.end(self._dead)
                raise EngineDeadError(f"engine {self._settings.index}: {self._dead}") from error
            self._asleep -= set(parts)
            if slept and not self._asleep:
                self._meter.resume()

    def stats(self) -> EngineStats:
        """Counters since the start, and why the engine cannot be used if so."""
        load: EngineLoad = self._batcher.load_now if self._batcher is not None and self._meter.active else EngineLoad()
        stats = replace(self._meter.stats(), load=load)
        dead = self._dead or (self._batcher.dead if self._batcher is not None else None)
        return replace(stats, fault=dead) if dead else stats

    async def close(self) -> None:
        """Release thread and memory; safe to call twice."""
        batcher, self._batcher = self._batcher, None
        self._dead = self._dead or "it was closed"
        if batcher is not None:
            batcher.end(self._dead)
            await asyncio.to_thread(batcher.ended.wait, 30.0)

    def _running(self) -> Any:
        self._dead = self._dead or (self._batcher.dead if self._batcher is not None else None)
        if self._batcher is None or self._dead:
            raise EngineDeadError(f"engine {self._settings.index} cannot be used: {self._dead or 'it was not started'}")
        return self._batcher

    def _check(self, request: GenerationRequest) -> None:
        ids, sampling, name = request.prompt_ids, request.sampling, f"request {request.request_id}"
        known = self._batcher.vocabulary
        if len(ids) >= self.max_model_len:
            raise ContextLengthError(
                f"{name}: a prompt of {len(ids)} tokens leaves no room in a context of {self.max_model_len}; "
                "shorten it or raise --max-model-len"
            )
        if not len(ids) or ids.min() < 0 or ids.max() >= known:
            raise EngineError(f"{name}: the prompt must be token ids from 0 to {known - 1}, at least one; got {ids}")
        if request.images:
            raise EngineError(f"{name}: this engine takes text only, got {len(request.images)} images")
        if request.structure is not None:
            raise StructureError(f"{name}: the engine of transformers cannot hold a text to a structure; use --engine vllm")
        if sampling.temperature < 0 or not 0 < sampling.top_p <= 1 or sampling.top_k < 0 or sampling.max_tokens < 1:
            raise EngineError(f"{name}: {sampling} is out of range")
        if sampling.stop and not self._settings.stop_strings:
            raise EngineError(f"{name}: stop = {sampling.stop!r}: the engine was started without stop strings; use stop_token_ids")

    def _run(self, started: Future[Any]) -> None:
        """The thread: load, then serve until the end."""
        try:
            with without_gc():
                from agentrl.engine.batcher import Batcher
            batcher = Batcher(self._settings, CPU_CONTEXT_LIMIT)
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(batcher)
        batcher.serve()


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"

"""The parts of the `Engine` protocol that engines share: accounts, checks of requests, publications one at a time, and the fence."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator

import numpy as np

from agentrl.core.errors import (
    AgentRLError,
    ContextLengthError,
    EngineDeadError,
    EngineError,
    StructureError,
    TransferAbandonedError,
    WeightsDifferError,
    WeightSyncError,
)
from agentrl.core.images import check_places
from agentrl.core.protocols import EngineLoad, EngineStats, GenerationRequest, Memory, WeightUpdate
from agentrl.core.types import Generation
from agentrl.engine.failures import reason_of
from agentrl.engine.settings import EngineSettings
from agentrl.engine.usage import UsageMeter
from agentrl.weights.digests import DIGESTS, Found, check

_log = logging.getLogger(__name__)


class FencedEngine(ABC):
    """An engine that is fenced for good once it cannot be trusted; see `agentrl.core.protocols.SleepingEngine`.

    If weights fail to load, it may hold a mixture of two versions, so every present and later request gets `EngineDeadError`, and the
    owner has to start a new engine. The same holds for an engine that cannot go to sleep or wake up.
    """

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._meter = UsageMeter()
        self._dead = ""  # why the engine cannot be used; empty while it can
        self._is_started = False
        self._publishing = asyncio.Lock()
        self._asleep: set[Memory] = set()
        self._vocabulary = 0
        self._placeholders: tuple[int, ...] = ()  # tokens in whose places the model puts what it sees; none if it reads text only
        self._load_now, self._kv_tokens = EngineLoad(), 0
        self._is_told = False  # of weights that are not compared

    @property
    @abstractmethod
    def max_model_len(self) -> int:
        """Context length in tokens; known once started."""

    async def generate(self, request: GenerationRequest) -> Generation:
        """Sample one continuation; cancelling the call drops the request from the engine.

        Raises:
            ContextLengthError: If the prompt leaves no room for one token.
            StructureError: If the engine cannot hold the text to the structure that is asked for.
            EngineDeadError: If the engine is gone or fenced.
            EngineError: If this request is malformed, or failed.
        """
        self._check_alive()
        self._check(request)
        self._meter.begin(len(request.prompt_ids))
        try:
            generation = await self._sample(request)
        finally:
            self._meter.end()
        self._meter.produced(len(generation.token_ids), generation.cached_tokens)
        return generation

    async def load_weights(self, update: WeightUpdate) -> int:
        """Load between two steps, keeping requests, and stamp the version; returns the version the engine reports.

        Raises:
            EngineDeadError: If the engine was gone or fenced before.
            WeightSyncError: If loading failed or the engine reports another version; the engine is fenced.
        """
        async with self._publishing:
            self._check_alive()
            self._meter.pause()
            try:
                with self._fenced_on_error(f"weights of version {update.version} did not load", WeightSyncError):
                    return await self._load_weights(update)
            finally:
                self._meter.resume()

    async def sleep(self, level: int) -> None:
        """As `SleepingEngine.sleep`; a sleeping engine stays as it is.

        Raises:
            EngineDeadError: If the engine was gone or fenced before, or cannot sleep.
        """
        async with self._publishing:
            self._check_alive()
            if not self._asleep:
                self._meter.pause()
                with self._fenced_on_error("the engine could not go to sleep"):
                    await self._sleep(level)
            self._asleep = {"weights", "kv_cache"}

    async def wake(self, *parts: Memory) -> None:
        """As `SleepingEngine.wake`; parts that are awake stay as they are.

        Raises:
            EngineDeadError: If the engine was gone or fenced before, or its memory is not free.
        """
        async with self._publishing:
            self._check_alive()
            parts = tuple(part for part in parts if part in self._asleep)  # vLLM would wake none of several if one is awake
            if not parts:
                return
            with self._fenced_on_error(f"the engine could not take back the memory of {' and '.join(parts)}"):
                await self._wake(*parts)
            self._asleep -= set(parts)
            if not self._asleep:
                self._meter.resume()

    def stats(self) -> EngineStats:
        """Counters since the start, and why the engine cannot be used if so."""
        # The figures are those of the last step, which an idle engine would show for ever.
        load = self._load_now if self._meter.active else None
        return self._meter.stats(load=load, kv_tokens=self._kv_tokens, fault=self._dead or self._fault())

    @abstractmethod
    async def _sample(self, request: GenerationRequest) -> Generation:
        """Sample a continuation of a request that was checked."""

    @abstractmethod
    async def _load_weights(self, update: WeightUpdate) -> int:
        """Load weights, and return their version; `TransferAbandonedError` leaves the engine as it is."""

    @abstractmethod
    async def _sleep(self, level: int) -> None:
        """Give back the memory."""

    @abstractmethod
    async def _wake(self, *parts: Memory) -> None:
        """Take back parts of the memory that sleep."""

    @abstractmethod
    def _fault(self) -> str:
        """Return why the engine has ended by itself; empty if it has not."""

    @abstractmethod
    def _end_requests(self, reason: str) -> None:
        """End every present request with `EngineDeadError`."""

    def _verify(self, update: WeightUpdate, found: Found) -> None:
        """Compare the weights with the learner's, and log once how many could not be compared.

        Raises:
            WeightsDifferError: If some differ.
        """
        left = check(update.payload[DIGESTS], found, engine=f"engine {self._settings.index}", version=update.version)
        if left and not self._is_told:
            self._is_told = True
            count = len(update.payload[DIGESTS]["tensors"])
            _log.warning("%d of %d tensors of the weights are not compared with the learner's, for example %s", len(left), count, left[0])

    def _check_alive(self) -> None:
        self._dead = self._dead or self._fault()
        if self._dead or not self._is_started:
            raise EngineDeadError(f"engine {self._settings.index} cannot be used: {self._dead or 'it was not started'}")

    def _check(self, request: GenerationRequest) -> None:
        """Refuse what would end the engine: vLLM without a tokenizer looks at no token id."""
        ids, name = request.prompt_ids, f"request {request.request_id}"
        if len(ids) >= self.max_model_len:
            raise ContextLengthError(
                f"{name}: a prompt of {len(ids)} tokens leaves no room in a context of {self.max_model_len}; "
                "shorten it or raise --max-model-len"
            )
        if not len(ids) or ids.view(np.uint32).max() >= self._vocabulary:  # a negative one is a large one there
            raise EngineError(f"{name}: the prompt must be token ids from 0 to {self._vocabulary - 1}, at least one; got {ids}")
        if (given := len(request.images) or len(request.placed)) and (request.images or not self._placeholders):
            raise EngineError(f"{name}: this engine takes text only, got {given} images")
        if self._placeholders:
            check_places(name, ids, request.placed, self._placeholders)
        if request.structure is not None and (problem := self._structure_problem()):
            raise StructureError(f"{name}: {problem}")
        if request.sampling.stop and not self._settings.stop_strings:
            problem = "the engine was started without stop strings; set stop_strings in its settings or use stop_token_ids"
            raise EngineError(f"{name}: stop = {request.sampling.stop!r}: {problem}")

    @abstractmethod
    def _structure_problem(self) -> str:
        """Return why the engine cannot hold a text to a structure; empty if it can."""

    @contextlib.contextmanager
    def _fenced_on_error(self, what: str, kind: type[AgentRLError] = EngineDeadError) -> Iterator[None]:
        try:
            yield
        except TransferAbandonedError:  # generation stays paused until weights of some version are loaded
            raise
        # Cancellation too: a load that is cut off may leave a mixture of two versions.
        except BaseException as error:
            self._dead = self._dead or f"{what}: {reason_of(error)}"
            self._end_requests(self._dead)
            if not isinstance(error, Exception) or isinstance(error, WeightsDifferError):
                raise
            raise kind(f"engine {self._settings.index}: {self._dead}") from error

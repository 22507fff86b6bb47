"""One engine for the rollout workers of several processes.

`EngineHost` stands beside the engine. Each rollout worker has a `SharedEngine`, which is an `Engine` to its episodes. Requests and answers
travel in bundles: requests that are made while a bundle is on its way make the next one, and an answer brings all that are ready. So the
process of the engine handles a few calls per decoding step, however many episodes there are.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, TypeAlias

from agentrl.core.errors import AgentRLError, EngineDeadError, EngineError
from agentrl.core.protocols import Engine, EngineLimits, EngineStats, GenerationRequest, TokenListener, WeightUpdate
from agentrl.core.types import Generation

_log = logging.getLogger(__name__)

WAIT_S = 0.1
"""Seconds after which a rollout worker is told the engine's load, if no answer is ready before; as often as it looks at the load."""

Answer: TypeAlias = Generation | AgentRLError


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """A bundle on its way to the engine."""

    new: Sequence[GenerationRequest] = ()
    dropped: Sequence[str] = ()  # requests that nobody waits for any more
    aborted: Sequence[str] = ()  # requests that are to end with what was sampled
    heard: Sequence[str] = ()  # new requests of which somebody wants to know the tokens as they are sampled


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """A bundle on its way back."""

    ready: Sequence[tuple[str, Answer]]  # request, and what became of it
    stats: EngineStats  # at the moment of sending
    tokens: Mapping[str, Sequence[int]] = field(default_factory=dict)  # sampled since the last bundle, of requests that are heard


class EngineLine(Protocol):
    """The way to an `EngineHost`; the host itself is one."""

    async def start(self) -> EngineLimits:
        """Load the model, once however many ask."""
        ...

    async def submit(self, client: str, requests: Requests) -> None:
        """Take in a bundle of requests."""

    async def collect(self, client: str, wait_s: float) -> Answers:
        """Wait until an answer is ready, at most `wait_s`, and return all that are."""
        ...

    async def leave(self, client: str) -> None:
        """Drop all requests of a client; returns when the engine has forgotten them."""

    async def load_weights(self, update: WeightUpdate) -> int:
        """As `Engine.load_weights`."""
        ...


@dataclass(slots=True)
class _Client:
    running: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    ready: list[tuple[str, Answer]] = field(default_factory=list)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def hear(self, name: str, token_ids: Sequence[int]) -> None:
        """Keep tokens that were sampled for a request until they are collected."""
        self.tokens.setdefault(name, []).extend(token_ids)
        self.changed.set()


class EngineHost:
    """An engine and the requests of its clients, which are told apart by name; a name is used once."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._clients: dict[str, _Client] = {}
        self._gone: set[str] = set()
        self._starting = asyncio.Lock()
        self._failed: AgentRLError | None = None

    async def start(self) -> EngineLimits:
        """As `EngineLine.start`.

        Raises:
            EngineError: If the engine does not start.
        """
        async with self._starting:
            # Every rollout worker asks for the start, and an engine that could not start once is not tried again for each of them.
            if self._failed is not None:
                raise self._failed
            try:
                await self.engine.start()
            except AgentRLError as error:
                self._failed = error
                raise
        return EngineLimits.of(self.engine)

    async def submit(self, client: str, requests: Requests) -> None:
        """As `EngineLine.submit`.

        Raises:
            EngineDeadError: If the client has left.
        """
        found = self._client(client)
        for name in requests.dropped:
            if name in found.running:
                found.running[name].cancel()
        for request in requests.new:
            name = request.request_id
            if name in requests.heard:
                request = replace(request, on_tokens=partial(found.hear, name))
            found.running[name] = asyncio.create_task(self._generate(found, request), name=f"request {name}")
        await asyncio.gather(*map(self.engine.abort, requests.aborted))  # as tasks, which begin after those of new requests

    async def collect(self, client: str, wait_s: float) -> Answers:
        """As `EngineLine.collect`.

        Consumes answers of the client. Waits for one, at most `wait_s`; unblocked by the engine and by time.

        Raises:
            EngineDeadError: If the client has left.
        """
        found = self._client(client)
        if not found.ready and not found.tokens and wait_s > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await found.changed.wait()
            await asyncio.sleep(0)  # others of the same decoding step become ready
        found.changed.clear()
        ready, tokens = found.ready, found.tokens
        found.ready, found.tokens = [], {}
        return Answers(ready=ready, stats=self.engine.stats(), tokens=tokens)

    async def leave(self, client: str) -> None:
        """As `EngineLine.leave`; the client's name cannot be used again."""
        self._gone.add(client)
        found = self._clients.pop(client, _Client())
        running = list(found.running.values())
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)

    async def load_weights(self, update: WeightUpdate) -> int:
        """As `Engine.load_weights`."""
        return await self.engine.load_weights(update)

    async def stats(self) -> EngineStats:
        """As `Engine.stats`."""
        return self.engine.stats()

    async def close(self) -> None:
        """Drop all requests and release the engine; safe to call twice."""
        for client in list(self._clients):
            await self.leave(client)
        await self.engine.close()

    def _client(self, name: str) -> _Client:
        if name in self._gone:
            raise EngineDeadError(f"rollout worker {name} has left the engine")
        return self._clients.setdefault(name, _Client())

    async def _generate(self, client: _Client, request: GenerationRequest) -> None:
        answer: Answer
        try:
            answer = await self.engine.generate(request)
        except AgentRLError as error:
            answer = error
        except Exception as error:
            _log.exception("request %s failed", request.request_id)
            answer = EngineError(f"request {request.request_id} failed: {type(error).__name__}: {error}")
        finally:
            del client.running[request.request_id]
        client.ready.append((request.request_id, answer))
        client.changed.set()


class SharedEngine:
    """An engine of another process; see `agentrl.core.protocols.Engine`.

    Args:
        line: The way to its host.
        client: Name of this rollout worker, which no other had before.
    """

    def __init__(self, line: EngineLine, client: str) -> None:
        self._line, self._client = line, client
        self._limits: EngineLimits | None = None
        self._waiting: dict[str, asyncio.Future[Generation]] = {}
        self._new: dict[str, GenerationRequest] = {}
        self._listeners: dict[str, TokenListener] = {}
        self._dropped: list[str] = []
        self._aborted: list[str] = []
        self._to_send, self._to_fetch = asyncio.Event(), asyncio.Event()
        self._stats = EngineStats()
        self._dead = ""
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def max_model_len(self) -> int:
        """Context length in tokens; known once started."""
        return self._started().max_model_len

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a turn; known once started."""
        return self._started().end_token_ids

    async def start(self) -> None:
        """Wait for the engine to be ready.

        Raises:
            EngineError: If it does not start.
        """
        if self._limits is None:
            self._limits = await self._line.start()
            self._tasks = [asyncio.create_task(self._alive(loop)) for loop in (self._send, self._fetch)]

    async def generate(self, request: GenerationRequest) -> Generation:
        """As `Engine.generate`."""
        self._started()
        answer: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        name = request.request_id
        if request.on_tokens is not None:
            self._listeners[name] = request.on_tokens
            request = replace(request, on_tokens=None)
        self._waiting[name], self._new[name] = answer, request
        self._to_send.set()
        self._to_fetch.set()
        try:
            return await answer
        except asyncio.CancelledError:
            self._drop(name)
            raise
        finally:
            self._waiting.pop(name, None)
            self._listeners.pop(name, None)

    async def abort(self, request_id: str) -> None:
        """As `Engine.abort`."""
        if request_id in self._waiting:
            self._aborted.append(request_id)
            self._to_send.set()

    async def load_weights(self, update: WeightUpdate) -> int:
        """As `Engine.load_weights`; one of the engine's rollout workers, or their owner, asks for it."""
        self._started()
        return await self._line.load_weights(update)

    def stats(self) -> EngineStats:
        """The engine's counters when it last said them, at most a few tenths of a second ago; asks for new ones."""
        self._to_fetch.set()
        return self._stats

    async def close(self) -> None:
        """Leave the engine to the others; safe to call twice."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
            with suppress(EngineError):
                await self._line.leave(self._client)
        self._die("it was closed")

    def _started(self) -> EngineLimits:
        if self._limits is None or self._dead:
            raise EngineDeadError(f"the shared engine cannot be used: {self._dead or 'it was not started'}")
        return self._limits

    def _drop(self, name: str) -> None:
        # A request that was not sent yet needs no message to drop it.
        if self._new.pop(name, None) is None and not self._dead:
            self._dropped.append(name)
            self._to_send.set()

    async def _send(self) -> None:
        """Send requests on.

        Consumes requests, and names of those to drop or to abort. Produces bundles. Waits for a request, and for the host to have taken the
        bundle before. Unblocked by `generate`, `abort` and the host; runs until cancelled.
        """
        while True:
            await self._to_send.wait()
            self._to_send.clear()
            heard = tuple(name for name in self._new if name in self._listeners)
            bundle = Requests(new=tuple(self._new.values()), dropped=tuple(self._dropped), aborted=tuple(self._aborted), heard=heard)
            self._new, self._dropped, self._aborted = {}, [], []
            await self._line.submit(self._client, bundle)

    async def _fetch(self) -> None:
        """Bring answers back.

        Consumes bundles. Produces answers and the engine's counters. Waits for the host, at most `WAIT_S` at a time, while a request is
        under way; else for somebody to want the counters. Unblocked by the host, `generate` and `stats`; runs until cancelled.
        """
        while True:
            await self._to_fetch.wait()
            self._to_fetch.clear()
            answers = await self._line.collect(self._client, WAIT_S if self._waiting else 0.0)
            if self._dead:
                return
            self._stats = answers.stats
            for name, token_ids in answers.tokens.items():
                if (listener := self._listeners.get(name)) is not None:
                    listener(token_ids)
            for name, answer in answers.ready:
                waiting = self._waiting.get(name)
                if waiting is None or waiting.done():
                    continue  # nobody waits any more
                if isinstance(answer, Generation):
                    waiting.set_result(answer)
                else:
                    waiting.set_exception(answer)
            if self._waiting:
                self._to_fetch.set()

    async def _alive(self, loop: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run one of the two loops; when the way to the engine fails, so does every request."""
        try:
            await loop()
        except Exception as error:
            self._die(str(error) if isinstance(error, EngineDeadError) else f"{type(error).__name__}: {error}")

    def _die(self, reason: str) -> None:
        self._dead = self._dead or reason
        self._stats = EngineStats(fault=self._dead)
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(EngineDeadError(f"the shared engine is gone: {self._dead}"))

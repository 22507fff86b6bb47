"""The way of an answer to one client: as a whole, or as a stream of events while it is sampled."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from agentrl.core.serving import ApiError, ClientLeftError, Send, send_json
from agentrl.rollout.endpoint.exchange import Exchange
from agentrl.rollout.endpoint.neutral import Answer, Json
from agentrl.rollout.endpoint.session import EndpointSession
from agentrl.rollout.lane import Turns

PING_S = 10.0
"""Seconds without a new piece after which a stream gets a comment, so that clients do not give up."""
# The last of them keeps nginx from holding events back.
HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]


class Delivery:
    """Sends the answer of an exchange to one of its clients, in the dialect of the request.

    A stream begins with the first token. Its last event is held back until the answer is recorded.
    """

    def __init__(self, exchange: Exchange, session: EndpointSession, dialect: Any, send: Send, turns: Turns) -> None:
        self._exchange, self._session, self._dialect, self._send, self._turns = exchange, session, dialect, send, turns
        self._request = exchange.request
        self._events: Any = None  # of the dialect, once the stream has its first
        self._has_begun = False
        self._sent = 0  # pieces of the answer so far

    async def run(self, gone: asyncio.Future[None]) -> None:
        """Send the answer, or raise what the request came to; `ClientLeftError` if the client leaves, which `gone` says.

        Consumes pieces of the answer. Waits for the engine, and is unblocked by it, by the client that leaves, and by time.
        """
        task = self._exchange.task
        if self._request.stream:
            with self._woken(gone) as woken:
                while not task.done() and not gone.done():
                    await self._wait(woken)
                    if not task.done() and not gone.done():
                        await self._go_on()
        else:
            waited: set[asyncio.Future[Any]] = {task, gone}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if gone.done():
            raise ClientLeftError
        await self._end()

    @contextmanager
    def _woken(self, gone: asyncio.Future[None]) -> Iterator[asyncio.Event]:
        """An event that is set when there is something to do."""
        event, task = asyncio.Event(), self._exchange.task

        def wake(*_: object) -> None:
            event.set()

        for waited in (task, gone):
            waited.add_done_callback(wake)
        self._exchange.listeners.add(wake)
        try:
            yield event
        finally:
            self._exchange.listeners.discard(wake)
            for waited in (task, gone):
                waited.remove_done_callback(wake)

    async def _wait(self, woken: asyncio.Event) -> None:
        """Wait for new tokens, or for the end of the request; comments are sent meanwhile."""
        while True:
            try:
                async with asyncio.timeout(PING_S):
                    await woken.wait()
            except TimeoutError:
                await self._text(": the model is writing\n\n")
            else:
                # Before the wait for a turn: tokens that come meanwhile set it again.
                woken.clear()
                await self._turns.take()
                return

    async def _go_on(self) -> None:
        """Send what is new of an answer that is not complete."""
        live = self._exchange.live
        if live is not None and live.has_begun:
            live.advance()
            await self._send_events(self._new_events())

    def _new_events(self) -> list[Json]:
        """The events of the pieces that were not sent."""
        live, begun = self._exchange.live, list[Json]()
        if live is None:
            return begun
        if self._events is None:
            self._events, self._exchange.begun = self._dialect.Events(live.head, self._request), True
            begun = self._events.begin()
        new, self._sent = live.deltas[self._sent :], len(live.deltas)
        return [*begun, *(event for delta in new for event in self._events.add(delta))]

    async def _end(self) -> None:
        """Send the rest of an answer, or what the request came to instead."""
        exchange, task = self._exchange, self._exchange.task
        if task.cancelled():
            problem: BaseException | None = ApiError(410, "the episode of this key ended before its answer", code="episode_over")
        else:
            problem = task.exception()
        if problem is not None:
            # Once a stream has begun its status is sent, so that an error can only be one of its events.
            if not self._has_begun or not isinstance(problem, ApiError):
                raise problem
            self._session.refused(problem)
            events = self._events or self._dialect.Events(Answer(number=0, id="", created=0, text=""), self._request)
            await self._send_events([events.error(problem)], more=False)
            return
        answer = task.result()
        self._session.deliver(exchange)
        if not self._request.stream:
            await send_json(self._send, 200, self._dialect.render(answer, self._request))
            return
        events = self._new_events()
        await self._send_events([*events, *self._events.end(answer)], self._dialect.STREAM_END, more=False)

    async def _send_events(self, events: Iterable[Json], end: str = "", *, more: bool = True) -> None:
        if text := "".join(map(_event, events)) + end:
            await self._text(text, more=more)

    async def _text(self, text: str, *, more: bool = True) -> None:
        if not self._has_begun:
            self._has_begun = True
            await self._send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        await self._send({"type": "http.response.body", "body": text.encode(), "more_body": more})


def _event(data: Json) -> str:
    """An event of a stream, under the name of its type if it has one."""
    name = f"event: {data['type']}\n" if "type" in data else ""
    return f"{name}data: {json.dumps(data)}\n\n"

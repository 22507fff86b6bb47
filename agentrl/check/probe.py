"""Stands between the boundary and the user's object: measures every call, and notices what it leaves behind."""

from __future__ import annotations

import inspect
import os
import threading
import time
import types
from collections.abc import Awaitable, Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from agentrl.check.effects import Effects
from agentrl.env.agent import AgentClass, AgentInstance

METHODS = ("reset", "step", "close", "solve")
ATTRIBUTES = ("agents", "trained_agents")
STATUS_BYTES = 200


@dataclass(slots=True)
class UserCall:
    """One call of user code.

    Attributes:
        method: Its name.
        is_async: The call ran on the event loop.
        tag: The step of the check.
        seconds: From start to end.
        longest_s: The longest time for which it held the event loop.
        done: The call has ended.
        error: The exception that it raised.
    """

    method: str
    is_async: bool
    tag: str
    seconds: float = 0.0
    longest_s: float = 0.0
    done: bool = False
    error: BaseException | None = None


@dataclass(slots=True)
class Watch:
    """Every call so far, and the one that holds the event loop now.

    Attributes:
        status_fd: Where the name of the latest call is written, for a supervisor to read; -1: nowhere.
        effects: Compares what the process shares before and after each call; `None`: not now.
        tag: Put on the calls that follow.
        calls: In order of their beginning.
        holds: Method that holds the event loop, since when, in which thread.
    """

    status_fd: int = -1
    effects: Effects | None = None
    tag: str = ""
    calls: list[UserCall] = field(default_factory=list)
    holds: tuple[str, float, int] | None = None

    def begin(self, method: str, is_async: bool) -> UserCall:
        """Note that a call begins."""
        call = UserCall(method, is_async, self.tag)
        self.calls.append(call)
        if self.status_fd >= 0:
            os.pwrite(self.status_fd, method.encode()[:STATUS_BYTES].ljust(STATUS_BYTES), 0)
        return call

    @contextmanager
    def holding(self, method: str) -> Iterator[None]:
        """While this lasts, user code holds the thread of the event loop."""
        self.holds = (method, time.monotonic(), threading.get_ident())
        try:
            yield
        finally:
            self.holds = None

    @contextmanager
    def measured(self, method: str) -> Iterator[UserCall]:
        """Measure a plain call."""
        call = self.begin(method, False)
        before = self.effects.before() if self.effects else None
        started = time.perf_counter()
        try:
            yield call
        except BaseException as error:
            call.error = error
            raise
        finally:
            call.seconds, call.done = time.perf_counter() - started, True
            if self.effects and before:
                self.effects.compare(before, method)


def probed(cls: AgentClass, watch: Watch) -> AgentClass:
    """A class for the boundary to use in place of `cls`; its objects hold one of `cls` and hand every call on."""
    body: dict[str, Any] = {"__init__": _constructor(cls, watch), "__module__": cls.__module__}
    body.update({name: getattr(cls, name) for name in ATTRIBUTES if hasattr(cls, name)})
    for name in METHODS:
        method = getattr(cls, name, None)
        if method in (AgentInstance.reset, AgentInstance.close):
            body[name] = method  # the boundary knows these, and does not call them
        elif inspect.iscoroutinefunction(method):
            body[name] = _async_method(name, watch)
        elif callable(method):
            body[name] = _plain_method(name, watch)
    return type(cls.__name__, (), body)


def _constructor(cls: AgentClass, watch: Watch) -> Callable[[Any], Any]:
    main = threading.get_ident()

    def construct(self: Any) -> None:
        with watch.measured("__init__"):
            if threading.get_ident() == main:
                with watch.holding("__init__"):
                    self.inner = cls()
            else:
                self.inner = cls()

    async def construct_async(self: Any) -> None:
        self.inner = object.__new__(cls)
        await _async_call(self.inner.__init__, "__init__", watch)

    return construct_async if inspect.iscoroutinefunction(cls.__init__) else construct


def _plain_method(name: str, watch: Watch) -> Callable[..., Any]:
    def call(self: Any, *args: Any) -> Any:
        with watch.measured(name):
            value = getattr(self.inner, name)(*args)
        return _timed(value, watch, watch.begin(name, True)) if inspect.isawaitable(value) else value

    return call


def _async_method(name: str, watch: Watch) -> Callable[..., Any]:
    async def call(self: Any, *args: Any) -> Any:
        return await _async_call(getattr(self.inner, name), name, watch, *args)

    return call


async def _async_call(method: Callable[..., Any], name: str, watch: Watch, *args: Any) -> Any:
    record = watch.begin(name, True)
    before = watch.effects.before() if watch.effects else None
    try:
        return await _timed(method(*args), watch, record)
    finally:
        if watch.effects and before:
            watch.effects.compare(before, name)


@types.coroutine
def _timed(awaitable: Awaitable[Any], watch: Watch, call: UserCall) -> Generator[Any, Any, Any]:
    """Await, and measure how long each stretch between two suspensions holds the event loop."""
    inner: Any = awaitable.__await__()
    started = time.perf_counter()
    value, error = None, None
    try:
        while True:
            resumed = time.perf_counter()
            with watch.holding(call.method):
                try:
                    waits_for = inner.send(value) if error is None else inner.throw(error)
                except StopIteration as stop:
                    return stop.value
                finally:
                    call.longest_s = max(call.longest_s, time.perf_counter() - resumed)
            try:
                value, error = (yield waits_for), None
            except BaseException as raised:
                value, error = None, raised
    except BaseException as raised:
        call.error = raised
        raise
    finally:
        call.seconds, call.done = time.perf_counter() - started, True

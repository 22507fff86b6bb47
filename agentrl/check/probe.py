"""Stands between the boundary and the user's object: measures every call, and reports changes to the state of the process."""

from __future__ import annotations

import asyncio
import inspect
import io
import os
import re
import signal
import sys
import threading
import time
import types
import warnings
from collections.abc import Awaitable, Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psutil

from agentrl.check.findings import Report
from agentrl.check.intact import Intact
from agentrl.check.witness import Witness, in_words, restore_torch, torch_changes, torch_state
from agentrl.core.operating_system import waited_for_cpu_s
from agentrl.core.streams import STREAMS, closed_streams, open_stream
from agentrl.env.agent import AgentClass, AgentInstance

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM", "SIGCHLD", "SIGUSR1") if hasattr(signal, name))

NEVER_AWAITED = re.compile(r"coroutine '(.+)' was never awaited")
OWN = ("_async_method.", "_timed", "EnvSession.")


@dataclass(frozen=True, slots=True)
class _Shared:
    """State of the process that all its code shares."""

    cwd: str
    environ: dict[str, str]
    handlers: dict[int, Any]
    closed: tuple[str, ...]  # standard streams
    torch: dict[str, str]

    def signals_replaced(self, before: _Shared) -> str:
        """Names of the signals whose handlers are others than before."""
        return ", ".join(signal.Signals(number).name for number in SIGNALS if before.handlers[number] != self.handlers[number])


def shared_state() -> _Shared:
    """Return the state of the process now."""
    try:
        cwd = os.getcwd()
    except OSError:
        cwd = ""
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    return _Shared(cwd, dict(os.environ), handlers, closed_streams(), torch_state())


class Effects:
    """Compares the process before and after calls, puts back what was changed, and reports it; `where` gives file, class and method."""

    def __init__(self, report: Report, where: Callable[[str], str], witness: Witness) -> None:
        self._report, self._where, self.witness, self._intact = report, where, witness, Intact()
        self._first = shared_state()
        self._once: set[str] = set()
        # Duplicates outlive a close by user code, and are what a closed stream is opened from again.
        self._streams = {name: os.dup(number) for name, number in STREAMS.items()}

    def compare(self, before: _Shared, method: str) -> None:
        """Report what differs from `before`."""
        for rule, seen in self._intact.changes():
            self._report.add(rule, self._where(method), f"{method} {seen}")
        after = shared_state()
        if after == before:
            return
        where = self._where(method)
        if after.cwd != before.cwd:
            self._report.add("changes-cwd", where, f"{method} changed it to {after.cwd!r}{self.witness.line('cwd')}")
            os.chdir(before.cwd)
        self._compare_environ(before.environ, after.environ, method)
        if names := after.signals_replaced(before):
            self._report.add("changes-signals", where, f"{method} replaced the handler of {names}{self.witness.line('signals')}")
            self.restore_signals()
        if changes := torch_changes(before.torch, after.torch):
            seen = in_words(changes, before.torch, after.torch)
            self._report.add("changes-torch", where, f"{method} changed {seen}{self.witness.line(changes[0])}")
            restore_torch(before.torch)
        if closed := [name for name in after.closed if name not in before.closed]:
            self._report.add("closes-streams", where, f"{method} closed {' and '.join(f'sys.{name}' for name in closed)}")
            self._restore_streams(closed)

    def _restore_streams(self, names: Sequence[str]) -> None:
        """Open closed standard streams again, which the check itself needs."""
        for name in names:
            open_stream(name, self._streams[name])

    def _compare_environ(self, before: dict[str, str], after: dict[str, str], method: str) -> None:
        """A variable that is set once, as some modules do when they are imported, is left alone."""
        changed = sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
        if not changed:
            return
        again = [key for key in changed if key in self._once]
        self._once.update(changed)
        if again:
            seen = f"{method} changed {', '.join(again[:5])}{self.witness.line('environ')}"
            self._report.add("changes-environ", self._where(method), seen)
        os.environ.clear()
        os.environ.update(before)

    def restore_signals(self) -> None:
        """Put the first handlers back, where this is the main thread, which alone may do so."""
        if threading.current_thread() is threading.main_thread():
            for number, handler in self._first.handlers.items():
                if handler is not None and signal.getsignal(number) != handler:
                    signal.signal(number, handler)


@contextmanager
def importing(report: Report, where: str, witness: Witness) -> Iterator[None]:
    """Report what importing a file does to the process; environment variables it may set, as some libraries ask for."""
    before, intact = shared_state(), Intact()
    threads, children = set(threading.enumerate()), {child.pid for child in psutil.Process().children()}
    yield
    undone = list(intact.changes())
    started = [thread.name for thread in threading.enumerate() if thread not in threads and thread.name != "agentrl-env"]
    new = [child for child in psutil.Process().children() if child.pid not in children]
    after = shared_state()
    names = after.signals_replaced(before)
    seen = (
        f"the current directory is {after.cwd!r} after it{witness.line('cwd')}" if after.cwd != before.cwd else "",
        f"it replaced the handler of {names}{witness.line('signals')}" if names else "",
        f"it started {len(started)} threads: {', '.join(started[:3])}" if started else "",
        f"it started {len(new)} processes{witness.line('processes')}" if new else "",
    )
    for words in (*filter(None, seen), *(f"it {words}" for _, words in undone)):
        report.add("import-effects", where, words)
    for number, handler in before.handlers.items():
        if names and handler is not None:
            signal.signal(number, handler)
    if changes := torch_changes(before.torch, after.torch):
        words = in_words(changes, before.torch, after.torch)
        report.add("changes-torch", where, f"importing it changed {words}{witness.line(changes[0])}")
        restore_torch(before.torch)
    if after.cwd != before.cwd:
        os.chdir(before.cwd)


def watch_background(report: Report, where: Callable[[str], str]) -> None:
    """From now on report coroutines that are never awaited, and errors that end threads."""

    def warned(message: Warning | str, category: type[Warning], *rest: Any, **options: Any) -> None:
        coroutine = NEVER_AWAITED.match(str(message))
        if coroutine and issubclass(category, RuntimeWarning) and not coroutine.group(1).startswith(OWN):
            report.add("never-awaited", where(coroutine.group(1).rpartition(".")[2]), str(message))

    def ended(error: threading.ExceptHookArgs) -> None:
        if error.exc_type is not SystemExit:
            name = error.thread.name if error.thread else "a thread"
            report.add("background-error", where("step"), f"{name} ended with {error.exc_type.__name__}: {error.exc_value}")

    warnings.simplefilter("always", RuntimeWarning)
    warnings.showwarning = warned
    threading.excepthook = ended


def watch_tasks(loop: asyncio.AbstractEventLoop, report: Report, where: Callable[[str], str]) -> None:
    """From now on report errors that end tasks which are not awaited."""

    def lost(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error, task = context.get("exception"), context.get("task") or context.get("future")
        if error is not None and task is not None:
            name = getattr(task.get_coro(), "__qualname__", "a task") if isinstance(task, asyncio.Task) else "a future"
            report.add("background-error", where("step"), f"{name} ended with {type(error).__name__}: {error}")

    loop.set_exception_handler(lost)


class Unanswered(io.TextIOBase):
    """Standard input at which nobody answers; reading it fails, where the null device would give empty lines."""

    def readable(self) -> bool:
        """Return True, as standard input does."""
        return True

    def fileno(self) -> int:
        """Return the number of standard input."""
        return STREAMS["stdin"]

    def readline(self, size: int = -1, /) -> str:  # type: ignore[override]
        """Fail as `input` does."""
        raise EOFError("EOF when reading a line")

    def read(self, size: int | None = -1, /) -> str:
        """Fail as `input` does."""
        return self.readline()


def output_size() -> int:
    """Bytes that this process has written to standard output and standard error, if they are files."""
    sys.stdout.flush()
    sys.stderr.flush()
    return sum(os.fstat(number).st_size for number in (1, 2))


METHODS = ("reset", "step", "close", "solve", "snapshot", "restore")
ATTRIBUTES = ("agents", "trained_agents")
STATUS_BYTES = 200


@dataclass(slots=True)
class UserCall:
    """One call of user code."""

    method: str
    is_async: bool
    tag: str  # the step of the check
    seconds: float = 0.0
    longest_s: float = 0.0  # for which it held the event loop without a pause, less the time that the machine gave it no CPU
    computed_s: float = 0.0  # of this, on a CPU
    done: bool = False
    error: BaseException | None = None


@dataclass(slots=True)
class Watch:
    """Every call so far, and the one that holds the event loop now."""

    status_fd: int = -1  # file for the name of the latest call, which a supervisor reads; -1: none
    effects: Effects | None = None
    tag: str = ""  # of the calls that follow
    calls: list[UserCall] = field(default_factory=list)
    holds: tuple[str, float, int] | None = None  # method that holds the event loop, since when, in which thread

    def begin(self, method: str, is_async: bool) -> UserCall:
        """Note that a call begins."""
        call = UserCall(method, is_async, self.tag)
        self.calls.append(call)
        if self.status_fd >= 0:
            # The name is padded, so that a shorter one overwrites all of a longer one.
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
    def comparing(self, method: str) -> Iterator[None]:
        """Report what a call changes in the process."""
        before = shared_state() if self.effects else None
        try:
            yield
        finally:
            if self.effects and before:
                self.effects.compare(before, method)

    @contextmanager
    def measured(self, method: str) -> Iterator[UserCall]:
        """Measure a plain call."""
        call = self.begin(method, False)
        with self.comparing(method):
            started = time.perf_counter()
            try:
                yield call
            except BaseException as error:
                call.error = error
                raise
            finally:
                call.seconds, call.done = time.perf_counter() - started, True


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
        # A plain call of the class would raise `TypeError`, because such an `__init__` returns a coroutine.
        self.inner = object.__new__(cls)
        await _async_call(self.inner.__init__, "__init__", watch)

    return construct_async if inspect.iscoroutinefunction(cls.__init__) else construct


def _plain_method(name: str, watch: Watch) -> Callable[..., Any]:
    def call(self: Any, *args: Any) -> Any:
        with watch.measured(name):
            value = getattr(self.inner, name)(*args)
        # A plain method that returns an awaitable counts twice: it makes the awaitable, and the event loop runs it.
        return _timed(value, watch, watch.begin(name, True)) if inspect.isawaitable(value) else value

    return call


def _async_method(name: str, watch: Watch) -> Callable[..., Any]:
    async def call(self: Any, *args: Any) -> Any:
        return await _async_call(getattr(self.inner, name), name, watch, *args)

    return call


async def _async_call(method: Callable[..., Any], name: str, watch: Watch, *args: Any) -> Any:
    call = watch.begin(name, True)
    with watch.comparing(name):
        return await _timed(method(*args), watch, call)


@dataclass(frozen=True, slots=True)
class _Clocks:
    """Times of this thread: one that another process has displaced holds the loop for longer on the wall, and is not to blame."""

    wall_s: float
    cpu_s: float
    queued_s: float  # ready to run, and waiting for a CPU

    @classmethod
    def now(cls) -> _Clocks:
        return cls(time.perf_counter(), time.thread_time(), waited_for_cpu_s())

    def held(self) -> tuple[float, float]:
        """Return seconds since then in which user code computed or waited for something, and those of them on a CPU."""
        now = _Clocks.now()
        computed = now.cpu_s - self.cpu_s
        return max(now.wall_s - self.wall_s - (now.queued_s - self.queued_s), computed), computed


@types.coroutine
def _timed(awaitable: Awaitable[Any], watch: Watch, call: UserCall) -> Generator[Any, Any, Any]:
    """Await, and measure how long each stretch between two suspensions holds the event loop."""
    inner: Any = awaitable.__await__()
    started = time.perf_counter()
    value, error = None, None
    try:
        while True:
            resumed = _Clocks.now()
            with watch.holding(call.method):
                try:
                    waits_for = inner.send(value) if error is None else inner.throw(error)
                except StopIteration as stop:
                    return stop.value
                finally:
                    # Pairs are compared, so that the computed time stays that of the longest stretch.
                    call.longest_s, call.computed_s = max((call.longest_s, call.computed_s), resumed.held())
            try:
                value, error = (yield waits_for), None
            except BaseException as raised:
                value, error = None, raised
    except BaseException as raised:
        call.error = raised
        raise
    finally:
        call.seconds, call.done = time.perf_counter() - started, True

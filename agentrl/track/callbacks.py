"""Callbacks of the user: loaded and checked before a run, called one at a time with a deadline, timed, their errors named."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import inspect
import logging
import math
import numbers
import queue
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeAlias

from agentrl.core.callbacks import METHODS, Callback, Event, RunEnd, StepEnd
from agentrl.core.errors import CallbackError, ConfigError
from agentrl.core.plugins import load_plugin, suggest
from agentrl.track.jsonl import PROMISED

_log = logging.getLogger(__name__)

FLAG = "--callback"
SLOW_CALL_S = 1.0
SLOW_SHARE = 0.1
"""Share of a step's time from which the calls of one callback are named as slow."""
CANCEL_GRACE_S = 1.0

CallbackLike: TypeAlias = Callback | type[Callback]
"""An object with methods of `Callback`, or a class of which each run makes an object."""

_Answer: TypeAlias = tuple[Any, BaseException | None]
"""Return value of a call, and the exception that it raised."""


def load_callbacks(specs: Iterable[str], flag: str = FLAG) -> list[type[Callback]]:
    """Import the classes that ``--callback``, or another flag, names, each once, and check them; an empty name stands for no class.

    Raises:
        ConfigError: If there is no such file or class, or it cannot be a callback.
    """
    classes = []
    for spec in dict.fromkeys(filter(None, specs)):
        classes.append(load_plugin(flag, spec))
        check_callback(classes[-1], spec, flag)
    return classes


def check_callback(value: Any, spec: str, flag: str = FLAG) -> None:
    """Check that a class, or an object, can be a callback: its ``on_...`` methods are those of `Callback`, and a class needs no arguments.

    Raises:
        ConfigError: If it cannot.
    """
    if inspect.isroutine(value):
        raise ConfigError(flag, spec, f"is a {type(value).__name__}, not a class", "Name a class that inherits from agentrl.Callback.")
    cls = value if inspect.isclass(value) else type(value)
    names = [name for name in dir(cls) if name.startswith("on_") and callable(getattr(cls, name))]
    for name in names:
        if name not in METHODS.values():
            near = suggest(name, METHODS.values()) or f"There are {', '.join(METHODS.values())}."
            raise ConfigError(flag, spec, f"{cls.__name__} has a method {name}, and there is no such event", near)
    followed = [name for name in names if defines(cls, name)]
    if not followed:
        remedy = f"Define one or more of {', '.join(METHODS.values())}."
        raise ConfigError(flag, spec, f"{cls.__name__} has no method of a callback", remedy)
    made = [("__init__", ())] if cls is value else []
    for name, arguments in (*made, *((name, (None, None)) for name in followed)):
        function = cls if name == "__init__" else getattr(cls, name)
        try:
            inspect.signature(function).bind(*arguments)
        except TypeError as error:
            wanted = "must work without arguments" if name == "__init__" else "must take one argument, the event"
            raise ConfigError(flag, spec, f"{cls.__name__}.{name} {wanted}: {error}", "Change its parameters.") from None
        except ValueError:  # a method without a readable signature is taken as it is
            continue


def defines(cls: type[Any], method: str) -> bool:
    """Return whether a class has a method of its own for an event."""
    return getattr(cls, method, None) not in (None, getattr(Callback, method))


class _Thread:
    """Makes calls one after another in one thread, which a call that hangs does not keep alive beyond the process."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[_Answer], Callable[[], Any]]] = queue.SimpleQueue()
        self._started = False

    async def run(self, call: Callable[[], Any]) -> _Answer:
        """Make a call and wait for it; if the waiting is cancelled, the call goes on, and the next one comes after it."""
        if not self._started:
            self._started = True
            threading.Thread(target=self._serve, name="agentrl-callbacks", daemon=True).start()
        answer: Future[_Answer] = Future()
        self._calls.put((answer, call))
        return await asyncio.wrap_future(answer)

    def _serve(self) -> None:
        while True:
            answer, call = self._calls.get()
            if answer.set_running_or_notify_cancel():
                try:
                    answer.set_result((call(), None))
                except BaseException as error:  # whatever it is, it ends the call and not the thread
                    answer.set_result((None, error))


@dataclasses.dataclass(slots=True)
class _Followed:
    """A callback, and the time that its calls took."""

    made: Any  # the object, or the class until the first event
    name: str
    calls: int = 0
    seconds: float = 0.0
    lost: bool = False  # a call did not return before its deadline, so there are no further ones
    step_s: dict[str, float] = dataclasses.field(default_factory=dict)  # by method, since the last step ended
    warned: set[str] = dataclasses.field(default_factory=set)  # methods named as slow; "" stands for the callback as a whole

    def follows(self, method: str) -> bool:
        """Return whether the callback has a method of its own for an event."""
        return not self.lost and defines(self.made if inspect.isclass(self.made) else type(self.made), method)

    def took(self, method: str, seconds: float) -> None:
        """Add up the time of a call, and warn of a slow one once."""
        self.calls, self.seconds = self.calls + 1, self.seconds + seconds
        self.step_s[method] = self.step_s.get(method, 0.0) + seconds
        if seconds > SLOW_CALL_S and method not in self.warned:
            self.warned.add(method)
            _log.warning("callback %s.%s took %.1f s, for which the run waited", self.name, method, seconds)

    def step_ended(self, step: int, step_s: float) -> None:
        """Warn once if the calls took a large share of a step."""
        spent, methods = sum(self.step_s.values()), sorted(self.step_s, key=self.step_s.__getitem__)
        self.step_s.clear()
        if spent > max(SLOW_SHARE * step_s, 0.1 * SLOW_CALL_S) and not self.warned:
            self.warned.add("")
            text = "callback %s took %.1f s of the %.1f s of step %d, most of it in %s"
            _log.warning(text, self.name, spent, step_s, step, methods[-1])


class UserCallbacks:
    """The callbacks of a run, told of one event at a time in the order in which they were given.

    Of classes objects are made at the first event. Methods written with ``def`` run in one thread, together with ``__init__``;
    those written with ``async def`` in the event loop. When a callback asks for the end of the run, `ask_stop` is called with its
    name and reason.
    """

    def __init__(
        self,
        callbacks: Sequence[CallbackLike] = (),
        *,
        timeout_s: float = 300.0,
        ask_stop: Callable[[str], None] = lambda reason: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._all = [_Followed(made, (made if inspect.isclass(made) else type(made)).__name__) for made in callbacks]
        self._timeout_s, self._ask_stop, self._clock = timeout_s, ask_stop, clock
        self._thread, self._lock = _Thread(), asyncio.Lock()
        self._stop_asked = False

    def times(self) -> dict[str, dict[str, float]]:
        """Return the number of calls and their seconds by the callback's name."""
        return {each.name: {"calls": each.calls, "seconds": each.seconds} for each in self._all}

    async def tell(self, event: Event) -> dict[str, float]:
        """Tell every callback that follows the event, wait for each, and return the metrics that they added at the end of a step.

        Raises:
            CallbackError: If one of them raised, was too late, or returned what cannot be used. All are told of the end of a run first.
        """
        method = METHODS[type(event)]
        if not any(each.follows(method) for each in self._all):
            return {}
        added: dict[str, float] = {}
        failures: list[CallbackError] = []
        # Several loops of a run tell of events, and callbacks are told of one at a time.
        async with self._lock:
            for each in self._all:
                try:
                    added |= await self._tell_one(each, method, event, added)
                except CallbackError as error:
                    failures.append(error)
                    if not isinstance(event, RunEnd):
                        break
            self._pass_on_stop()
        if failures:
            raise failures[0]
        return added

    async def _tell_one(self, each: _Followed, method: str, event: Event, added: Mapping[str, float]) -> dict[str, float]:
        if inspect.isclass(each.made):
            each.made = await self._call(each, "__init__", each.made)
        told = event
        if isinstance(event, StepEnd):
            told = dataclasses.replace(event, metrics={**event.metrics, **added})
        returned = None
        if each.follows(method):
            returned = await self._call(each, method, functools.partial(getattr(each.made, method), told))
        if not isinstance(told, StepEnd):
            return {}
        each.step_ended(told.step, told.metrics.get("time/step_s", math.inf))
        return checked_metrics(returned, told.metrics, f"callback {each.name}.{method}")

    async def _call(self, each: _Followed, method: str, call: Callable[[], Any]) -> Any:
        where = f"callback {each.name}.{method}"
        started, is_async = self._clock(), inspect.iscoroutinefunction(_function(call))
        work = asyncio.ensure_future(self._answer(call, is_async))
        try:
            await asyncio.wait({work}, timeout=self._timeout_s)
        finally:
            late = not work.done()
            if late:  # also if the run is cancelled meanwhile
                work.cancel()
                await asyncio.wait({work}, timeout=CANCEL_GRACE_S)
        each.took(method, self._clock() - started)
        if late:
            each.lost = True
            self._thread = self._thread if is_async else _Thread()  # the other callbacks do not wait behind the lost one
            raise CallbackError(
                f"{where} did not return within {self._timeout_s:g} s. Let it return earlier, or leave the work to a thread."
            )
        if work.cancelled():
            raise CallbackError(f"{where} cancelled the task that called it")
        result, error = work.result()
        if error is not None:
            raise CallbackError(f"{where} raised {type(error).__name__}: {error}{place(error, call)}") from error
        return result

    async def _answer(self, call: Callable[[], Any], is_async: bool) -> _Answer:
        """Make a call in the event loop or in the thread; exceptions are returned."""
        try:
            result, error = (call(), None) if is_async else await self._thread.run(call)
            return (await result if isinstance(result, Awaitable) else result), error
        except (Exception, SystemExit) as raised:
            return None, raised

    def _pass_on_stop(self) -> None:
        """Ask for the end of the run once, after every callback was told of the event."""
        reasons = [(each.name, getattr(each.made, "stop_reason", None)) for each in self._all if not inspect.isclass(each.made)]
        for name, reason in reasons:
            if reason is not None and not self._stop_asked:
                self._stop_asked = True
                self._ask_stop(f"{name}: {reason}")


def checked_metrics(returned: Any, metrics: Mapping[str, float], where: str) -> dict[str, float]:
    """Return the metrics that a callback adds to those of a step, as plain numbers; `where` names its method in messages.

    Raises:
        CallbackError: If it is no mapping of names to finite numbers, or a name is taken.
    """
    if returned is None:
        return {}
    if not isinstance(returned, Mapping):
        raise CallbackError(f"{where} returned {returned!r:.200}: must be a mapping of metric names to numbers, or None")
    added: dict[str, float] = {}
    for name, value in returned.items():
        try:
            number = value.item()  # of NumPy and torch
        except (AttributeError, ValueError, RuntimeError):
            number = value
        if not isinstance(name, str) or not name.strip():
            raise CallbackError(f"{where} returned a metric named {name!r:.200}: names must be texts that are not empty")
        if name in metrics or name in PROMISED:
            raise CallbackError(f"{where} returned the metric {name!r}, which is there already. Choose another name, as 'my/{name}'")
        if not isinstance(number, numbers.Real) or not math.isfinite(number):
            raise CallbackError(f"{where} returned {name} = {value!r:.200}: must be a finite number. Leave it out where there is none")
        added[name] = float(number)
    return added


def _function(call: Callable[[], Any]) -> Any:
    return call.func if isinstance(call, functools.partial) else call


def place(error: BaseException, call: Callable[[], Any]) -> str:
    """Return the innermost line of the callback's own file that the error passed through, in brackets."""
    function = _function(call)
    function = function.__init__ if inspect.isclass(function) else inspect.unwrap(getattr(function, "__func__", function))
    code = getattr(function, "__code__", None)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if code is not None and frame.filename == code.co_filename]
    frame = (own or [f for f in frames if f.filename != __file__] or list(frames))[-1:]
    return "".join(f" ({Path(f.filename).name}, line {f.lineno}, in {f.name})" for f in frame)

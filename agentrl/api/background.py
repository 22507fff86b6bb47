"""Runs a coroutine to its end: under the signals of a command, or on a thread of its own for Python code; an interrupt ends it in order."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from agentrl.core.errors import ConfigError
from agentrl.core.exit_codes import INTERRUPTED
from agentrl.core.process import handling_signals, refuse_import
from agentrl.flow.state import StopRequest

T = TypeVar("T")

REPEATED_S = 1.0
"""Seconds within which the same signal again counts once: `timeout`, `srun` and container stops send it to a process and to its group."""
ENDING_S = 13.0
"""Seconds that cleaning up gets after a signal, beside those for the step under way; then the process ends by force."""

MAX_INTERRUPTS = 2
"""Interrupts that the end of work on a thread is waited for; what user code blocks does not hear them."""
SHOW_CURSOR = b"\x1b[?25h"
"""Bytes that make a terminal show the cursor, which a live display hides."""

_one_at_a_time = threading.Lock()


class Background(Generic[T]):
    """Work on a thread of its own, which begins at once.

    Args:
        work: Makes the coroutine, which cleans up after itself when it is cancelled; its argument asks it for an early end.
        stop_timeout_s: Seconds from the request for an early end to the cancellation.

    Raises:
        ConfigError: If other work goes on in this process, engines and learners being one of each, or this is an import of the script.
    """

    def __init__(self, work: Callable[[StopRequest], Coroutine[Any, Any, T]], stop_timeout_s: float = 0.0) -> None:
        refuse_import()
        if not _one_at_a_time.acquire(blocking=False):
            remedy = "Wait until it has ended, or start this one in a process of its own."
            raise ConfigError("agentrl", "busy", "a training or an evaluation goes on in this process already", remedy)
        self._work, self._stop_timeout_s, self._stop = work, stop_timeout_s, StopRequest()
        self._ended: Future[T] = Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[T] | None = None
        self._interrupts = 0
        run = contextvars.copy_context().run  # a notebook tells by the context in which cell output belongs
        threading.Thread(target=run, args=(self._run,), name="agentrl-run", daemon=True).start()

    def wait(self) -> T:
        """Wait for the end on this thread; Ctrl-C asks for an early end, once more ends the work without saving, the third leaves it.

        Raises:
            KeyboardInterrupt: If there was one; by then everything is saved and cleaned up, unless the work had to be left.
        """
        while True:
            try:
                result = self._ended.result()
            except KeyboardInterrupt:
                self.interrupt()
                if self._interrupts > MAX_INTERRUPTS:
                    sys.stderr.write("\nagentrl: the work does not end and is left behind; restart Python before the next\n")
                    raise
            except asyncio.CancelledError:
                raise KeyboardInterrupt from None
            else:
                if self._interrupts:
                    raise KeyboardInterrupt
                return result

    async def wait_async(self) -> T:
        """Wait for the end on this thread's event loop; cancelling it is an interrupt, after which the end is still waited for."""
        cancelled: asyncio.CancelledError | None = None
        while not self._ended.done():
            try:
                # Not awaited itself, because a cancellation would pass from the wrapped future to that of the work.
                await asyncio.wait([asyncio.wrap_future(self._ended)])
            except asyncio.CancelledError as error:
                cancelled = error
                self.interrupt()
        if cancelled is not None:
            raise cancelled
        return self._ended.result()

    def interrupt(self) -> None:
        """Ask for an early end; the second time, and the first if nobody listens, cancel the work."""
        self._interrupts += 1
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended meanwhile
                self._loop.call_soon_threadsafe(self._on_interrupt)

    def _on_interrupt(self) -> None:
        if self._task is None:
            return
        if self._interrupts > 1 or not self._stop.heard:
            sys.stderr.write("\nagentrl: stopping\n")
            self._task.cancel()
            return
        sys.stderr.write("\nagentrl: finishing the step under way, then saving; interrupt again to end at once\n")
        self._stop.ask()
        asyncio.get_running_loop().call_later(self._stop_timeout_s, self._task.cancel)

    def _run(self) -> None:
        try:
            try:
                result = asyncio.run(self._main())
            finally:
                # Released before the result is set, so that whoever waits for it may begin the next work at once.
                _one_at_a_time.release()
        # Whoever waits gets everything that ends the work, also the `SystemExit` of user code.
        except BaseException as error:
            self._ended.set_exception(error)
        else:
            self._ended.set_result(result)

    async def _main(self) -> T:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.ensure_future(self._work(self._stop))
        # An interrupt may have come before there was a task to cancel.
        if self._interrupts:
            self._on_interrupt()
        return await self._task


def run_until_signal(
    work: Coroutine[Any, Any, T], stop: StopRequest | None = None, stop_timeout_s: float = 0.0, saved: Callable[[], str] = lambda: ""
) -> T:
    """Run `work` to its end and return its result; a signal asks `stop`, if `work` hears it, and cancels `work` after `stop_timeout_s`.

    A second signal, or `ENDING_S` more in which `work` did not end, ends the process at once, also when code of the user blocks the
    event loop or a library does not return; `saved` then says what is kept.

    Raises:
        KeyboardInterrupt: If a signal cancelled it; by then its own cleanup is done.
    """
    signals = _Signals(work, stop or StopRequest(), stop_timeout_s, saved)
    try:
        return asyncio.run(signals.supervised())
    finally:
        signals.calm()


class _Signals(Generic[T]):
    """The signals of a command while `work` runs."""

    def __init__(self, work: Coroutine[Any, Any, T], stop: StopRequest, stop_timeout_s: float, saved: Callable[[], str]) -> None:
        self._work, self._stop, self._stop_timeout_s, self._saved = work, stop, stop_timeout_s, saved
        self._seen: tuple[int, float] | None = None  # the signal that came, and when
        self._force: threading.Timer | None = None

    async def supervised(self) -> T:
        self._task, self._loop = asyncio.ensure_future(self._work), asyncio.get_running_loop()
        with handling_signals(self._on_signal):
            try:
                return await self._task
            except asyncio.CancelledError:
                if self._seen:
                    raise KeyboardInterrupt from None
                raise

    def calm(self) -> None:
        """Give up ending the process by force."""
        if self._force is not None:
            self._force.cancel()

    def _on_signal(self, number: int) -> None:
        now = time.monotonic()
        if self._seen is None:
            self._seen = number, now
            self._force = threading.Timer(self._stop_timeout_s + ENDING_S, _end_at_once, (self._saved,))
            self._force.daemon = True
            self._force.start()
            # A handler may run between any two instructions of Python code, so the loop does the rest.
            self._loop.call_soon_threadsafe(self._ask)
        elif number != self._seen[0] or now - self._seen[1] > REPEATED_S:
            _end_at_once(self._saved)

    def _ask(self) -> None:
        if self._stop.heard:
            sys.stderr.write("\nagentrl: finishing the step under way, then saving; once more to force\n")
            self._stop.ask()
            self._loop.call_later(self._stop_timeout_s, self._task.cancel)
        else:
            sys.stderr.write("\nagentrl: stopping; once more to force\n")
            self._task.cancel()


def _end_at_once(saved: Callable[[], str]) -> None:
    """Give the terminal back, say what is kept, and end the process; by the descriptors, because nothing else may work any more."""
    told = ""
    with contextlib.suppress(Exception):
        told = saved()
    with contextlib.suppress(OSError):
        if os.isatty(1) and os.environ.get("TERM", "dumb") != "dumb":
            os.write(1, SHOW_CURSOR)
        os.write(2, f"\nagentrl: forced to end{'; ' if told else ''}{told}\n".encode())
    os._exit(INTERRUPTED)

"""Daemon threads for user code that blocks: hanging code may be left behind."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import queue
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any


class UserError(Exception):
    """Carries whatever user code raised, also what a future refuses (StopIteration) or what would end the event loop."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


class Threads:
    """Runs blocking calls on daemon threads, at most `limit` that someone waits for at a time.

    A call whose waiter gave up goes on by itself and no longer counts, so hanging code cannot use up the threads, and
    being a daemon it cannot keep the process alive. A thread that is done waits for the next call.
    """

    def __init__(self, limit: int) -> None:
        self._free = asyncio.Semaphore(limit)
        self._idle: list[queue.SimpleQueue[Callable[[], None] | None]] = []
        self._closed = False

    async def __aenter__(self) -> Threads:
        await self._free.acquire()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._free.release()

    async def run(self, call: Callable[[], Any]) -> Any:
        """Run `call` on a thread and wait for it; on cancellation the thread is left behind."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        context = contextvars.copy_context()
        jobs = self._idle.pop() if self._idle else self._new_thread()

        def settle(result: Any, error: BaseException | None) -> None:
            self._rest(jobs)
            if not future.done():
                future.set_result(result) if error is None else future.set_exception(UserError(error))

        def work() -> None:
            result: Any = None
            error: BaseException | None = None
            try:
                result = context.run(call)
            except BaseException as raised:  # whatever ends the call ends only the call
                error = raised
            with contextlib.suppress(RuntimeError):  # the loop may be gone when an abandoned call ends
                loop.call_soon_threadsafe(settle, result, error)

        jobs.put(work)
        return await future

    async def call(self, function: Callable[[], Any]) -> Any:
        """As `run`, but raise what the function raises, as it is; its `sys.exit` is a `RuntimeError`."""
        try:
            return await self.run(function)
        except UserError as raised:
            error = raised.error
        if isinstance(error, SystemExit):
            raise RuntimeError(f"exit({error.code})")
        raise error if isinstance(error, Exception) else UserError(error)

    def close(self) -> None:
        """End the threads that are done, and the others when they are."""
        self._closed = True
        while self._idle:
            self._idle.pop().put(None)

    def _rest(self, jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
        if self._closed:
            jobs.put(None)
        else:
            self._idle.append(jobs)

    @staticmethod
    def _new_thread() -> queue.SimpleQueue[Callable[[], None] | None]:
        jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

        def serve() -> None:
            while (work := jobs.get()) is not None:
                work()
                # Otherwise the last call, and all that it refers to, would live until the next one.
                del work

        # Not a ThreadPoolExecutor: at its end Python waits for the threads of those, hanging ones too.
        threading.Thread(target=serve, name="agentrl-env", daemon=True).start()
        return jobs

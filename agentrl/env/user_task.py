"""The asyncio task of an episode's user code: one call after another, each up to its deadline."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from agentrl.env.threads import Threads, UserError

_log = logging.getLogger(__name__)

CANCEL_GRACE_S = 1.0


class LateError(Exception):
    """The deadline of a call has passed."""


@dataclass(slots=True, eq=False)
class _Job:
    """One call of user code; `answer` is awaited itself, because `asyncio.wait` would make a second future for every step."""

    call: Callable[[], Any]
    is_async: bool
    answer: asyncio.Future[Any]  # how the call ended, `LateError` after its deadline
    is_over: bool = False
    ended: asyncio.Future[None] | None = None  # of whoever waits for the end of a call that is interrupted

    def expire(self) -> None:
        """Answer for a call that is not over at its deadline."""
        if not self.answer.done():
            self.answer.set_exception(LateError())

    def end(self, result: Any, error: UserError | None) -> None:
        """Answer with the result of the call, or with what it raised, if that is still awaited."""
        self.is_over = True
        if not self.answer.done():
            self.answer.set_result(result) if error is None else self.answer.set_exception(error)
        if self.ended is not None and not self.ended.done():
            self.ended.set_result(None)


class _Inbox:
    """Calls that a task is to make; `asyncio.Queue` takes longer to make and to wait for than most calls take."""

    def __init__(self) -> None:
        self._jobs: deque[_Job | None] = deque()
        self._more: asyncio.Future[None] | None = None
        self.is_busy = False  # while a call is made

    def put(self, job: _Job | None) -> None:
        """Add a call, or the end of all calls."""
        self._jobs.append(job)
        if self._more is not None and not self._more.done():
            self._more.set_result(None)

    async def get(self) -> _Job | None:
        """Wait for a call, and return it; `None` at the end."""
        self.is_busy = False
        while not self._jobs:
            self._more = asyncio.get_running_loop().create_future()
            await self._more
        self.is_busy = True
        return self._jobs.popleft()


class UserTask:
    """Makes calls of user code as one asyncio task and in one context, plain functions on a thread.

    Args:
        name: Of the task.
        threads: For plain functions.
        prepare: Called once in the context of the task.
    """

    def __init__(self, name: str, threads: Threads, prepare: Callable[[], None]) -> None:
        self._name, self._threads, self._prepare = name, threads, prepare
        self._inbox = _Inbox()
        self.task: asyncio.Task[None] | None = None  # once there was a call

    async def call(self, call: Callable[[], Any], timeout_s: float, is_async: bool, where: str) -> Any:
        """Make a call, and return its result.

        Args:
            call: What to call.
            timeout_s: Seconds until its deadline.
            is_async: True if it does not block.
            where: Its name, for messages.

        Raises:
            UserError: If it raised anything.
            LateError: If it was not over at its deadline; then it was cancelled.
        """
        if self.task is None or self.task.done():
            self.task = asyncio.create_task(self._serve(self._inbox), name=self._name)
        loop = asyncio.get_running_loop()
        job, timer = _Job(call, is_async, loop.create_future()), None
        deadline_s = loop.time() + timeout_s
        self._inbox.put(job)
        try:
            await asyncio.sleep(0)  # a call that awaits nothing is over after it, and a timer would take longer than most of them
            if not job.is_over:
                timer = loop.call_at(deadline_s, job.expire)
            return await job.answer
        except asyncio.CancelledError:
            job.answer.cancel()  # then asyncio does not complain of an exception in it that nobody read
            await self._interrupt(job, where)
            raise
        except LateError:
            await self._interrupt(job, where)
            raise
        finally:
            if timer is not None:
                timer.cancel()

    async def close(self) -> None:
        """End the task; between two calls it does so by itself, when the event loop comes to it."""
        task, inbox = self.task, self._inbox
        if task is None or task.done():
            return
        self.task, self._inbox = None, _Inbox()
        inbox.put(None)
        if inbox.is_busy:
            task.cancel()
            await asyncio.wait({task}, timeout=CANCEL_GRACE_S)

    async def _interrupt(self, job: _Job, where: str) -> None:
        """Cancel the running call; code that ignores cancellation is left behind after a moment."""
        if self.task is None:
            return
        self.task.cancel()
        if not job.is_over:
            job.ended = asyncio.get_running_loop().create_future()
            await asyncio.wait({job.ended}, timeout=CANCEL_GRACE_S)
        if not job.is_over:
            self.task, self._inbox = None, _Inbox()
            _log.warning("%s ignores cancellation and is left behind", where)

    async def _serve(self, inbox: _Inbox) -> None:
        """Consume calls and answer them, one after another, until their end, or until cancelled between two of them."""
        self._prepare()
        while (job := await inbox.get()) is not None:
            try:
                result = job.call() if job.is_async else await self._threads.run(job.call)
                if inspect.isawaitable(result):
                    result = await result
            except BaseException as error:
                _forget_cancellation()
                job.end(None, error if isinstance(error, UserError) else UserError(error))
                # The first is meant for the whole process, and after the second a coroutine may not wait again.
                if isinstance(error, KeyboardInterrupt | GeneratorExit):
                    raise
            else:
                job.end(result, None)
            # Otherwise a call and its result would live until the next one.
            del job


def _forget_cancellation() -> None:
    """Make this task as good as new, so that time limits and task groups in a later call work."""
    task = asyncio.current_task()
    while task is not None and task.cancelling():
        task.uncancel()

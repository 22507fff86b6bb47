"""The one place that calls user code: deadlines, threads, errors named, results checked.

Every method of one episode runs in one asyncio task of its own, so that a cancel scope, a context variable or a
connection opened in `reset` may be closed in `close`; plain ``def`` methods run on daemon threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import inspect
import linecache
import logging
import queue
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, TypeVar

from agentrl.core.errors import EnvError, EnvResultError, EnvTimeoutError, RemoteError, RewardError
from agentrl.core.process import inner_last
from agentrl.core.types import Span, Task
from agentrl.env.agent import AgentClass, AgentInstance, ResetResult, StepResult, StepState
from agentrl.env.directory import CurrentDirectory
from agentrl.env.images import drawn_images, image_texts, with_texts
from agentrl.env.isolation.system import ProcessLimits
from agentrl.env.multi_agent import named_agents
from agentrl.env.results import MAX_MESSAGE, check_reset, check_step, said
from agentrl.env.sandbox.spec import DEFAULT_CHOICE, SandboxChoice, use_choice
from agentrl.env.session import KeptState, Snapshot
from agentrl.env.states import make_reset_state
from agentrl.env.timing import Stopwatch, use_stopwatch
from agentrl.env.tools.mcp_servers import use_servers

_log = logging.getLogger(__name__)

GIVE_WAY = "Await there, as in `await asyncio.sleep(...)`, or write the method with plain def, which runs on a thread under a time limit."
CANCEL_GRACE_S = 1.0
MAX_TRACEBACK = 4000
_PACKAGE = str(Path(__file__).parent)
_PYTHON = (f"{sysconfig.get_path('stdlib')}/", "<frozen ")

_NO_THREAD = contextlib.nullcontext()
_Checked = TypeVar("_Checked")


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvLimits:
    """Deadlines of user code, seconds; threads for ``def`` methods; limits of a process, `None` for none; sandboxes; servers of tools."""

    reset_timeout_s: float = 60.0
    step_timeout_s: float = 60.0
    close_timeout_s: float = 10.0
    threads: int = 32
    process: ProcessLimits | None = None
    sandbox: SandboxChoice = DEFAULT_CHOICE
    mcp: tuple[str, ...] = ()
    copied: bool = False  # True if processes of episodes may be copied


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
                future.set_result(result) if error is None else future.set_exception(_UserError(error))

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
        except _UserError as raised:
            error = raised.error
        if isinstance(error, SystemExit):
            raise RuntimeError(f"exit({error.code})")
        raise error if isinstance(error, Exception) else _UserError(error)

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
                del work

        threading.Thread(target=serve, name="agentrl-env", daemon=True).start()
        return jobs


class _UserError(Exception):
    """Carries whatever user code raised, also what a future refuses (StopIteration) or what would end the event loop."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


class _LateError(Exception):
    """The deadline of a call has passed."""


@dataclass(slots=True, eq=False)
class _Job:
    """One call of user code; `answer` is awaited itself, because `asyncio.wait` would make a second future for every step."""

    call: Callable[[], Any]
    is_async: bool
    answer: asyncio.Future[Any]  # how the call ended, `_LateError` after its deadline
    is_over: bool = False
    ended: asyncio.Future[None] | None = None  # of whoever waits for the end of a call that is interrupted

    def expire(self) -> None:
        """Answer for a call that is not over at its deadline."""
        if not self.answer.done():
            self.answer.set_exception(_LateError())

    def end(self, result: Any, error: _UserError | None) -> None:
        """Answer with the result of the call, or with what it raised, if that is still awaited."""
        self.is_over = True
        if not self.answer.done():
            self.answer.set_result(result) if error is None else self.answer.set_exception(error)
        if self.ended is not None and not self.ended.done():
            self.ended.set_result(None)


class EnvSession:
    """One episode's environment: made at `reset`, stepped, and closed whatever happened; `source` is the user's file, for messages."""

    abandoned: ClassVar[str] = "; its thread cannot be ended and is left behind"
    """End of the message about a plain ``def`` that is not over at its deadline."""
    defaults: ClassVar[tuple[Callable[..., Any], ...]] = (AgentInstance.reset, AgentInstance.close)
    """Methods that do nothing, so that they need not be called."""

    def __init__(
        self, cls: AgentClass, source: str, threads: Threads, limits: EnvLimits, directory: CurrentDirectory | None = None
    ) -> None:
        self._class, self._threads, self._limits, self._directory = cls, threads, limits, directory
        self._file = Path(source).name
        self._object: Any = None
        self._jobs: asyncio.Queue[_Job] = asyncio.Queue()
        self._server: asyncio.Task[None] | None = None
        self._stopwatch = Stopwatch()

    @property
    def server(self) -> asyncio.Task[None] | None:
        """The session's task, once there was a call."""
        return self._server

    async def reset(self, task: Task, seed: int) -> ResetResult:
        """Make the user's object and begin the episode; `EnvError`, `EnvTimeoutError`, `EnvResultError` if user code fails."""
        limit = self._limits.reset_timeout_s
        await self._make(limit)
        value = await self._prepared(await self._method("reset", limit, make_reset_state(task=task, seed=seed)))
        return self._checked("reset", check_reset, value, task.prompt, named_agents(self._class))

    async def _make(self, limit: float) -> None:
        """Make the user's object."""
        self._stopwatch.begin()
        is_async = any(map(inspect.iscoroutinefunction, (getattr(self._class, "reset", None), getattr(self._class, "step", None))))
        cls = self._class
        inherited = all(getattr(cls, name) is getattr(object, name) for name in ("__init__", "__new__"))
        if inherited and not inspect.isabstract(cls):
            self._object = cls()
        elif inspect.iscoroutinefunction(cls.__init__):
            self._object = await self._call("__init__", functools.partial(_made, cls), limit, True)
        else:
            self._object = await self._call("__init__", cls, limit, is_async)

    async def step(self, state: StepState) -> StepResult:
        """Give the environment one turn of the model; raises as `reset` does."""
        given = {key: list(item) if isinstance(item, list) else item for key, item in state.get("sampling_params", {}).items()}
        self._stopwatch.begin()
        value = await self._prepared(await self._method("step", self._limits.step_timeout_s, state))
        return self._checked("step", check_step, value, named_agents(self._class), given)

    async def _prepared(self, value: Any) -> Any:
        """Return a result whose images are texts, made on a thread, because files of large pictures take long to write."""
        try:
            if not (images := drawn_images(value)):
                return value
            async with self._threads:
                return with_texts(value, await self._threads.run(functools.partial(image_texts, images)))
        except Exception:  # of the user's objects; the check of the result says what is wrong
            return value

    async def snapshot(self, count: int) -> list[Snapshot]:
        """Ask the user's object for its state, as often as it is needed; raises as `reset` does."""
        self._stopwatch.begin()
        return [KeptState(await self._method("snapshot", self._limits.step_timeout_s)) for _ in range(count)]

    async def restore(self, snapshot: Snapshot, task: Task) -> None:
        """Make the user's object and hand it the state of another; raises as `reset` does."""
        assert isinstance(snapshot, KeptState)
        await self._make(self._limits.reset_timeout_s)
        await self._method("restore", self._limits.reset_timeout_s, snapshot.value)

    def take_spans(self) -> tuple[Span, ...]:
        """Return the times of tools within the last call, in seconds since it began, and forget them."""
        return self._stopwatch.take()

    async def close(self) -> None:
        """Call the user's `close` if there is one and end the session's task; errors are logged, not raised."""
        try:
            if self._object is not None and callable(getattr(self._object, "close", None)):
                await self._method("close", self._limits.close_timeout_s)
        except EnvError as error:
            _log.warning("%s", error)
        finally:
            self._object = None
            if self._server is not None:
                self._server.cancel()
                await asyncio.wait({self._server}, timeout=CANCEL_GRACE_S)

    def _where(self, method: str) -> str:
        return f"{self._file}: {self._class.__name__}.{method}"

    def _checked(self, method: str, check: Callable[..., _Checked], value: Any, *args: Any) -> _Checked:
        """Return the checked result; the user's objects in it may raise any exception during the check."""
        where = self._where(method)
        try:
            return check(value, where, *args)
        except EnvResultError:
            raise
        except (Exception, SystemExit) as error:
            raise EnvResultError(f"{where} returned a {type(value).__name__} that cannot be read: {said(error)}") from error

    async def _method(self, name: str, timeout_s: float, *args: Any) -> Any:
        method = getattr(self._object, name)
        if getattr(method, "__func__", None) in self.defaults:
            return None
        return await self._call(name, functools.partial(method, *args), timeout_s, inspect.iscoroutinefunction(method))

    async def _call(self, name: str, call: Callable[[], Any], timeout_s: float, is_async: bool) -> Any:
        """Have the session's task make a call, and wait for it until its deadline."""
        async with _NO_THREAD if is_async else self._threads:
            if self._server is None or self._server.done():
                self._server = asyncio.create_task(self._serve(), name=f"env {self._class.__name__}")
            loop = asyncio.get_running_loop()
            job = _Job(call, is_async, loop.create_future())
            self._jobs.put_nowait(job)
            timer = loop.call_later(timeout_s, job.expire)
            try:
                result, problem = await job.answer, None
            except _UserError as raised:
                result, problem = None, raised.error
            except asyncio.CancelledError:
                _ = job.answer.cancelled() or job.answer.exception()  # read, so that asyncio does not complain
                await self._interrupt(name, job)
                raise
            except _LateError:
                await self._interrupt(name, job)
                left = "" if is_async else self.abandoned
                raise EnvTimeoutError(f"{self._where(name)} did not return within {timeout_s:g} s{left}") from None
            finally:
                timer.cancel()
        if self._directory is not None:
            self._directory.restore(self._where(name))
        if problem is not None:
            raise _named_error(self._where(name), problem) from problem
        return result

    async def _interrupt(self, name: str, job: _Job) -> None:
        """Cancel the running call; code that ignores cancellation is left behind after a moment."""
        server = self._server
        if server is None:
            return
        server.cancel()
        if not job.is_over:
            job.ended = asyncio.get_running_loop().create_future()
            await asyncio.wait({job.ended}, timeout=CANCEL_GRACE_S)
        if not job.is_over:
            self._server = None
            self._jobs = asyncio.Queue()
            _log.warning("%s ignores cancellation and is left behind", self._where(name))

    async def _serve(self) -> None:
        """Consume calls and answer them, one after another, until cancelled between two of them."""
        jobs = self._jobs
        use_stopwatch(self._stopwatch)
        use_choice(self._limits.sandbox)
        use_servers(self._limits.mcp)
        while True:
            job = await jobs.get()
            try:
                result = job.call() if job.is_async else await self._threads.run(job.call)
                if inspect.isawaitable(result):
                    result = await result
            except BaseException as error:
                _forget_cancellation()
                job.end(None, error if isinstance(error, _UserError) else _UserError(error))
                if isinstance(error, KeyboardInterrupt | GeneratorExit):
                    raise
            else:
                job.end(result, None)
            del job


async def _made(cls: AgentClass) -> Any:
    """An object whose ``__init__`` is a coroutine, as that of agents for OpenRLHF may be."""
    made: Any = object.__new__(cls)
    await cls.__init__(made)
    return made


async def blocked_at(loop: asyncio.AbstractEventLoop, thread: int, wait_s: float = 1.0) -> str:
    """Return where user code keeps an event loop of another thread from going on, with the remedy; empty if nothing does.

    Args:
        loop: The event loop that episodes run on.
        thread: Identifier of its thread.
        wait_s: Time that it has for an answer.
    """
    answer = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop))
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(answer, wait_s)
        return ""
    place = user_code_of(thread)
    return f"{place} blocks the event loop that all episodes share. {GIVE_WAY}" if place else ""


def user_code_of(thread: int, *, imported: bool = False) -> str:
    """Return file, line and text of the user's code that a thread is in; empty if it is in none that is called (or `imported`)."""
    frames = inner_last(sys._current_frames().get(thread))
    here = user_code_of.__code__  # the innermost, where a thread asks about itself
    boundary = (i for i, (code, _) in enumerate(frames) if code.co_filename == __file__ and code is not here)
    begin = next(boundary, 0 if imported else len(frames))
    called = [(code, line) for code, line in frames[begin:] if not code.co_filename.startswith((str(Path(__file__).parents[1]), *_PYTHON))]
    own = [(code, line) for code, line in called if "site-packages" not in code.co_filename] or called
    if not own:
        return ""
    code, line = own[-1]
    text = linecache.getline(code.co_filename, line).strip()
    return f"{Path(code.co_filename).name}, line {line}, in {code.co_qualname}" + (f" (`{text}`)" if text else "")


def _forget_cancellation() -> None:
    """Make this task as good as new, so that time limits and task groups in a later call work."""
    task = asyncio.current_task()
    while task is not None and task.cancelling():
        task.uncancel()


def _named_error(where: str, error: BaseException) -> EnvError:
    if isinstance(error, EnvResultError):  # it says itself who returned what
        text = str(error)
        return EnvResultError(text if " returned " in text else f"{where}: {text}")
    if isinstance(error, RewardError | RemoteError):
        return EnvError(f"{where}: {error}")
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(_PACKAGE) and frames.tb_next is not None:
        frames = frames.tb_next
    shown = traceback.format_exception(type(error), error, frames)
    if len(shown[-1]) > MAX_MESSAGE:
        shown = traceback.format_tb(frames)
    text = "".join(shown).strip().encode(errors="backslashreplace").decode()
    return EnvError(f"{where} raised {said(error)}\n{text[-MAX_TRACEBACK:]}")

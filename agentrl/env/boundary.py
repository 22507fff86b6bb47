"""The one place that calls user code: deadlines, threads, errors named, results checked.

Every method of one episode runs in one asyncio task of its own, so that a cancel scope, a context variable or a
connection opened in `reset` may be closed in `close`; plain ``def`` methods run on daemon threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import linecache
import logging
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from agentrl.core.errors import EnvError, EnvResultError, EnvTimeoutError, NotScoredError, RemoteError, RewardError
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
from agentrl.env.threads import Threads, UserError
from agentrl.env.timing import Stopwatch, use_stopwatch
from agentrl.env.tools.mcp_servers import use_servers
from agentrl.env.user_task import LateError, UserTask

_log = logging.getLogger(__name__)

GIVE_WAY = "Await there, as in `await asyncio.sleep(...)`, or write the method with plain def, which runs on a thread under a time limit."
MAX_TRACEBACK = 4000
_OURS = tuple(str(Path(__file__).parents[1] / name) for name in ("env", "suites"))
"""Folders whose frames a traceback for users leaves out."""
_CALLERS = (str(Path(__file__).with_name("user_task.py")), str(Path(__file__).with_name("threads.py")))
"""Files whose frames call user code."""
_PYTHON = (f"{sysconfig.get_path('stdlib')}/", "<frozen ")

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
        self._file = os.path.basename(source)  # of `Path` this would be the most costly part of a short episode
        self._object: Any = None
        self._stopwatch = Stopwatch()
        # Not a method of this object: a cycle would keep every ended episode until the garbage collector looks at it.
        self._user = UserTask(f"env {cls.__name__}", threads, functools.partial(_prepare, self._stopwatch, limits))

    @property
    def user_task(self) -> asyncio.Task[None] | None:
        """The task that user code runs in, once there was a call."""
        return self._user.task

    async def reset(self, task: Task, seed: int) -> ResetResult:
        """Make the user's object and begin the episode; `EnvError`, `EnvTimeoutError`, `EnvResultError` if user code fails."""
        limit = self._limits.reset_timeout_s
        await self._make(limit)
        value = await self._prepared(await self._method("reset", limit, make_reset_state(task=task, seed=seed)))
        return self._checked("reset", check_reset, value, task.prompt, named_agents(self._class))

    async def _make(self, limit: float) -> None:
        """Make the user's object."""
        self._stopwatch.begin()
        cls = self._class
        inherited = all(getattr(cls, name) is getattr(object, name) for name in ("__init__", "__new__"))
        # Without a constructor of its own an object is made at once, so it takes neither a thread nor the session's task. An abstract class
        # raises, and only `_call` names whose error that is.
        if inherited and not inspect.isabstract(cls):
            self._object = cls()
        elif inspect.iscoroutinefunction(cls.__init__):
            self._object = await self._call("__init__", functools.partial(_made, cls), limit, True)
        else:
            is_async = any(inspect.iscoroutinefunction(getattr(cls, name, None)) for name in ("reset", "step"))
            self._object = await self._call("__init__", cls, limit, is_async)

    async def step(self, state: StepState) -> StepResult:
        """Give the environment one turn of the model; raises as `reset` does."""
        # The lists are copied: a `step` that changes them in place would otherwise seem to hand back what it was given.
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
            await self._user.close()

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
        problem: BaseException | None = None
        try:
            if is_async:
                result = await self._user.call(call, timeout_s, True, self._where(name))
            else:
                async with self._threads:
                    result = await self._user.call(call, timeout_s, False, self._where(name))
        except UserError as raised:
            problem = raised.error
        except LateError:
            left = "" if is_async else self.abandoned
            raise EnvTimeoutError(f"{self._where(name)} did not return within {timeout_s:g} s{left}") from None
        # Before an error is raised, since a method that failed may have changed the directory too.
        if self._directory is not None:
            self._directory.restore(self._where(name))
        if problem is not None:
            raise _named_error(self._where(name), problem) from problem
        return result


def _prepare(stopwatch: Stopwatch, limits: EnvLimits) -> None:
    """Set what user code finds in the context of its task."""
    use_stopwatch(stopwatch)
    use_choice(limits.sandbox)
    use_servers(limits.mcp)


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
    boundary = (i for i, (code, _) in enumerate(frames) if code.co_filename in _CALLERS)
    begin = next(boundary, 0 if imported else len(frames))
    called = [(code, line) for code, line in frames[begin:] if not code.co_filename.startswith((str(Path(__file__).parents[1]), *_PYTHON))]
    own = [(code, line) for code, line in called if "site-packages" not in code.co_filename] or called
    if not own:
        return ""
    code, line = own[-1]
    text = linecache.getline(code.co_filename, line).strip()
    return f"{Path(code.co_filename).name}, line {line}, in {code.co_qualname}" + (f" (`{text}`)" if text else "")


def _named_error(where: str, error: BaseException) -> EnvError:
    if isinstance(error, NotScoredError):
        return error
    if isinstance(error, EnvResultError):  # it says itself who returned what
        text = str(error)
        return EnvResultError(text if " returned " in text else f"{where}: {text}")
    if isinstance(error, RewardError | RemoteError):
        return EnvError(f"{where}: {error}")
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(_OURS) and frames.tb_next is not None:
        frames = frames.tb_next
    shown = traceback.format_exception(type(error), error, frames)
    # The message stands above the traceback, cut. A long one at its end would leave no room for the frames.
    if len(shown[-1]) > MAX_MESSAGE:
        shown = traceback.format_tb(frames)
    text = "".join(shown).strip().encode(errors="backslashreplace").decode()
    return EnvError(f"{where} raised {said(error)}\n{text[-MAX_TRACEBACK:]}")

"""User code that raises, hangs, exits, swallows cancellation or blocks."""

import abc
import asyncio
import contextvars
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from agentrl import AgentInstance, ResetResult, StepResult, StepState, Task
from agentrl.core.errors import EnvError, EnvResultError, EnvTimeoutError
from agentrl.env.boundary import EnvLimits, EnvSession
from agentrl.env.threads import Threads

pytestmark = pytest.mark.anyio

TASK = Task("prompt", label="label")
LIMITS = EnvLimits(reset_timeout_s=0.2, step_timeout_s=0.2, close_timeout_s=0.2)


def session(cls: type[Any], threads: int = 4, limits: EnvLimits = LIMITS) -> EnvSession:
    return EnvSession(cls, "/somewhere/file.py", Threads(threads), limits)


async def one_step(cls: type[Any], **state: Any) -> StepResult:
    env = session(cls)
    try:
        await env.reset(TASK, 7)
        return await env.step(StepState(action_text="hi", label="label", **state))
    finally:
        await env.close()


def sync_env(step: Callable[[Any], Any]) -> type[AgentInstance]:
    return type("Env", (AgentInstance,), {"step": lambda self, state: step(state)})


def async_env(step: Callable[[Any], Any]) -> type[AgentInstance]:
    async def run(self: AgentInstance, state: Any) -> Any:
        return await step(state)

    return type("Env", (AgentInstance,), {"step": run})


async def test_sync_and_async_methods_are_called_alike() -> None:
    async def step(state: Any) -> Any:
        return {"rewards": state["action_text"] == "hi", "done": True}

    assert (await one_step(async_env(step))).reward == 1.0
    assert (await one_step(sync_env(lambda state: StepResult(2.0, terminated=True)))).reward == 2.0


async def test_reset_is_given_the_prompt_the_label_and_the_seed() -> None:
    seen = {}

    class Env(AgentInstance):
        def reset(self, state: Any) -> ResetResult:
            seen.update(state, typed=(state.observation, state.label, state.seed, state.task))
            return ResetResult("go")

    env = session(Env)
    result = await env.reset(TASK, 7)
    await env.close()
    assert result.observation == ({"role": "user", "content": "go"},)
    assert seen["typed"] == ("prompt", "label", 7, TASK)
    assert seen["observation"] == "prompt"


async def test_an_exception_names_file_and_method_and_keeps_its_traceback() -> None:
    def step(state: Any) -> Any:
        return {}["missing"]

    with pytest.raises(EnvError) as caught:
        await one_step(sync_env(step))
    text = str(caught.value)
    assert text.startswith("file.py: Env.step raised KeyError: 'missing'\n")
    assert 'return {}["missing"]' in text
    assert "env/boundary.py" not in text.replace("unit/env", "")


@pytest.mark.parametrize("error", [SystemExit(3), StopIteration(), asyncio.CancelledError(), BaseExceptionGroup("g", [SystemExit()])])
@pytest.mark.parametrize("make", [sync_env, async_env])
async def test_exceptions_that_would_end_a_loop_end_only_the_call(error: BaseException, make: Any) -> None:
    def step(state: Any) -> Any:
        raise error

    with pytest.raises(EnvError, match=r"Env\.step raised"):
        await one_step(make(step))


async def test_a_failing_constructor_is_an_environment_error() -> None:
    class Env(AgentInstance):
        def __init__(self) -> None:
            raise OSError("no display")

    with pytest.raises(EnvError, match=r"Env\.__init__ raised OSError: no display"):
        await one_step(Env)


async def test_an_unusable_result_names_the_method() -> None:
    with pytest.raises(EnvResultError, match=r"file.py: Env.step returned reward = nan"):
        await one_step(sync_env(lambda state: StepResult(float("nan"), terminated=True)))


async def test_a_coroutine_is_cancelled_at_its_deadline() -> None:
    ended = []

    async def step(state: Any) -> Any:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    start = time.monotonic()
    with pytest.raises(EnvTimeoutError, match=r"Env.step did not return within 0.2 s"):
        await one_step(async_env(step))
    assert time.monotonic() - start < 1.0
    assert ended == [True]


async def test_a_coroutine_that_ignores_cancellation_is_left_behind() -> None:
    release = asyncio.Event()
    closed = []

    class Env(AgentInstance):
        async def step(self, state: Any) -> Any:
            while not release.is_set():
                try:
                    await release.wait()
                except asyncio.CancelledError:
                    continue

        async def close(self) -> None:
            closed.append(True)

    start = time.monotonic()
    with pytest.raises(EnvTimeoutError):
        await one_step(Env)
    assert time.monotonic() - start < 0.2 + 1.5
    assert closed == [True]
    release.set()


async def test_a_blocked_thread_is_left_behind_and_gives_its_place_back() -> None:
    release = threading.Event()
    closed = []

    class Env(AgentInstance):
        def step(self, state: Any) -> Any:
            release.wait(20)

        def close(self) -> None:
            closed.append(True)

    shared = Threads(1)
    for _ in range(3):
        env = EnvSession(Env, "file.py", shared, LIMITS)
        await env.reset(TASK, 0)
        with pytest.raises(EnvTimeoutError, match="its thread cannot be ended"):
            await env.step(StepState())
        await env.close()
    assert closed == [True] * 3
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "agentrl-env")
    release.set()


async def test_no_more_threads_than_allowed_run_at_once() -> None:
    running, peak = 0, 0
    lock = threading.Lock()

    def step(state: Any) -> StepResult:
        nonlocal running, peak
        with lock:
            running += 1
            peak = max(peak, running)
        time.sleep(0.02)
        with lock:
            running -= 1
        return StepResult(1.0, terminated=True)

    shared = Threads(2)
    sessions = [EnvSession(sync_env(step), "file.py", shared, LIMITS) for _ in range(8)]
    for env in sessions:
        await env.reset(TASK, 0)
    await asyncio.gather(*(env.step(StepState()) for env in sessions))
    await asyncio.gather(*(env.close() for env in sessions))
    assert peak == 2


async def test_close_is_called_once_after_a_failure_and_its_own_failure_is_only_logged(caplog: pytest.LogCaptureFixture) -> None:
    class Env(AgentInstance):
        def step(self, state: Any) -> Any:
            raise ValueError("first")

        def close(self) -> None:
            raise ValueError("second")

    with pytest.raises(EnvError, match="first"):
        await one_step(Env)
    assert "Env.close raised ValueError: second" in caplog.text


async def test_cancelling_the_caller_cancels_the_call() -> None:
    ended = asyncio.Event()

    async def step(state: Any) -> Any:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    before = asyncio.all_tasks()
    caller = asyncio.create_task(one_step(async_env(step)))
    await asyncio.sleep(0.05)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert ended.is_set()
    assert asyncio.all_tasks() == before


async def test_all_methods_of_an_episode_share_a_task_and_its_context() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable")
    tasks = []

    class Env(AgentInstance):
        async def reset(self, state: Any) -> None:
            variable.set("set in reset")
            self.limit = asyncio.timeout(30)
            await self.limit.__aenter__()
            tasks.append(asyncio.current_task())

        async def step(self, state: Any) -> StepResult:
            tasks.append(asyncio.current_task())
            assert variable.get() == "set in reset"
            await asyncio.sleep(60)
            return StepResult()

        async def close(self) -> None:
            await self.limit.__aexit__(None, None, None)
            tasks.append(asyncio.current_task())

    with pytest.raises(EnvTimeoutError):
        await one_step(Env)
    assert len(tasks) == 3
    assert len(set(tasks)) == 1


async def test_threads_are_used_again_and_end_with_their_owner() -> None:
    used = set()

    def step(state: Any) -> StepResult:
        used.add(threading.current_thread())
        return StepResult(1.0, terminated=True)

    shared = Threads(4)
    for _ in range(5):
        env = EnvSession(sync_env(step), "file.py", shared, LIMITS)
        await env.reset(TASK, 0)
        await env.step(StepState())
        await env.close()
    assert len(used) == 1
    shared.close()
    (thread,) = used
    thread.join(5)
    assert not thread.is_alive()


async def test_an_abstract_class_is_an_environment_error() -> None:
    class Env(AgentInstance, abc.ABC):
        @abc.abstractmethod
        def missing(self) -> None: ...

    with pytest.raises(EnvError, match=r"Env\.__init__ raised TypeError"):
        await one_step(Env)


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (Mute(), "Mute: (its message cannot be shown)"),
        (ValueError("\ud800"), "ValueError: \\ud800"),
        (ValueError("x" * 10**6), f"ValueError: {'x' * 2000}..."),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (EnvResultError("mine"), "file.py: Env.step: mine"),
    ],
)
async def test_whatever_an_exception_says_becomes_a_short_text(error: BaseException, said: str) -> None:
    def step(state: Any) -> Any:
        raise error

    with pytest.raises(EnvError) as caught:
        await one_step(sync_env(step))
    text = str(caught.value)
    assert text.startswith("file.py: Env.step")
    assert text.splitlines()[0].endswith(said)
    assert len(text.encode()) < 7000


class Evil(dict[str, Any]):
    def __iter__(self) -> Any:
        raise RuntimeError("not now")


class Quits:
    def item(self) -> float:
        raise SystemExit(3)


class Endless(str):
    __slots__ = ()

    def __len__(self) -> int:
        raise RecursionError("too deep")


@pytest.mark.parametrize(
    ("value", "kind", "said"),
    [
        (Evil(rewards=1.0), "Evil", "RuntimeError: not now"),
        (StepResult(Quits(), terminated=True), "StepResult", "SystemExit: 3"),  # type: ignore[arg-type]
        (StepResult(1.0, Endless("x")), "StepResult", "RecursionError: too deep"),
        (StepResult(1.0, terminated=True, info=Evil(a=1.0)), "StepResult", "RuntimeError: not now"),
    ],
)
async def test_a_result_whose_parts_raise_when_looked_at_is_unusable(value: Any, kind: str, said: str) -> None:
    with pytest.raises(EnvResultError, match=f"file.py: Env.step returned a {kind} that cannot be read: {said}"):
        await one_step(sync_env(lambda state: value))

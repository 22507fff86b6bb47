"""The task of an episode's user code: calls one after another, also after one that does not end, and its own end."""

from __future__ import annotations

import asyncio
import gc
import time
from functools import partial
from typing import Any

import pytest

from agentrl.env import user_task
from agentrl.env.threads import Threads, UserError
from agentrl.env.user_task import LateError, UserTask

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def make() -> UserTask:
    return UserTask("user code", Threads(1), lambda: None)


async def settle() -> None:
    for _ in range(6):
        await asyncio.sleep(0)


async def who() -> Any:
    await asyncio.sleep(0)
    return asyncio.current_task()


async def ignore_cancellation(until: asyncio.Event) -> None:
    while not until.is_set():
        try:
            await until.wait()
        except asyncio.CancelledError:
            continue


async def test_calls_that_come_at_once_are_made_one_after_another() -> None:
    user, seen = make(), list[str]()

    async def call(name: str) -> str:
        seen.append(f"{name} begins")
        await asyncio.sleep(0)
        seen.append(f"{name} ends")
        return name

    assert await user.call(who, 1.0, True, "reset") is user.task
    await settle()
    assert await asyncio.gather(*(user.call(lambda name=name: call(name), 1.0, True, "step") for name in "abc")) == ["a", "b", "c"]
    assert seen == [f"{name} {what}" for name in "abc" for what in ("begins", "ends")]
    await user.close()


async def test_it_ends_at_once_between_two_calls_and_is_not_cancelled() -> None:
    user = make()
    await user.close()  # there was no call
    await user.call(who, 1.0, True, "step")
    task = user.task
    await user.close()
    assert await user.call(who, 1.0, True, "step") is user.task  # it can be used again
    assert task is not None
    assert task.done()
    assert not task.cancelled()
    await user.close()
    await user.close()


async def test_a_call_that_comes_just_before_the_end_is_made() -> None:
    user = make()
    answered, ended = asyncio.create_task(user.call(who, 2.0, True, "step")), asyncio.create_task(user.close())
    task = await answered
    await ended
    await settle()
    assert task.done()
    assert user.task is None


async def test_only_a_call_that_waits_has_a_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    user, timers, handles = make(), list[float](), list[asyncio.TimerHandle]()
    loop = asyncio.get_running_loop()
    call_at = loop.call_at

    def noted(when: float, *given: Any, **named: Any) -> asyncio.TimerHandle:
        timers.append(when - loop.time())
        handles.append(call_at(when, *given, **named))
        return handles[-1]

    monkeypatch.setattr(loop, "call_at", noted)

    async def answer() -> str:
        return "at once"

    assert [await user.call(answer, 5.0, True, "step") for _ in range(2)] == ["at once"] * 2
    assert timers == []
    await user.call(who, 5.0, True, "step")
    assert timers == [pytest.approx(5.0, abs=0.5)]
    assert handles[0].cancelled()  # it would keep the result until then
    with pytest.raises(LateError):
        await user.call(asyncio.Event().wait, 0.05, True, "step")
    assert timers[1] == pytest.approx(0.05, abs=0.04)
    assert await user.call(answer, 5.0, True, "step") == "at once"
    await user.close()


@pytest.mark.parametrize("rounds", [1, 2, 3])
@pytest.mark.parametrize("fails", [False, True])
async def test_a_caller_may_be_cancelled_at_any_moment(rounds: int, fails: bool, caplog: pytest.LogCaptureFixture) -> None:
    user, seen = make(), list[str]()

    async def call() -> None:
        try:
            await asyncio.sleep(5.0)
        finally:
            seen.append("cancelled")
            if fails:
                raise ValueError("its own")

    running = asyncio.create_task(user.call(call, 9.0, True, "step"))
    for _ in range(rounds):
        await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert seen == ["cancelled"]
    assert await user.call(who, 1.0, True, "close") is user.task  # nothing is left of it
    await user.close()
    await settle()
    gc.collect()
    assert not caplog.records


async def test_what_a_call_raised_is_not_complained_of_where_its_caller_was_cancelled(caplog: pytest.LogCaptureFixture) -> None:
    user = make()

    async def call() -> None:
        running.cancel()  # before the caller has looked whether it is over
        raise ValueError("its own")

    running = asyncio.create_task(user.call(call, 9.0, True, "step"))
    with pytest.raises(asyncio.CancelledError):
        await running
    await user.close()
    await settle()
    gc.collect()
    assert not caplog.records


async def test_its_end_waits_for_what_a_call_does_when_it_is_cancelled() -> None:
    user, seen = make(), list[str]()

    async def call() -> None:
        try:
            await asyncio.sleep(9)
        finally:
            await asyncio.sleep(0.05)
            seen.append("closed a connection")

    running = asyncio.create_task(user.call(call, 5.0, True, "step"))
    await settle()
    task, begin = user.task, time.perf_counter()
    await user.close()
    assert seen == ["closed a connection"]
    assert task is not None
    assert task.done()
    assert time.perf_counter() - begin < 0.9  # it does not wait for another call
    with pytest.raises(UserError):
        await running


async def test_it_can_be_used_again_where_its_last_call_ignores_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_task, "CANCEL_GRACE_S", 0.05)
    user, release = make(), asyncio.Event()
    stubborn = partial(ignore_cancellation, release)

    running = asyncio.create_task(user.call(stubborn, 5.0, True, "step"))
    await settle()
    await user.close()
    assert await user.call(who, 1.0, True, "reset") is user.task
    release.set()
    await running
    await user.close()


async def test_a_call_that_is_left_behind_takes_no_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_task, "CANCEL_GRACE_S", 0.05)
    user, release = make(), asyncio.Event()
    stubborn = partial(ignore_cancellation, release)

    with pytest.raises(LateError):
        await user.call(stubborn, 0.02, True, "step")
    assert user.task is None
    first = asyncio.create_task(user.call(lambda: asyncio.sleep(0.05), 1.0, True, "close"))
    await settle()
    release.set()  # it ends after all, and would be free for another call before the present task is
    await settle()
    assert await user.call(who, 1.0, True, "close") is user.task
    await first
    await user.close()

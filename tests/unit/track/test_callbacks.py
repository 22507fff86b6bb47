"""Callbacks of the user: checked before a run, called in order in one thread or in the event loop, timed, their errors named."""

from __future__ import annotations

import asyncio
import logging
import pickle
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl.core.callbacks import METHODS, Callback, CheckpointWritten, Event, RunBegin, RunEnd, StepEnd
from agentrl.core.errors import CallbackError, ConfigError
from agentrl.track.callbacks import UserCallbacks, check_callback, load_callbacks

BEGIN = RunBegin(config={}, run_dir=Path("run"), resumed=False, step=0)
END = RunEnd(status="finished", summary={})


def step(number: int = 1, **metrics: float) -> StepEnd:
    return StepEnd(step=number, metrics={"reward/mean": 0.5, "time/step_s": 10.0, **metrics})


def load(folder: Path, source: str, name: str = "Mine") -> list[type[Callback]]:
    (folder / "callback.py").write_text("from agentrl import Callback\n\n" + source)
    return load_callbacks([f"{folder / 'callback.py'}:{name}"])


def test_a_class_of_a_file_is_loaded_once(tmp_path: Path) -> None:
    source = "class Mine(Callback):\n    def on_step_end(self, event):\n        return None\n"
    (cls,) = load(tmp_path, source)
    assert issubclass(cls, Callback)
    spec = f"{tmp_path / 'callback.py'}:Mine"
    assert [each.__name__ for each in load_callbacks([spec, "", spec])] == ["Mine"]


def test_a_class_with_methods_of_a_callback_need_not_inherit(tmp_path: Path) -> None:
    (cls,) = load(tmp_path, "class Mine:\n    async def on_checkpoint(self, event):\n        pass\n")
    assert cls.__name__ == "Mine"


REFUSED = {
    "def Mine(): pass": "is a function, not a class. Name a class that inherits from agentrl.Callback",
    "class Mine(Callback):\n    def on_step_ends(self, event): pass": "has a method on_step_ends.*Did you mean on_step_end?",
    "class Mine(Callback):\n    def on_xyz(self, event): pass": "has a method on_xyz.*There are on_run_begin, on_step_end,",
    "class Mine(Callback):\n    def step(self, event): pass": "no method of a callback. Define one or more of on_run_begin",
    "class Mine(Callback):\n    def on_step_end(self): pass": r"Mine.on_step_end must take one argument, the event: too many",
    "class Mine(Callback):\n    def on_step_end(self, step, metrics): pass": r"must take one argument, the event: missing.*'metrics'",
    "class Mine(Callback):\n    def __init__(self, path): pass\n    def on_metrics(self, e): pass": "must work without arguments.*'path'",
    "class Other(Callback): pass": "there is no 'Mine'",
    "raise ValueError('broken')": r"importing it raised ValueError: broken \(.*callback.py, line 3\)",
}


@pytest.mark.parametrize(("source", "told"), REFUSED.items())
def test_what_cannot_be_a_callback_is_named_before_a_run(tmp_path: Path, source: str, told: str) -> None:
    with pytest.raises(ConfigError, match=rf"--callback = .*callback.py:Mine'.*{told}"):
        load(tmp_path, source)


def test_every_event_has_a_method_of_the_base_class() -> None:
    assert {name for name in vars(Callback) if name.startswith("on_")} == set(METHODS.values())
    check_callback(type("All", (Callback,), {name: lambda self, event: None for name in METHODS.values()}), "All")


class Order(Callback):
    """Notes in which thread each method runs."""

    log: list[tuple[str, str, str]]

    def __init__(self) -> None:
        self.log.append((type(self).__name__, "__init__", threading.current_thread().name))

    def on_run_begin(self, event: RunBegin) -> None:
        time.sleep(0.01)
        self.log.append((type(self).__name__, "begin", threading.current_thread().name))

    async def on_step_end(self, event: StepEnd) -> None:
        await asyncio.sleep(0.01)
        self.log.append((type(self).__name__, "step", threading.current_thread().name))


@pytest.mark.anyio
async def test_plain_methods_share_a_thread_and_events_come_one_at_a_time() -> None:
    log: list[tuple[str, str, str]] = []
    first, second = type("First", (Order,), {"log": log}), type("Second", (Order,), {"log": log})
    users = UserCallbacks([first, second])
    begin = asyncio.ensure_future(users.tell(BEGIN))
    await asyncio.sleep(0)
    await asyncio.gather(begin, users.tell(step(1)), users.tell(step(2)))
    here, other = threading.current_thread().name, "agentrl-callbacks"
    assert log == [
        *((name, what, other) for name in ("First", "Second") for what in ("__init__", "begin")),
        *((name, "step", here) for _ in range(2) for name in ("First", "Second")),
    ]
    assert {name: times["calls"] for name, times in users.times().items()} == {"First": 4, "Second": 4}


@pytest.mark.anyio
async def test_an_event_that_nobody_follows_makes_no_object() -> None:
    class Never(Callback):
        def __init__(self) -> None:
            raise AssertionError

        def on_run_end(self, event: RunEnd) -> None: ...

    assert await UserCallbacks([Never]).tell(step()) == {}


@pytest.mark.anyio
async def test_added_metrics_become_numbers_and_later_callbacks_see_them() -> None:
    seen: list[Any] = []

    class First(Callback):
        def on_step_end(self, event: StepEnd) -> dict[str, Any]:
            return {"my/a": np.float32(0.5), "my/b": 2, "my/c": True, "my/d": np.ones((1, 1))}

    class Second(Callback):
        async def on_step_end(self, event: StepEnd) -> dict[str, float]:
            seen.append(event.metrics["my/a"])
            return {"my/e": event.metrics["my/b"] + 1}

    added = await UserCallbacks([First, Second()]).tell(step())
    assert added == {"my/a": 0.5, "my/b": 2.0, "my/c": 1.0, "my/d": 1.0, "my/e": 3.0}
    assert (seen, {type(value) for value in added.values()}) == ([0.5], {float})


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("returned", "told"),
    [
        (0.5, r"Adds.on_step_end returned 0.5: must be a mapping"),
        ({"reward/mean": 1.0}, r"the metric 'reward/mean', which is there already. Choose another name, as 'my/reward/mean'"),
        ({"score/mean": 1.0}, r"'score/mean', which is there already"),
        ({"step": 1.0}, r"'step', which is there already"),
        ({"my/loss": float("nan")}, r"my/loss = nan: must be a finite number"),
        ({"my/loss": "0.5"}, r"my/loss = '0.5': must be a finite number"),
        ({"my/loss": np.ones(2)}, r"my/loss = .*: must be a finite number"),
        ({"": 1.0}, r"a metric named ''"),
        ({3: 1.0}, r"a metric named 3"),
    ],
)
async def test_metrics_that_cannot_be_used_end_the_run(returned: Any, told: str) -> None:
    class Adds(Callback):
        def on_step_end(self, event: StepEnd) -> Any:
            return returned

    with pytest.raises(CallbackError, match=told):
        await UserCallbacks([Adds]).tell(step())


def helper(values: dict[str, float]) -> float:
    return values["no such"]


class Raises(Callback):
    def on_run_begin(self, event: RunBegin) -> None:
        helper({})

    async def on_step_end(self, event: StepEnd) -> None:
        int("x")

    def on_checkpoint(self, event: CheckpointWritten) -> None:
        raise SystemExit(3)

    async def on_run_end(self, event: RunEnd) -> None:
        raise asyncio.CancelledError


class RaisesWhenMade(Raises):
    def __init__(self) -> None:
        raise StopIteration("made")


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("cls", "event", "told"),
    [
        (Raises, BEGIN, r"callback Raises.on_run_begin raised KeyError: 'no such' \(test_callbacks.py, line \d+, in helper\)"),
        (Raises, step(), r"callback Raises.on_step_end raised ValueError: .* \(test_callbacks.py, line \d+, in on_step_end\)"),
        (Raises, CheckpointWritten(step=1, path=Path()), r"callback Raises.on_checkpoint raised SystemExit: 3"),
        (Raises, END, r"callback Raises.on_run_end cancelled the task that called it"),
        (
            RaisesWhenMade,
            BEGIN,
            r"callback RaisesWhenMade.__init__ raised StopIteration: made \(test_callbacks.py, line \d+, in __init__\)",
        ),
    ],
)
async def test_an_exception_is_named_with_the_line_of_the_user(cls: type[Callback], event: Event, told: str) -> None:
    with pytest.raises(CallbackError, match=told) as caught:
        await asyncio.wait_for(UserCallbacks([cls]).tell(event), 10)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.anyio
@pytest.mark.parametrize("kind", ["thread", "loop", "stubborn"])
async def test_a_call_that_does_not_return_ends_the_run_at_its_deadline(kind: str) -> None:
    free, told = threading.Event(), []
    stuck: list[asyncio.Task[Any]] = []

    class Hangs(Callback):
        def on_step_end(self, event: StepEnd) -> None:
            free.wait(20)

        def on_run_end(self, event: RunEnd) -> None:
            told.append("hangs")

    class HangsAsync(Hangs):
        async def on_step_end(self, event: StepEnd) -> None:  # type: ignore[override]
            stuck.extend(filter(None, [asyncio.current_task()]))
            while True:
                try:
                    await asyncio.sleep(3600)
                except asyncio.CancelledError:
                    if kind == "loop" or free.is_set():
                        raise

    class Other(Callback):
        async def on_run_end(self, event: RunEnd) -> None:
            told.append("other")

    users = UserCallbacks([Hangs if kind == "thread" else HangsAsync, Other], timeout_s=0.1)
    begin = time.monotonic()
    try:
        with pytest.raises(CallbackError, match=r"on_step_end did not return within 0.1 s. .*leave the work to a thread"):
            await users.tell(step())
        await users.tell(END)
        assert told == ["other"]  # the one that hangs is left alone
        assert time.monotonic() - begin < 5.0
    finally:
        free.set()
        for task in stuck:
            task.cancel()


@pytest.mark.anyio
async def test_a_cancelled_run_does_not_wait_for_a_callback_and_the_next_call_comes_after_it() -> None:
    free, log = threading.Event(), []

    class Slow(Callback):
        def on_step_end(self, event: StepEnd) -> None:
            free.wait(20)
            log.append("step")

        def on_run_end(self, event: RunEnd) -> None:
            log.append("end")

    users = UserCallbacks([Slow])
    telling = asyncio.ensure_future(users.tell(step()))
    await asyncio.sleep(0.1)
    telling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await telling
    ending = asyncio.ensure_future(users.tell(END))
    await asyncio.sleep(0.05)
    free.set()
    await ending
    assert log == ["step", "end"]


class Ticks:
    """A clock that a callback moves."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.anyio
async def test_a_slow_callback_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    clock = Ticks()

    class Slow(Callback):
        def on_run_begin(self, event: RunBegin) -> None:
            clock.now += 0.9

        def on_step_end(self, event: StepEnd) -> None:
            clock.now += 2.5

    users = UserCallbacks([Slow], clock=clock)
    with caplog.at_level(logging.WARNING):
        for event in (BEGIN, step(1), step(2)):
            await users.tell(event)
    assert [record.getMessage() for record in caplog.records] == ["callback Slow.on_step_end took 2.5 s, for which the run waited"]
    assert users.times()["Slow"] == {"calls": 4, "seconds": pytest.approx(5.9)}


@pytest.mark.anyio
async def test_many_short_calls_that_are_much_of_a_step_are_named(caplog: pytest.LogCaptureFixture) -> None:
    clock = Ticks()

    class Busy(Callback):
        def on_step_end(self, event: StepEnd) -> None:
            clock.now += 0.9

        async def on_checkpoint(self, event: CheckpointWritten) -> None:
            clock.now += 0.4

    users = UserCallbacks([Busy], clock=clock)
    with caplog.at_level(logging.WARNING):
        await users.tell(step(1))  # 0.9 of 10 s
        for _ in range(3):
            await users.tell(CheckpointWritten(step=1, path=Path()))
        await users.tell(step(2))
        await users.tell(step(3, **{"time/step_s": 0.1}))
    text = "callback Busy took 2.1 s of the 10.0 s of step 2, most of it in on_checkpoint"
    assert [record.getMessage() for record in caplog.records] == [text]


@pytest.mark.anyio
async def test_the_end_is_asked_for_after_all_callbacks_were_told() -> None:
    log: list[str] = []

    class First(Callback):
        def on_step_end(self, event: StepEnd) -> None:
            self.stop("enough")

    class Second(Callback):
        async def on_step_end(self, event: StepEnd) -> None:
            log.append("second")
            self.stop("as well")

    users = UserCallbacks([First, Second], ask_stop=log.append)
    await users.tell(step(1))
    await users.tell(step(2))
    assert log == ["second", "First: enough", "second"]

"""One dispatcher that feeds sinks, recorder, display, summary and the callbacks of the user."""

import asyncio
import io
import json
import re

import pytest
from rich.console import Console

from agentrl.config.mapping import to_json
from agentrl.config.schema import TrainConfig
from agentrl.config.sections import changed
from agentrl.core.callbacks import Callback, RunBegin, StepEnd
from agentrl.core.errors import CallbackError, StorageError
from agentrl.core.types import Status
from agentrl.resolve.parts import track_plan
from agentrl.track.sinks import JsonlMetrics
from agentrl.track.tracker import open_tracker
from tests.unit.track.events import judged

pytestmark = pytest.mark.anyio


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=100)


def config(**settings) -> TrainConfig:
    return changed(TrainConfig(), num_steps=2, **settings)


def rows_of(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


async def test_a_run_leaves_its_files_and_prints_its_summary(tmp_path, console, metrics, group):
    run_dir = tmp_path / "runs" / "one"
    tracker = open_tracker(track_plan(config()), run_dir, title="calculator", console=console)
    await tracker.begin(json.loads(to_json(config())))
    tracker.on_stage("loading engine")
    await tracker.notify(judged(group(Status.FINISHED, records=({"reward": 1.0},))))
    await tracker.notify(StepEnd(step=1, metrics=metrics(1)))
    await tracker.notify(StepEnd(step=2, metrics=metrics(2)))
    summary = await tracker.finish(ledger={"ledger/submitted": 8, "ledger/trained": 8}, agent="envs/calculator.py")
    assert sorted(path.name for path in run_dir.iterdir()) == [
        *("groups.jsonl", "launches.jsonl", "metrics.jsonl", "steps.jsonl", "summary.json", "tensorboard"),
        *("trajectories.index.jsonl", "trajectories.jsonl"),
    ]
    assert [row["step"] for row in rows_of(run_dir)] == [1, 2]
    record = json.loads((run_dir / "trajectories.jsonl").read_text())
    assert (record["reward"], record["group_s"], sorted(record)) == (1.0, 0.1, ["ended_s", "group_s", "reward"])
    assert json.loads((run_dir / "summary.json").read_text()) == summary
    assert (summary["ledger"], summary["callbacks"], summary["stop_reason"]) == ({"submitted": 8, "trained": 8}, {}, None)
    text = console.file.getvalue()
    assert text.index("loading engine") < text.index("step 2/2") < text.index("2 steps in")


async def test_what_is_switched_off_is_not_written(tmp_path, console, metrics, group):
    tracker = open_tracker(track_plan(config(record="none", tensorboard=False)), tmp_path, title="t", console=console)
    await tracker.notify(judged(group(records=({"reward": 1.0},))))
    await tracker.notify(StepEnd(step=1, metrics=metrics(1)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["groups.jsonl", "metrics.jsonl", "steps.jsonl"]
    await tracker.finish(status="failed")


async def test_every_file_is_closed_even_if_one_cannot_be(tmp_path, console, metrics):
    class Broken(Callback):
        def on_run_end(self, event):
            raise OSError("disk full")

    tracker = open_tracker(track_plan(config()), tmp_path, title="t", console=console)
    tracker._builtin = (*tracker._builtin, Broken())
    with pytest.raises(OSError, match="disk full"):
        await tracker.finish(status="failed")
    with pytest.raises(ValueError, match="closed file"):
        await tracker.notify(StepEnd(step=1, metrics=metrics(1)))


class Everything(Callback):
    """Keeps what it is told, adds a metric, and looks into the run directory."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, object]] = []

    def on_run_begin(self, event: RunBegin) -> None:
        self.run_dir = event.run_dir
        self.seen.append(("begin", (event.config["training"]["num_steps"], event.resumed, event.step)))

    def on_step_end(self, event):
        self.seen.append(("step", "my/half" in event.metrics))
        return {"my/half": event.metrics["reward/mean"] / 2}

    async def on_metrics(self, event):
        self.seen.append(("row", rows_of(self.run_dir)[-1]["my/half"] == event.metrics["my/half"]))

    def on_group_judged(self, event):
        assert (event.kept, event.task_id, event.rewards, event.scores) == (True, "t0", (1.0, None), (None, None))
        self.seen.append(("group", [str(status) for status in event.statuses]))

    def on_run_end(self, event):
        written = json.loads((self.run_dir / "summary.json").read_text())
        self.seen.append(("end", (event.status, written["steps"] == event.summary["steps"])))


async def test_a_callback_of_the_user_sees_the_run_and_its_metrics_are_everywhere(tmp_path, console, metrics, group):
    callback = Everything()
    tracker = open_tracker(track_plan(config()), tmp_path, title="t", console=console, callbacks=[callback])
    earlier = [{"step": 0, "eval/reward": 0.0}, {**metrics(1), "mismatch/max": None}]
    await tracker.begin(json.loads(to_json(config())), earlier)
    await tracker.notify(judged(group(Status.FINISHED, Status.TIMEOUT)))
    await tracker.notify(StepEnd(step=2, metrics=metrics(2)))
    summary = await tracker.finish()
    assert callback.seen == [
        ("begin", (2, True, 1)),
        ("group", ["finished", "timeout"]),
        ("step", False),
        ("row", True),
        ("end", ("finished", True)),
    ]
    assert rows_of(tmp_path)[-1]["my/half"] == 0.25
    assert (summary["steps"], summary["callbacks"]["Everything"]["calls"]) == (2, 4)  # the call at the end is not in it yet
    assert re.search(r"callback     Everything: 4 calls, \d+\.\d s", console.file.getvalue())
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("my/half")] == [(2, 0.25)]


@pytest.mark.parametrize("status", ["finished", "failed", "interrupted", "restarting"])
async def test_an_error_at_the_end_is_raised_only_by_a_run_that_finished(tmp_path, console, metrics, caplog, status):
    told = []

    class First(Callback):
        def on_run_end(self, event):
            raise ValueError("upload failed")

    class Second(Callback):
        def on_run_end(self, event):
            told.append(event.status)

    tracker = open_tracker(track_plan(config()), tmp_path, title="t", console=console, callbacks=[First, Second])
    if status == "finished":
        with pytest.raises(CallbackError, match=r"callback First.on_run_end raised ValueError: upload failed"):
            await tracker.finish(status=status)
    else:
        await tracker.finish(status=status)
        assert "upload failed" in caplog.text
    assert told == [status]
    assert (tmp_path / "summary.json").exists() is (status != "restarting")


async def test_a_full_disk_ends_the_run(tmp_path, console, metrics, monkeypatch):
    def full(self, event):
        raise StorageError("metrics.jsonl cannot be written: no space")

    tracker = open_tracker(track_plan(config()), tmp_path, title="t", console=console)
    monkeypatch.setattr(JsonlMetrics, "on_metrics", full)
    with pytest.raises(StorageError, match="no space"):
        await tracker.notify(StepEnd(step=1, metrics=metrics(1)))
    await tracker.finish(status="failed")


async def test_who_asks_for_the_end_is_named_once(tmp_path, console, metrics):
    asked = []

    class Stops(Callback):
        def on_step_end(self, event):
            self.stop("good enough")

    tracker = open_tracker(track_plan(config()), tmp_path, title="t", console=console, callbacks=[Stops], ask_stop=asked.append)
    for step in (1, 2):
        await tracker.notify(StepEnd(step=step, metrics=metrics(step)))
    assert asked == ["Stops: good enough"]
    summary = await tracker.finish(status="interrupted", stop_reason=asked[0])
    assert json.loads((tmp_path / "summary.json").read_text())["stop_reason"] == summary["stop_reason"] == "Stops: good enough"
    assert "stopped by   Stops: good enough" in console.file.getvalue()


async def test_built_in_callbacks_do_not_yield(tmp_path, console, metrics):
    """So that a run without callbacks of the user takes its turns as ever."""
    tracker = open_tracker(track_plan(config()), tmp_path, title="t", console=console)
    turns = []
    other = asyncio.ensure_future(asyncio.sleep(0))
    other.add_done_callback(lambda task: turns.append("other"))
    await tracker.notify(StepEnd(step=1, metrics=metrics(1)))
    assert turns == []
    await other
    await tracker.finish(status="failed")

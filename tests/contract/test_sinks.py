"""What every metric sink does, built-in ones included: agentrl.testing.check_sink passes for them, and names what is violated."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from agentrl import Callback, MetricsRow, RunBegin, RunEnd
from agentrl.testing import check_sink
from agentrl.track.services import TensorBoard
from agentrl.track.sinks import JsonlMetrics


def test_lines_of_json(tmp_path: Path) -> None:
    runs = iter(range(3))
    check_sink(lambda: JsonlMetrics(tmp_path / f"{next(runs)}.jsonl", ()), read=lambda: rows(tmp_path / "0.jsonl"))


def rows(path: Path) -> list[Mapping[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_tensorboard(tmp_path: Path) -> None:
    runs = iter(range(3))
    check_sink(lambda: TensorBoard(tmp_path / str(next(runs))))


class Kept(Callback):
    """Keeps rows in memory; its subclasses violate something."""

    written: list[dict[str, float]]

    def on_run_begin(self, event: RunBegin) -> None:
        type(self).written = []

    def on_metrics(self, event: MetricsRow) -> Any:
        self.written.append(dict(event.metrics))


def test_a_check_works_inside_a_running_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Kept, "written", [], raising=False)

    async def test() -> None:
        check_sink(Kept, read=lambda: Kept.written)

    asyncio.run(test())


class Forgets(Kept):
    def on_metrics(self, event: MetricsRow) -> Any:
        if event.step:
            super().on_metrics(event)


class Rounds(Kept):
    def on_metrics(self, event: MetricsRow) -> Any:
        self.written.append({name: round(value, 1) for name, value in event.metrics.items()})


class Changes(Kept):
    def on_metrics(self, event: MetricsRow) -> Any:
        event.metrics["mine"] = 1.0  # type: ignore[index]


class Answers(Kept):
    def on_metrics(self, event: MetricsRow) -> Any:
        return len(event.metrics)


class Asynchronous(Kept):
    async def on_metrics(self, event: MetricsRow) -> None:
        pass


class NeedsSteps(Kept):
    def on_run_end(self, event: RunEnd) -> None:
        self.written[-1].clear()


@pytest.mark.filterwarnings("ignore:coroutine")
@pytest.mark.parametrize(
    ("sink", "words"),
    [
        (Forgets, "given 3 rows, and 2 were written"),
        (Rounds, r"eval/score of step 0 is 0.2 where 0.25"),
        (Changes, r"Changes.on_metrics.* raised TypeError"),
        (Answers, r"Answers.on_metrics.* returned 1"),
        (Asynchronous, r"Asynchronous.on_metrics.* is asynchronous"),
        (NeedsSteps, r"NeedsSteps.on_run_end.* raised IndexError"),
        (dict, "dict has no method on_metrics"),
    ],
)
def test_a_violation_is_named(sink: Any, words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        check_sink(sink, read=None if sink is NeedsSteps else lambda: sink.written)

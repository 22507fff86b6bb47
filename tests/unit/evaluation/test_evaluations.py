from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from agentrl.config.mapping import to_json
from agentrl.config.schema import TrainConfig
from agentrl.core.callbacks import EvaluationEnd, MetricsRow, StepEnd
from agentrl.evaluation.assessment import EpisodeOutcome, TaskOutcome, assess
from agentrl.evaluation.report import evaluation_line
from agentrl.track.display import LineDisplay, LiveDisplay
from agentrl.track.jsonl import read_lines
from agentrl.track.sinks import JsonlMetrics, TrajectoryRecorder
from agentrl.track.tracker import RunTracker


def outcome(name: str, *rewards: float, failed: int = 0, score: bool = True) -> TaskOutcome:
    episodes = tuple(EpisodeOutcome(reward=r, score=r if score else None, tokens=10, turns=2, truncated=False) for r in rewards)
    return TaskOutcome(task_id=name, episodes=episodes, failures=("timeout: step: 60 s",) * failed)


def test_one_line_says_figures_intervals_and_failures() -> None:
    line = evaluation_line(assess([outcome("a", 1.0), outcome("b", 0.0), outcome("c", failed=2)]))
    assert line == (
        "reward = score 0.500 (0.000 to 1.000), pass@1 0.333 (0.000 to 1.000); 2 tasks, 1 more failed; "
        "2 episodes failed, most often with timeout: step: 60 s"
    )
    assert evaluation_line(assess([outcome("a", 0.25, score=False)])) == "reward 0.250; 1 task"
    assert evaluation_line(assess([outcome("a", failed=1)])).startswith("nothing measured; 0 tasks, 1 more failed")


def tracker_of(run_dir: Path, stream: io.StringIO) -> RunTracker:
    return RunTracker(
        run_dir,
        sinks=[JsonlMetrics(run_dir / "metrics.jsonl"), TrajectoryRecorder(run_dir / "trajectories.jsonl")],
        display=LineDisplay(2, title="t", stream=stream),
        console=Console(file=stream, width=200),
    )


def ended(step: int, text: str) -> EvaluationEnd:
    return EvaluationEnd(step=step, metrics={}, seconds=1.5, text=text)


@pytest.mark.anyio
async def test_a_run_shows_and_sums_up_its_evaluations(tmp_path: Path, metrics: Callable[..., dict[str, float]]) -> None:
    stream = io.StringIO()
    tracker = tracker_of(tmp_path, stream)
    await tracker.notify(ended(0, "reward 0.250"))
    first = {"eval/tasks": 1.0, "eval/reward": 0.25, "eval/pass@1": 0.0, "eval/reward/hard": 0.1}
    await tracker.notify(MetricsRow(step=0, metrics=first))
    await tracker.notify(StepEnd(step=1, metrics=metrics(1)))
    await tracker.notify(ended(2, "reward = score 0.750, pass@1 0.000; 1 task"))
    last = {"eval/tasks": 1.0, "eval/reward": 0.75, "eval/pass@1": 1.0, "eval/best": 0.75, "eval/best_step": 2.0}
    await tracker.notify(StepEnd(step=2, metrics=metrics(2, **last)))
    (tmp_path / "model").mkdir()
    (tmp_path / "evaluations.jsonl").touch()
    summary = await tracker.finish()
    assert summary["steps"] == 2
    assert f"eval --run {tmp_path} --baseline start" in stream.getvalue()
    assert summary["eval"] == {
        "first": {"step": 0, "reward": 0.25, "pass@1": 0.0},
        "last": {"step": 2, "reward": 0.75, "pass@1": 1.0},
        "best": {"step": 2, "value": 0.75},
    }
    shown = stream.getvalue()
    assert "evaluation of step 2: reward = score 0.750, pass@1 0.000; 1 task" in shown
    assert "evaluation   reward 0.250 to 0.750, pass@1 0.000 to 1.000; steps 0 to 2; best 0.750 after step 2" in shown
    rows = read_lines(tmp_path / "metrics.jsonl")
    assert [(row["step"], row["reward/mean"], row.get("eval/reward")) for row in rows] == [(0, None, 0.25), (1, 0.5, None), (2, 0.5, 0.75)]
    again = tracker_of(tmp_path, io.StringIO())
    await again.begin(json.loads(to_json(TrainConfig())), rows)
    assert (await again.finish())["eval"] == summary["eval"]


@pytest.mark.anyio
async def test_a_run_without_evaluations_says_nothing_of_them(tmp_path: Path, metrics: Callable[..., dict[str, float]]) -> None:
    stream = io.StringIO()
    tracker = tracker_of(tmp_path, stream)
    await tracker.notify(StepEnd(step=1, metrics=metrics(1)))
    assert (await tracker.finish())["eval"] is None
    assert "\nevaluation" not in stream.getvalue()
    json.dumps(json.loads((tmp_path / "summary.json").read_text()))


def test_the_live_display_prints_evaluations_above_itself() -> None:
    stream = io.StringIO()
    display = LiveDisplay(2, title="t", console=Console(file=stream, force_terminal=True, width=100))
    display.on_evaluation_end(ended(5, "reward 0.500; 3 tasks"))
    display.close()
    assert "reward 0.500; 3 tasks" in stream.getvalue()


@pytest.mark.anyio
async def test_a_row_with_the_figures_of_an_earlier_step_counts_for_that_step(
    tmp_path: Path, metrics: Callable[..., dict[str, float]]
) -> None:
    tracker = tracker_of(tmp_path, io.StringIO())
    figures = {"eval/tasks": 1.0, "eval/reward": 0.75, "eval/step": 1.0, "eval/engines": 1.0}
    await tracker.notify(StepEnd(step=1, metrics=metrics(1)))
    await tracker.notify(StepEnd(step=2, metrics=metrics(2, **figures)))
    assert (await tracker.finish())["eval"]["last"] == {"step": 1, "reward": 0.75}

"""One observer that feeds sinks, recorder, display and summary."""

import io
import json

import pytest
from rich.console import Console

from agentrl.config.schema import RunConfig, TrackConfig, TrainConfig
from agentrl.core.types import Status
from agentrl.track.tracker import open_tracker


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=100)


def config(**track) -> TrainConfig:
    return TrainConfig(run=RunConfig(num_steps=2), track=TrackConfig(**track))


def test_a_run_leaves_its_files_and_prints_its_summary(tmp_path, console, metrics, group):
    run_dir = tmp_path / "runs" / "one"
    with open_tracker(config(), run_dir, title="calculator", console=console) as tracker:
        tracker.on_stage("loading engine")
        tracker.on_group(group(Status.FINISHED, records=({"reward": 1.0},)))
        tracker.on_step(metrics(1))
        tracker.on_step(metrics(2))
        summary = tracker.finish(ledger={"ledger/submitted": 8, "ledger/trained": 8}, agent="envs/calculator.py")
    assert sorted(path.name for path in run_dir.iterdir()) == ["metrics.jsonl", "summary.json", "tensorboard", "trajectories.jsonl"]
    assert [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()] == [1, 2]
    record = json.loads((run_dir / "trajectories.jsonl").read_text())
    assert (record["reward"], record["group_s"], sorted(record)) == (1.0, 0.1, ["ended_s", "group_s", "reward"])
    assert json.loads((run_dir / "summary.json").read_text()) == summary
    assert summary["ledger"] == {"submitted": 8, "trained": 8}
    text = console.file.getvalue()
    assert text.index("loading engine") < text.index("step 2/2") < text.index("2 steps in")


def test_what_is_switched_off_is_not_written(tmp_path, console, metrics, group):
    with open_tracker(config(record="none", tensorboard=False), tmp_path, title="t", console=console) as tracker:
        tracker.on_group(group(records=({"reward": 1.0},)))
        tracker.on_step(metrics(1))
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_failing_run_closes_its_files(tmp_path, console, metrics):
    tracker = open_tracker(config(), tmp_path, title="t", console=console)
    with pytest.raises(RuntimeError, match="engine died"), tracker:
        raise RuntimeError("engine died")
    with pytest.raises(ValueError, match="closed file"):
        tracker.on_step(metrics(1))

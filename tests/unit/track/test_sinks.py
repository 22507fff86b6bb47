"""Metric sinks."""

import json
import subprocess
import sys

import pytest

from agentrl.core.errors import ConfigError
from agentrl.track.jsonl import PROMISED
from agentrl.track.plan import TrackConfig
from agentrl.track.services import TensorBoard
from agentrl.track.sinks import JsonlMetrics, open_sinks
from tests.unit.track.events import END, row


def test_jsonl_has_one_object_per_step_without_nan(tmp_path):
    sink = JsonlMetrics(tmp_path / "metrics.jsonl")
    sink.on_metrics(row({"step": 1.0, "reward/mean": 0.5, "mismatch/max": float("nan")}))
    sink.on_metrics(row({"step": 2.0, "reward/mean": 0.75}))
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    sink.on_run_end(END)
    assert [(row["step"], row["reward/mean"], row["mismatch/max"]) for row in rows] == [(1, 0.5, None), (2, 0.75, None)]
    assert all(set(row) == set(PROMISED) for row in rows)
    assert isinstance(rows[0]["step"], int)


def test_tensorboard_files_hold_the_scalars(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoard(tmp_path)
    for step in (1, 2):
        sink.on_metrics(row({"step": float(step), "reward/mean": step / 4}))
    sink.on_run_end(END)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5)]
    assert events.Tags()["scalars"] == ["reward/mean"]


@pytest.mark.parametrize("package", ["wandb", "trackio"])
def test_a_service_that_is_not_installed_is_a_config_error(tmp_path, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"--{package}-project = 'mine'.*pip install {package}"):
        open_sinks(tmp_path, TrackConfig(sink=(f"{package}:mine",)), "sample")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("tensorboard", [True, False])
def test_open_sinks_makes_what_is_asked_for(tmp_path, tensorboard):
    sinks = open_sinks(tmp_path, TrackConfig(tensorboard=tensorboard), "sample")
    for sink in sinks:
        sink.on_metrics(row({"step": 1.0, "reward/mean": 1.0}))
        sink.on_run_end(END)
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["reward/mean"] == 1.0
    assert (tmp_path / "tensorboard").is_dir() is tensorboard


def test_writing_metrics_loads_no_heavy_library(tmp_path):
    code = (
        "import sys, pathlib; from agentrl.core.callbacks import MetricsRow\n"
        "from agentrl.track.services import TensorBoard; import agentrl.track.tracker\n"
        f"s = TensorBoard(pathlib.Path({str(tmp_path)!r})); s.on_metrics(MetricsRow(step=1, metrics={{'a': 1.0}}))\n"
        "print([m for m in ('torch', 'ray', 'vllm', 'deepspeed', 'tensorflow', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

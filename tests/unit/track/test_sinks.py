"""Metric sinks."""

import json
import subprocess
import sys
import types

import pytest

from agentrl.core.errors import ConfigError
from agentrl.track import sinks as sinks_module
from agentrl.track.sinks import PROMISED, JsonlSink, MultiSink, TensorBoardSink, WandbSink, open_sinks


class Recorder:
    def __init__(self, fail: bool = False) -> None:
        self.logged, self.closed, self.fail = [], 0, fail

    def log(self, step, metrics):
        self.logged.append((step, dict(metrics)))

    def close(self):
        self.closed += 1
        if self.fail:
            raise OSError("disk full")


def test_jsonl_has_one_object_per_step_without_nan(tmp_path):
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.log(1, {"step": 1.0, "reward/mean": 0.5, "mismatch/max": float("nan")})
    sink.log(2, {"step": 2.0, "reward/mean": 0.75})
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    sink.close()
    assert [(row["step"], row["reward/mean"], row["mismatch/max"]) for row in rows] == [(1, 0.5, None), (2, 0.75, None)]
    assert all(set(row) == set(PROMISED) for row in rows)
    assert isinstance(rows[0]["step"], int)


def test_tensorboard_files_hold_the_scalars(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoardSink(tmp_path)
    for step in (1, 2):
        sink.log(step, {"step": float(step), "reward/mean": step / 4})
    sink.close()
    sink.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5)]
    assert events.Tags()["scalars"] == ["reward/mean"]


def test_wandb_is_given_project_name_and_every_step(tmp_path, monkeypatch):
    run, asked = Recorder(), {}
    run.log = lambda metrics, step: run.logged.append((step, metrics))
    run.finish = run.close
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=lambda **kw: asked.update(kw) or run))
    sink = WandbSink("mine", run_dir=tmp_path / "first", config={"algo": {"gamma": 1.0}})
    sink.log(3, {"reward/mean": 1.0})
    sink.close()
    sink.close()
    assert asked == {"project": "mine", "name": "first", "dir": str(tmp_path / "first"), "config": {"algo": {"gamma": 1.0}}}
    assert (run.logged, run.closed) == ([(3, {"reward/mean": 1.0})], 1)


def test_wandb_that_is_not_installed_is_a_config_error(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"--wandb-project = 'mine'.*pip install wandb"):
        open_sinks(tmp_path, tensorboard=True, wandb_project="mine", config={})
    assert list(tmp_path.iterdir()) == []


def test_multi_sink_tells_all_and_closes_all_even_if_one_fails():
    first, second = Recorder(fail=True), Recorder()
    sink = MultiSink([first, second])
    sink.log(1, {"a": 1.0})
    with pytest.raises(OSError, match="disk full"):
        sink.close()
    assert first.logged == second.logged == [(1, {"a": 1.0})]
    assert (first.closed, second.closed) == (1, 1)


@pytest.mark.parametrize("tensorboard", [True, False])
def test_open_sinks_makes_what_is_asked_for(tmp_path, tensorboard):
    sink = open_sinks(tmp_path, tensorboard=tensorboard, wandb_project="", config={})
    sink.log(1, {"reward/mean": 1.0})
    sink.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["reward/mean"] == 1.0
    assert (tmp_path / "tensorboard").is_dir() is tensorboard


def test_an_opened_sink_is_closed_if_a_later_one_cannot_be_opened(tmp_path, monkeypatch):
    opened = Recorder()

    def broken(directory):
        raise OSError("no space")

    monkeypatch.setattr(sinks_module, "JsonlSink", lambda path: opened)
    monkeypatch.setattr(sinks_module, "TensorBoardSink", broken)
    with pytest.raises(OSError, match="no space"):
        open_sinks(tmp_path, tensorboard=True, wandb_project="", config={})
    assert opened.closed == 1


def test_writing_metrics_loads_no_heavy_library(tmp_path):
    code = (
        "import sys, pathlib; from agentrl.track.sinks import TensorBoardSink; import agentrl.track.tracker\n"
        f"s = TensorBoardSink(pathlib.Path({str(tmp_path)!r})); s.log(1, {{'a': 1.0}}); s.close()\n"
        "print([m for m in ('torch', 'ray', 'vllm', 'deepspeed', 'tensorflow', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

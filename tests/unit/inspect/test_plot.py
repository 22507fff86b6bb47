"""The picture of a run's reward."""

import sys

import pytest

from agentrl.cli.inspect import main
from agentrl.core.callbacks import MetricsRow
from agentrl.core.errors import ConfigError
from agentrl.inspect.export import plot_rewards
from agentrl.track.sinks import JsonlMetrics


@pytest.fixture
def run_dir(tmp_path):
    sink = JsonlMetrics(tmp_path / "metrics.jsonl")
    for step in range(1, 31):
        sink.on_metrics(MetricsRow(step=step, metrics={"reward/mean": float("nan") if step == 4 else step / 30}))
    return tmp_path


def test_the_command_draws_the_steps_that_have_a_reward(run_dir, capsys):
    picture = run_dir / "docs" / "reward.png"
    assert main([str(run_dir), "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "29 steps" in capsys.readouterr().out


def test_a_run_without_rewards_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="has no rewards"):
        plot_rewards([{"step": 1, "reward/mean": None}], tmp_path / "a.png")


def test_an_unknown_ending_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"\.png or \.svg"):
        plot_rewards([{"step": 1, "reward/mean": 0.5}], tmp_path / "a.nothing")


def test_without_matplotlib_the_remedy_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match="pip install matplotlib"):
        plot_rewards([{"step": 1, "reward/mean": 0.5}], tmp_path / "a.png")

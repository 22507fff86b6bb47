"""The picture of a run's reward."""

import sys

import pytest

from agentrl.core.errors import ConfigError
from agentrl.inspect.curve import draw, main, moving_average, read_rewards
from agentrl.track.sinks import JsonlSink


@pytest.fixture
def run_dir(tmp_path, metrics):
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    for step in range(1, 31):
        sink.log(step, metrics(step, reward=float("nan") if step == 4 else step / 30))
    sink.close()
    return tmp_path


def test_rewards_are_read_without_the_missing_ones(run_dir):
    steps, rewards = read_rewards(run_dir)
    assert steps == [1, 2, 3, *range(5, 31)]
    assert rewards[-1] == 1.0


def test_moving_average_looks_back_only():
    assert moving_average([1.0, 3.0, 5.0, 7.0], window=2) == [1.0, 2.0, 4.0, 6.0]


def test_the_command_writes_a_picture(run_dir):
    assert main([str(run_dir), "--out", str(run_dir / "docs" / "reward.png"), "--title", "calculator"]) == 0
    assert (run_dir / "docs" / "reward.png").read_bytes().startswith(b"\x89PNG")


def test_a_directory_without_rewards_is_refused(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert "has no rewards in metrics.jsonl" in capsys.readouterr().err


def test_without_matplotlib_the_remedy_is_named(run_dir, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match="pip install matplotlib"):
        draw(run_dir, run_dir / "a.png")

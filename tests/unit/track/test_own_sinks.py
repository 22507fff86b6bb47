"""Metric sinks of the user: found and checked before a run, beside the built-in ones, with named errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.core.callbacks import MetricsRow, RunBegin, RunEnd
from agentrl.core.errors import CallbackError, ConfigError
from agentrl.resolve.commands import load_config
from agentrl.track.plan import TrackConfig
from agentrl.track.sinks import OwnSink, load_sinks, open_metric_sinks

SOURCE = """
import agentrl

class Seen(agentrl.Callback):
    events = []

    def on_run_begin(self, event):
        self.events.append("begin")

    def on_metrics(self, event):
        self.events.append(event.metrics["loss"])

    def on_run_end(self, event):
        self.events.append(event.status)

class Breaks(agentrl.Callback):
    def __init__(self):
        self.rows = open("/nowhere/rows.csv")

    def on_metrics(self, event): ...

class Ends(agentrl.Callback):
    def on_run_end(self, event): ...

class Later(agentrl.Callback):
    async def on_metrics(self, event): ...

class Typo(agentrl.Callback):
    def on_metric(self, event): ...
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my_sinks.py"
    path.write_text(SOURCE)
    return path


def test_a_sink_is_told_beside_the_others(file: Path, tmp_path: Path) -> None:
    sinks = open_metric_sinks(tmp_path / "run", TrackConfig(tensorboard=False, sink=(f"{file}:Seen", f"{file}:Seen", "")))
    assert len(sinks) == 2
    for sink in sinks:
        sink.on_run_begin(RunBegin(config={}, run_dir=tmp_path, resumed=False, step=0))
        sink.on_metrics(MetricsRow(step=1, metrics={"loss": 0.5}))
        sink.on_run_end(RunEnd(status="finished", summary={}))
    assert load_sinks([f"{file}:Seen"])[0].events == ["begin", 0.5, "finished"]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Ends", "Ends does not take metrics.*on_metrics"),
        ("Later", "Later.on_metrics is asynchronous.*--callback"),
        ("Typo", "Typo has a method on_metric.*Did you mean on_metrics"),
        ("Missing", "there is no 'Missing'"),
    ],
)
def test_a_class_that_cannot_be_a_sink_is_refused_before_a_file_is_made(file: Path, tmp_path: Path, name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"--sink.*{words}"):
        open_metric_sinks(tmp_path / "run", TrackConfig(sink=(f"{file}:{name}",)))
    assert not (tmp_path / "run").exists()


def test_an_error_names_the_sink_its_method_and_the_line(file: Path) -> None:
    (cls,) = load_sinks([f"{file}:Breaks"])
    with pytest.raises(CallbackError, match=r"sink Breaks.__init__ raised FileNotFoundError: .*\(my_sinks.py, line 18"):
        OwnSink(cls).on_metrics(MetricsRow(step=1, metrics={}))


def test_flags_may_be_repeated_and_replace_those_of_a_file(file: Path, tmp_path: Path) -> None:
    env = Path(__file__).parents[3] / "envs" / "arithmetic.py"
    settings = tmp_path / "run.toml"
    settings.write_text(f'[run]\nagent = "{env}"\n[track]\nsink = ["{file}:Ends"]\n')
    config = load_config(["--config", str(settings), "--sink", f"{file}:Seen", "--sink", f"{file}:Breaks"])
    assert config.track.sink == (f"{file}:Seen", f"{file}:Breaks")
    assert load_config(["--config", str(settings)]).track.sink == (f"{file}:Ends",)

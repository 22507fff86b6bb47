"""TensorBoard's files as its own reader sees them, and what Weights & Biases and trackio are given."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2, metadata
from tensorboard.plugins.hparams import metadata as hparams

from agentrl.core.callbacks import RunBegin
from agentrl.core.summaries import GroupSummary
from agentrl.track.glossary import glossary
from agentrl.track.plan import TrackConfig
from agentrl.track.services import EPISODES, MAX_TEXT, ExperimentTracker, SampleEpisodes, TensorBoard, episode_text, flat
from agentrl.track.sinks import open_metric_sinks
from tests.unit.flow.fakes import member
from tests.unit.track.events import END, judged, row

CONFIG = {"algo": {"gamma": 1.0, "off_policy_range": [0.0, 2.0]}, "run": {"agent": "a.py", "debug": False}}
BEGIN = RunBegin(config=CONFIG, run_dir=Path("runs/first"), resumed=False, step=0)


def record(task: str, status: str = "finished", text: str = "4") -> dict[str, Any]:
    return {"task": {"id": task}, "status": status, "reward": 1.0, "turns": [{"prompt_text": "2+2?\nSay.", "text": text}]}


def group(*records: dict[str, Any]) -> Any:
    return judged(GroupSummary(group_id=0, members=(member(1.0),), versions=(0, 0), seconds=1.0, records=records))


def test_an_episode_as_text() -> None:
    assert episode_text(record("sum-2")) == "**sum-2**, reward 1.0, finished\n\nread:\n\n    2+2?\n    Say.\n\nwrote:\n\n    4"
    assert len(episode_text(record("long", text="x" * 9 * MAX_TEXT))) < 1.1 * MAX_TEXT


def test_the_newest_finished_episode_is_shown_at_first_and_every_ten_steps() -> None:
    episodes = SampleEpisodes()
    assert episodes.due(1) is None
    episodes.take(group(record("a"), record("b")))
    episodes.take(group(record("c", status="env_error")))
    assert [episodes.due(step) and "shown" for step in (2, 9)] == [None, None]
    shown = episodes.due(10)
    assert shown is not None
    assert shown["task"]["id"] == "a"
    assert episodes.due(20) is None  # each once


def test_settings_for_a_table() -> None:
    assert dict(flat(CONFIG)) == {"algo/gamma": 1.0, "algo/off_policy_range": "[0.0, 2.0]", "run/agent": "a.py", "run/debug": False}


@pytest.fixture
def events(tmp_path: Path) -> EventAccumulator:
    sink = TensorBoard(tmp_path)
    sink.on_run_begin(BEGIN)
    sink.on_group_judged(group(record("sum-2")))
    for step in (1, 2):
        sink.on_metrics(row({"step": float(step), "reward/mean": step / 4, "entropy": 0.5, "my": 1.0}))
    sink.on_run_end(END)
    return EventAccumulator(str(tmp_path)).Reload()


def test_tensorboard_has_groups_and_descriptions(events: EventAccumulator) -> None:
    assert events.Tags()["scalars"] == ["reward/mean", "policy/entropy", "other/my"]
    assert [(event.step, event.value) for event in events.Scalars("policy/entropy")] == [(1, 0.5), (2, 0.5)]
    known = glossary().find("entropy")
    assert known is not None
    assert events.SummaryMetadata("policy/entropy").summary_description == known.text


def test_tensorboard_shows_the_six_on_a_page_of_their_own(events: EventAccumulator) -> None:
    (event,) = events.Tensors(metadata.CONFIG_SUMMARY_TAG)
    (category,) = layout_pb2.Layout.FromString(event.tensor_proto.string_val[0]).category
    assert [chart.title for chart in category.chart] == list(glossary().watch)
    assert [list(chart.multiline.tag) for chart in category.chart][2] == ["^policy/entropy$"]


def test_tensorboard_has_the_settings_and_an_episode(events: EventAccumulator) -> None:
    content = events.SummaryMetadata(hparams.SESSION_START_INFO_TAG).plugin_data.content
    found = hparams.parse_session_start_info_plugin_data(content).hparams
    assert found["algo/gamma"].number_value == 1.0
    assert found["run/agent"].string_value == "a.py"
    assert events.SummaryMetadata(EPISODES).plugin_data.plugin_name == "text"
    (event,) = events.Tensors(EPISODES)
    assert (event.step, event.tensor_proto.string_val[0].decode()) == (1, episode_text(record("sum-2")))


@pytest.mark.parametrize("package", ["wandb", "trackio"])
def test_a_service_is_given_project_settings_groups_and_episodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    logged, finished, asked, defined = [], [], {}, {}
    run = types.SimpleNamespace(
        log=lambda metrics, step: logged.append((step, metrics)),
        finish=lambda: finished.append(True),
        define_metric=lambda name, summary: defined.update({name: summary}),
    )
    table = lambda columns, data: dict(zip(columns, data[0], strict=True))  # noqa: E731
    monkeypatch.setitem(sys.modules, package, types.SimpleNamespace(init=lambda **kw: asked.update(kw) or run, Table=table))
    *_, sink = open_metric_sinks(tmp_path, TrackConfig(tensorboard=False, sink=(f"{package}:mine",)))
    assert isinstance(sink, ExperimentTracker)
    sink.on_run_begin(BEGIN)
    sink.on_group_judged(group(record("sum-2")))
    sink.on_metrics(row({"step": 1.0, "reward/mean": 1.0, "entropy": 0.5}))
    sink.on_metrics(row({"step": 2.0, "reward/mean": 0.5}))
    sink.on_run_end(END)
    own = package == "wandb"
    assert asked == {"project": "mine", "name": "first", "config": CONFIG, **({"dir": "runs/first"} if own else {})}
    shown = {EPISODES: {"task": "sum-2", "reward": 1.0, "episode": episode_text(record("sum-2"))}} if own else {}
    assert logged == [(1, {"reward/mean": 1.0, "policy/entropy": 0.5, **shown}), (2, {"reward/mean": 0.5})]
    assert list(defined) == ([glossary().grouped(name) for name in glossary().watch] if own else [])
    assert finished == [True]

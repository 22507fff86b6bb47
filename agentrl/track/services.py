"""Built-in callbacks that show a run in TensorBoard, or in a project of Weights & Biases or trackio.

All name metrics alike: those of `agentrl.track.glossary` in groups, the six to watch first, and now and then an episode as text.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from agentrl.core.callbacks import Callback, GroupJudged, MetricsRow, RunBegin, RunEnd
from agentrl.core.errors import ConfigError
from agentrl.track.glossary import glossary

EPISODE_EVERY = 10
"""Steps from one episode that is shown to the next; the first step shows one too."""
MAX_TEXT = 4000
"""Characters of a turn that are shown."""
EPISODES = "episodes/sample"


class SampleEpisodes:
    """Keeps the newest recorded episode that did not fail, until a step shows it."""

    def __init__(self) -> None:
        self._record: Mapping[str, Any] | None = None

    def take(self, event: GroupJudged) -> None:
        """Look at a group."""
        kept = [record for record in event.summary.records if record.get("status") == "finished"]
        self._record = kept[0] if kept else self._record

    def due(self, step: int) -> Mapping[str, Any] | None:
        """Return the record to show with this step, or None."""
        if step != 1 and step % EPISODE_EVERY:
            return None
        record, self._record = self._record, None
        return record


def episode_text(record: Mapping[str, Any]) -> str:
    """Return one recorded trajectory as Markdown: the task, then each turn as the model read and wrote it."""
    lines = [f"**{record['task']['id']}**, reward {record['reward']}, {record['status']}"]
    for turn in record["turns"]:
        for name, text in (("read", turn["prompt_text"]), ("wrote", turn["text"])):
            shown = text if len(text) <= MAX_TEXT else f"… {text[-MAX_TEXT:]}"
            # Indented, so that Markdown shows the text as it is, whatever marks are in it.
            lines += ["", f"{name}:", "", *(f"    {line}" for line in shown.split("\n"))]
    return "\n".join(lines)


def flat(config: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, bool | float | str]]:
    """Yield the settings as ``section/name``, each a value that a table of hyper-parameters can hold."""
    for section, values in config.items():
        for name, value in values.items() if isinstance(values, Mapping) else [("", values)]:
            plain = value if isinstance(value, bool | int | float | str) else str(value)
            yield f"{section}/{name}".rstrip("/"), plain


class TensorBoard(Callback):
    """Writes TensorBoard event files, without torch or TensorFlow."""

    def __init__(self, directory: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(directory), flush_secs=5)
        self._described: set[str] = set()
        self._episodes = SampleEpisodes()

    def on_run_begin(self, event: RunBegin) -> None:
        """Write the page of the six curves to watch, and the settings as hyper-parameters."""
        from tensorboard.plugins.custom_scalar import layout_pb2, metadata
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb  # the plug-in's other module of this kind needs TensorFlow

        charts = [
            layout_pb2.Chart(title=name, multiline=layout_pb2.MultilineChartContent(tag=[f"^{glossary().grouped(name)}$"]))
            for name in glossary().watch
        ]
        layout = layout_pb2.Layout(category=[layout_pb2.Category(title="Watch these six", chart=charts)])
        self._add(self._tensor(metadata.CONFIG_SUMMARY_TAG, layout.SerializeToString(), metadata.create_summary_metadata()), 0)
        self._add(self._summary.FromString(hparams_pb(dict(flat(event.config))).SerializeToString()), 0)

    def on_group_judged(self, event: GroupJudged) -> None:
        """Keep an episode, to be shown with a step."""
        self._episodes.take(event)

    def on_metrics(self, event: MetricsRow) -> None:
        """Write every metric as a scalar, with its meaning at first, and now and then an episode; the step itself is the axis."""
        values = [self._scalar(name, value) for name, value in event.metrics.items() if name != "step"]
        self._add(self._summary(value=values), event.step)
        if (record := self._episodes.due(event.step)) is not None:
            self._add(self._episode(record), event.step)

    def _scalar(self, name: str, value: float) -> Any:
        found, tag = glossary().find(name), glossary().grouped(name)
        scalar = self._summary.Value(tag=tag, simple_value=value)
        if found is not None and tag not in self._described:
            self._described.add(tag)
            scalar.metadata.summary_description = found.text
        return scalar

    def _episode(self, record: Mapping[str, Any]) -> Any:
        from tensorboard.plugins.text.metadata import create_summary_metadata

        metadata = create_summary_metadata(display_name="Episode", description="One episode of the newest groups.")
        return self._tensor(EPISODES, episode_text(record).encode(), metadata)

    def _tensor(self, tag: str, content: bytes, metadata: Any) -> Any:
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING

        tensor = TensorProto(dtype=DT_STRING, string_val=[content], tensor_shape=TensorShapeProto())
        return self._summary(value=[self._summary.Value(tag=tag, metadata=metadata, tensor=tensor)])

    def _add(self, summary: Any, step: int) -> None:
        self._writer.add_event(self._event(step=step, wall_time=time.time(), summary=summary))

    def on_run_end(self, event: RunEnd) -> None:
        """Flush and close the files."""
        self._writer.close()


class ExperimentTracker(Callback):
    """Sends metrics, settings and episodes to a project of Weights & Biases, or of trackio, which has the same interface.

    Raises:
        ConfigError: If the package is not installed.
    """

    def __init__(self, package: str, project: str) -> None:
        try:
            self._module = importlib.import_module(package)
        except ImportError as error:
            remedy = f"Run `pip install {package}`, or leave the flag out."
            raise ConfigError(f"--{package}-project", project, f"needs the {package} package", remedy) from error
        self._package, self._project, self._run = package, project, None
        self._episodes = SampleEpisodes()

    def on_run_begin(self, event: RunBegin) -> None:
        """Open a run with the resolved settings; in W&B the six metrics to watch get a summary of their own."""
        own = self._package == "wandb"
        folder = {"dir": str(event.run_dir)} if own else {}
        self._run = self._module.init(project=self._project, name=event.run_dir.name, config=dict(event.config), **folder)
        if own and self._run is not None:
            for name in glossary().watch:
                self._run.define_metric(glossary().grouped(name), summary="min,max,last")

    def on_group_judged(self, event: GroupJudged) -> None:
        """Keep an episode, to be sent with a step."""
        self._episodes.take(event)

    def on_metrics(self, event: MetricsRow) -> None:
        """Send the metrics of the step, in groups; to W&B also an episode now and then, as a table."""
        if self._run is None:
            return
        values: dict[str, Any] = {glossary().grouped(name): value for name, value in event.metrics.items() if name != "step"}
        record = self._episodes.due(event.step)
        if record is not None and self._package == "wandb":
            row = [record["task"]["id"], record["reward"], episode_text(record)]
            values[EPISODES] = self._module.Table(columns=["task", "reward", "episode"], data=[row])
        self._run.log(values, step=event.step)

    def on_run_end(self, event: RunEnd) -> None:
        """Finish the run."""
        if self._run is not None:
            self._run.finish()

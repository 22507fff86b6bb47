"""Where step metrics go: a JSONL file always, TensorBoard and Weights & Biases on request."""

from __future__ import annotations

import importlib
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from agentrl.core.errors import ConfigError
from agentrl.core.protocols import MetricSink
from agentrl.track.jsonl import JsonLines, encode

PROMISED = (
    *("step", "time_s", "reward/mean", "score/mean", "staleness/mean", "staleness/max", "mismatch/max"),
    *("tokens_per_s", "idle/generator", "idle/learner"),
    *("ledger/submitted", "ledger/trained", "ledger/filtered", "ledger/dropped", "ledger/in_flight"),
)
"""Keys that every line of ``metrics.jsonl`` has; ``null`` where a step had nothing to measure, as ``mismatch/max`` has
in an asynchronous step without a token of the current weights."""


class JsonlSink:
    """One JSON object per step, flushed at once.

    Args:
        path: File to append to.
    """

    def __init__(self, path: Path) -> None:
        self._lines = JsonLines(path)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append ``{"step": step, ...}``; a non-finite value, or a promised one that is missing, becomes ``null``."""
        self._lines.write(encode({**dict.fromkeys(PROMISED), **metrics, "step": step}))

    def close(self) -> None:
        """Close the file; safe to call twice."""
        self._lines.close()


class TensorBoardSink:
    """TensorBoard event files, written without torch or TensorFlow.

    Args:
        directory: Where the event files go.
    """

    def __init__(self, directory: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(directory), flush_secs=5)
        self._open = True

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write every metric as a scalar; the step itself is the axis."""
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items() if name != "step"]
        self._writer.add_event(self._event(step=step, wall_time=time.time(), summary=self._summary(value=values)))

    def close(self) -> None:
        """Flush and close; safe to call twice."""
        if self._open:
            self._open = False
            self._writer.close()


class WandbSink:
    """A Weights & Biases run.

    Args:
        project: Name of the project.
        run_dir: The run's directory; its name is the run's name.
        config: The resolved configuration, shown beside the curves.

    Raises:
        ConfigError: If the ``wandb`` package is not installed.
    """

    def __init__(self, project: str, *, run_dir: Path, config: Mapping[str, Any]) -> None:
        try:
            wandb = importlib.import_module("wandb")
        except ImportError as error:
            raise ConfigError(
                "--wandb-project", project, "needs the wandb package", "Run `pip install wandb`, or leave the flag out."
            ) from error
        self._run = wandb.init(project=project, name=run_dir.name, dir=str(run_dir), config=dict(config))
        self._open = True

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics at `step`."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Finish the run; safe to call twice."""
        if self._open:
            self._open = False
            self._run.finish()


class MultiSink:
    """Several sinks as one.

    Args:
        sinks: Told in this order.
    """

    def __init__(self, sinks: Sequence[MetricSink]) -> None:
        self._sinks = tuple(sinks)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Tell every sink."""
        for sink in self._sinks:
            sink.log(step, metrics)

    def close(self) -> None:
        """Close every sink, also when one of them fails to."""
        with ExitStack() as stack:
            for sink in reversed(self._sinks):
                stack.callback(sink.close)


def open_sinks(run_dir: Path, *, tensorboard: bool, wandb_project: str, config: Mapping[str, Any]) -> MultiSink:
    """The sinks of one run.

    Args:
        run_dir: Directory of the run; gets ``metrics.jsonl`` and ``tensorboard/``.
        tensorboard: Whether to write TensorBoard event files.
        wandb_project: Weights & Biases project; empty switches it off.
        config: The resolved configuration.

    Raises:
        ConfigError: If Weights & Biases is asked for and not installed.
    """
    with ExitStack() as opened:
        sinks: list[MetricSink] = []
        if wandb_project:
            sinks.append(WandbSink(wandb_project, run_dir=run_dir, config=config))
            opened.callback(sinks[-1].close)
        sinks.insert(0, JsonlSink(run_dir / "metrics.jsonl"))
        opened.callback(sinks[0].close)
        if tensorboard:
            sinks.append(TensorBoardSink(run_dir / "tensorboard"))
        opened.pop_all()
    return MultiSink(sinks)

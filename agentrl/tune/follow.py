"""Events of a run while it trains: rows of metrics to the sinks, evaluations, checkpoints, the best model, an early end."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from agentrl.algo.row_losses import METRICS, OWN
from agentrl.config.methods import COMMON, LOWER_IS_BETTER, Method
from agentrl.core.callbacks import Callback, MetricsRow
from agentrl.core.process import handling_signals
from agentrl.learner.ranks import Ranks

LEARNER = (
    *("rows", "tokens/rows", "tokens/trained", "tokens/saved", "shared_prompts", "padding", "micro_batches"),
    *("skipped_updates", "loss/balance", "memory/peak_gib", "memory/process_gib"),
)
"""Metrics of training steps that reinforcement learning has too, beside those of time."""


class Stop:
    """A request to end early: asked once, the step under way is finished and saved."""

    def __init__(self) -> None:
        self.asked = False

    @contextmanager
    def on_signals(self) -> Iterator[Stop]:
        """Within the block, a first SIGINT or SIGTERM asks for the end, and a second one ends the process; in the main thread only."""
        with handling_signals(self._heard):
            yield self

    def _heard(self, number: int) -> None:
        self.asked = True
        sys.stderr.write("\nagentrl: finishing the step under way, then saving; once more to end at once\n")
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_DFL)

    def agreed(self, ranks: Ranks) -> bool:
        """Return True if any rank was asked, the same on every rank."""
        # A rank that stopped alone would leave the others waiting in their next collective operation.
        return bool(ranks.sum(torch.tensor(float(self.asked), device=ranks.device)))


class Rows:
    """The rows of ``metrics.jsonl``: the metrics of a step and of the evaluation after it are one row.

    Args:
        method: Names of the metrics.
        rank: The first rank tells the sinks.
        sinks: Metric sinks, display and summary.
        epoch_rows: Rows of an epoch, for the metric ``epoch``.
        batch_size: Rows of a step.
    """

    def __init__(self, method: Method, sinks: Sequence[Callback], *, epoch_rows: int, batch_size: int) -> None:
        self._names = (*COMMON, *method.metrics)
        self._sinks, self._epochs_per_step = sinks, batch_size / epoch_rows
        self._step, self._row = 0, dict[str, float]()

    def trained(self, step: int, metrics: Mapping[str, float], *, tokens: float, seconds: float) -> None:
        """Begin the row of a step, up to which so many tokens were read, and so many seconds went by."""
        self.flush()
        learner = {name: value for name, value in metrics.items() if name in LEARNER or name.startswith("time/")}
        own = {**self._named(metrics), **learner, "time_s": seconds, "tokens": tokens}
        self._step, self._row = step, {"epoch": step * self._epochs_per_step, **own}

    def measured(self, step: int, metrics: Mapping[str, float], *, seconds: float) -> dict[str, float]:
        """Add the metrics of an evaluation after a step, which took so many seconds, and return those of the method."""
        if step != self._step:
            self.flush()
            self._step = step
        found = self._named(metrics)
        self._row |= {"eval/seconds": seconds, **{f"eval/{name}": value for name, value in found.items()}}
        return found

    def _named(self, metrics: Mapping[str, float]) -> dict[str, float]:
        margin = {}
        if "reward/chosen" in metrics and "reward/rejected" in metrics:
            margin["margin"] = metrics["reward/chosen"] - metrics["reward/rejected"]
        return {
            name: value for name, value in {**margin, **metrics}.items() if name in self._names or name in METRICS or name.startswith(OWN)
        }

    def note(self, **values: float) -> None:
        """Add metrics to the row of the step."""
        self._row |= values

    def flush(self) -> None:
        """Tell the sinks of the row, if there is one."""
        if self._row:
            row, self._row = self._row, {}
            for sink in self._sinks:
                sink.on_metrics(MetricsRow(step=self._step, metrics={"step": self._step, **row}))


class Best:
    """The best model so far by a metric of the evaluation.

    Args:
        metric: Name of the metric; empty keeps none.
        folder: Where the model goes.
        rows: Rows of metrics of an earlier part of the run.

    Attributes:
        since: Evaluations in a row that were not better.
    """

    def __init__(self, metric: str, folder: Path, rows: Sequence[Mapping[str, Any]] = ()) -> None:
        self.metric, self.folder, self.since = metric.removeprefix("eval/"), folder, 0
        self._value: float | None = None
        # A run that goes on compares with the best of its earlier part, and counts on from there.
        for row in rows:
            if "eval/loss" in row:
                self.better({name.removeprefix("eval/"): value for name, value in row.items()})

    def better(self, metrics: Mapping[str, float]) -> float | None:
        """Return the new best value; `None` if it is not better than the one before."""
        if not self.metric:
            return None
        value = metrics.get(self.metric)
        sign = -1 if self.metric in LOWER_IS_BETTER else 1
        if value is None or value != value or (self._value is not None and sign * value <= sign * self._value):
            self.since += 1
            return None
        self._value, self.since = value, 0
        return value

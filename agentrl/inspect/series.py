"""Metrics of a run as columns over its steps, which grow while the run does."""

from __future__ import annotations

import math
import threading
from array import array
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from agentrl.inspect.directory import METRICS
from agentrl.inspect.tail import Line, Tail
from agentrl.track.glossary import glossary
from agentrl.track.index import parsed

NEXT = ("score/mean", "kl/reference", "staleness/mean", "tokens_per_s", "loss", "eval/loss")
"""Metrics to show first where a run lacks one of those to watch."""
TUNED = ("loss", "token_accuracy", "accuracy", "margin", "kl", "agreement", "reward/mean", "entropy", "learning_rate", "grad_norm")
"""The same of a run on given data, whose rows have an epoch."""
NUM_MAIN = 6
TOKENS_BY_METRIC: Mapping[str, str] = {
    **dict.fromkeys(("mismatch/max", "mismatch/mean", "mismatch/kl"), "mismatch"),
    **dict.fromkeys(("staleness/kl", "staleness/mean", "staleness/max"), "difference"),
    **dict.fromkeys(("rho/max", "rho/p99", "rho/mean", "ess/rho", "ess/weights", "off_policy/masked", "off_policy/bounded"), "weight"),
    **dict.fromkeys(("policy/ratio_max", "policy/ratio_min", "policy/ratio_mean", "policy/kl", "policy/clip_fraction"), "ratio"),
    **dict.fromkeys(("loss", "loss/policy", "grad_norm"), "loss"),
    **dict.fromkeys(("entropy", "loss/entropy"), "entropy"),
    **dict.fromkeys(("advantage/mean", "advantage/abs"), "advantage"),
}
"""Metric -> the figure of a token whose extremes explain it."""


class MetricTable:
    """The rows of ``metrics.jsonl`` as columns of numbers; values that are not known are NaN."""

    def __init__(self, folder: Path) -> None:
        self.columns: dict[str, array[float]] = {}
        self.rows = 0
        self._places: dict[int, int] = {}  # step -> row
        self._tail = Tail(folder / METRICS, self._take, self._clear)
        self._lock = threading.Lock()

    def advance(self) -> None:
        """Read what is new; threads may do so at the same time."""
        with self._lock:
            while not self._tail.advance():
                pass

    @property
    def steps(self) -> list[int]:
        """Steps of the rows, in the order of the file."""
        return [int(step) for step in self.columns.get("step", ())]

    def row(self, step: int) -> dict[str, float]:
        """Return the metrics of a step that are known; empty if the step is not there."""
        place = self._places.get(step)
        if place is None:
            return {}
        return {name: column[place] for name, column in self.columns.items() if not math.isnan(column[place])}

    def last(self) -> dict[str, float]:
        """Return the metrics of the last step."""
        return self.row(self.steps[-1]) if self.rows else {}

    def column(self, name: str, missing: float = math.nan) -> list[float]:
        """Return a column; values that are not known become `missing`."""
        found = self.columns.get(name)
        return [missing] * self.rows if found is None else [missing if math.isnan(value) else value for value in found]

    def _take(self, lines: Iterable[Line]) -> None:
        for _, line in lines:
            row = parsed(line)
            if row is None or not isinstance(row.get("step"), int | float):
                continue
            for name, value in row.items():
                # A metric that appears late has no values in the rows before.
                if isinstance(value, int | float) and name not in self.columns:
                    self.columns[name] = array("d", [math.nan]) * self.rows
            for name, column in self.columns.items():
                value = row.get(name)
                column.append(float(value) if isinstance(value, int | float) else math.nan)
            self._places[int(row["step"])] = self.rows
            self.rows += 1

    def _clear(self) -> None:
        self.columns.clear()
        self._places.clear()
        self.rows = 0


@cache
def _description(name: str) -> str:
    found = glossary().find(name)
    return found.text if found else ""


def series(table: MetricTable, names: Sequence[str] = (), points: int = 1000) -> dict[str, Any]:
    """Return columns over steps, time, tokens and episodes, at most `points` long; longer ones as means of buckets with their range.

    `names` are the metrics that are asked for; all if there are none.
    """
    known = sorted(name for name in table.columns if name not in ("step", "time_s"))
    wanted = [name for name in (names or known) if name in table.columns]
    size = max(1, math.ceil(table.rows / max(1, points)))
    buckets = [slice(start, start + size) for start in range(0, table.rows, size)]
    tokens, episodes = (_cumulated(table.column(name, 0.0)) for name in ("tokens", "episode/count"))
    axes = {"step": [float(step) for step in table.steps], "time_s": table.column("time_s"), "tokens": tokens, "episodes": episodes}
    cut = size > 1
    return {
        "names": known,
        "main": [name for name in main_names(table) if name in table.columns][:NUM_MAIN],
        "descriptions": {name: text for name in table.columns if (text := _description(name))},
        "tokens_by": {name: by for name, by in TOKENS_BY_METRIC.items() if name in table.columns},
        "axes": {name: [axis[bucket][-1] for bucket in buckets] for name, axis in axes.items()},
        "from": [axes["step"][bucket][0] for bucket in buckets],
        "columns": {name: [_mean(table.columns[name][bucket]) for bucket in buckets] for name in wanted},
        "low": {name: [_extreme(min, table.columns[name][bucket]) for bucket in buckets] for name in wanted} if cut else None,
        "high": {name: [_extreme(max, table.columns[name][bucket]) for bucket in buckets] for name in wanted} if cut else None,
        "of": table.rows,
        "first": table.steps[0] if table.rows else None,
        "last": table.steps[-1] if table.rows else None,
    }


def main_names(table: MetricTable) -> tuple[str, ...]:
    """Return the metrics to show first."""
    return TUNED if "epoch" in table.columns else (*glossary().watch, *NEXT)


def _cumulated(values: Iterable[float]) -> list[float]:
    total, sums = 0.0, []
    for value in values:
        total += value
        sums.append(total)
    return sums


def _mean(values: Sequence[float]) -> float | None:
    known = [value for value in values if not math.isnan(value)]
    return math.fsum(known) / len(known) if known else None


def _extreme(choose: Any, values: Sequence[float]) -> float | None:
    known = [value for value in values if not math.isnan(value)]
    return float(choose(known)) if known else None


STEP_COLUMNS: Mapping[str, str] = {
    "time_s": "time_s",
    "reward": "reward/mean",
    "reward_std": "reward/std",
    "groups": "group/count",
    "episodes": "episode/count",
    "staleness_max": "staleness/max",
    "mismatch_max": "mismatch/max",
    "loss": "loss/policy",
    "grad_norm": "grad_norm",
    "idle_learner": "idle/learner",
    "idle_generator": "idle/generator",
    "flat": "group/zero_variance",
}
"""Column of the list of steps -> metric."""


def step_rows(table: MetricTable, offset: int = 0, limit: int = 200) -> dict[str, Any]:
    """Return a page of the list of steps."""
    rows, places = [], range(table.rows)[offset : offset + limit]
    before: Mapping[str, float] = {}
    if places and places[0]:
        before = table.row(table.steps[places[0] - 1])
    for place in places:
        metrics = table.row(table.steps[place])
        row: dict[str, Any] = {"step": table.steps[place]}
        row |= {column: metrics.get(name) for column, name in STEP_COLUMNS.items()}
        for name in ("filtered", "dropped"):
            row[name] = int(metrics.get(f"ledger/{name}", 0.0) - before.get(f"ledger/{name}", 0.0))
        rows.append(row)
        before = metrics
    return {"of": table.rows, "rows": rows}

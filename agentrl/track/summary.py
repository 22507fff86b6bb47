"""One dictionary that says how a run went; written as ``summary.json``."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.core.errors import StorageError
from agentrl.track.jsonl import encode
from agentrl.track.text import mean

FIRST_STEPS, LAST_STEPS = 5, 10
LEDGER = ("submitted", "trained", "filtered", "dropped", "in_flight")
OUTPUTS = {
    "config": "config.json",
    "metrics": "metrics.jsonl",
    "trajectories": "trajectories.jsonl",
    "tensorboard": "tensorboard",
    "model": "model",
    "evaluations": "evaluations.jsonl",
    "best": "best",
}


def first_and_last(values: Sequence[float]) -> tuple[float, float]:
    """Means over the first and over the last few steps; NaN without a step."""
    return mean(values[:FIRST_STEPS]), mean(values[-LAST_STEPS:])


class SummaryBuilder:
    """Takes in the metrics of every step and adds them up.

    Attributes:
        rewards: Mean reward of every step.
    """

    def __init__(self) -> None:
        self.rewards: list[float] = []
        self._scores: list[float] = []
        self._totals: dict[str, float] = {}
        self._highs: dict[str, float] = {}
        self._means: dict[str, list[float]] = {}
        self._latest: Mapping[str, float] = {}
        self._evaluations: dict[int, Mapping[str, float]] = {}

    @property
    def steps(self) -> int:
        """Steps taken in."""
        return len(self.rewards)

    def on_start(self, metrics: Mapping[str, float]) -> None:
        """Take in what was measured before the first step."""
        self._evaluations[0] = dict(metrics)

    def on_step(self, metrics: Mapping[str, float]) -> None:
        """Take in one step's metrics."""
        self._latest = dict(metrics)
        if "eval/tasks" in metrics:
            self._evaluations[int(metrics["step"])] = self._latest
        self.rewards.append(metrics["reward/mean"])
        if "score/mean" in metrics:
            self._scores.append(metrics["score/mean"])
        for name in ("tokens", "episode/count", "time/train_s", "publish/seconds", "publish/export_s"):
            self._totals[name] = self._totals.get(name, 0.0) + metrics.get(name, 0.0)
        for name in ("staleness/max", "mismatch/max", "tokens_per_s"):
            if name in metrics:
                self._highs[name] = max(self._highs.get(name, metrics[name]), metrics[name])
        for name in ("staleness/mean", "tokens_per_s", "idle/generator", "idle/learner"):
            if name in metrics:
                self._means.setdefault(name, []).append(metrics[name])

    def build(self, *, run_dir: Path, wall_s: float, ledger: Mapping[str, float] | None = None, status: str = "finished") -> dict[str, Any]:
        """The summary.

        Args:
            run_dir: Directory of the run; what is there is listed under ``paths``.
            wall_s: Seconds from the start of the command until now.
            ledger: Final accounts, named as in the metrics; those of the last step if not given.
            status: ``finished``, ``interrupted`` or ``failed``.

        Returns:
            A JSON-ready dictionary; what is not known is ``None``.
        """
        accounts = self._latest if ledger is None else ledger
        return {
            "status": status,
            "steps": self.steps,
            "reward": _trend(self.rewards),
            "score": _trend(self._scores),
            "eval": self._evaluated(),
            "episodes": int(self._totals.get("episode/count", 0)),
            "tokens": int(self._totals.get("tokens", 0)),
            "wall_s": wall_s,
            "time": self._time(wall_s),
            "tokens_per_s": {"mean": self._mean("tokens_per_s"), "peak": self._highs.get("tokens_per_s")},
            "idle": {"generator": self._mean("idle/generator"), "learner": self._mean("idle/learner")},
            "staleness": {"mean": self._mean("staleness/mean"), "max": self._highs.get("staleness/max")},
            "mismatch_max": self._highs.get("mismatch/max"),
            "ledger": {name: int(accounts[f"ledger/{name}"]) for name in LEDGER if f"ledger/{name}" in accounts},
            "run_dir": str(run_dir),
            "paths": {label: str(run_dir / name) for label, name in OUTPUTS.items() if (run_dir / name).exists()},
        }

    def _evaluated(self) -> dict[str, Any] | None:
        """The first, the last and the best evaluation; `None` without one."""
        if not self._evaluations:
            return None
        first, last = min(self._evaluations), max(self._evaluations)
        best = self._evaluations[last]
        kept = {"step": int(best["eval/best_step"]), "value": best["eval/best"]} if "eval/best" in best else None
        return {"first": {"step": first, **_figures(self._evaluations[first])}, "last": {"step": last, **_figures(best)}, "best": kept}

    def _mean(self, name: str) -> float | None:
        return mean(self._means[name]) if name in self._means else None

    def _time(self, wall_s: float) -> dict[str, float]:
        """The learner's time: loop time that is neither training nor publishing was spent waiting for episodes."""
        loop_s = min(wall_s, self._latest.get("time_s", 0.0))
        train_s = self._totals.get("time/train_s", 0.0)
        publish_s = self._totals.get("publish/seconds", 0.0) + self._totals.get("publish/export_s", 0.0)
        return {
            "outside_loop_s": wall_s - loop_s,
            "loop_s": loop_s,
            "train_s": train_s,
            "publish_s": publish_s,
            "wait_s": max(0.0, loop_s - train_s - publish_s),
        }


def write_summary(summary: Mapping[str, Any], path: Path) -> None:
    """Write `summary` as indented JSON, whole or not at all.

    Raises:
        StorageError: If it cannot be written.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(json.dumps(json.loads(encode(summary)), indent=2) + "\n", encoding="ascii")
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise StorageError(f"{path} cannot be written: {error}") from error


def _figures(metrics: Mapping[str, float]) -> dict[str, float]:
    """The figures of an evaluation over all tasks, by name."""
    names = [name for name in metrics if name in ("eval/reward", "eval/score") or (name.startswith("eval/pass@") and name[10:].isdigit())]
    return {name.removeprefix("eval/"): metrics[name] for name in names}


def _trend(values: list[float]) -> dict[str, float | None]:
    """Means over the first and the last steps, their difference and the best step; all `None` without a step."""
    if not values:
        return {"first": None, "last": None, "gain": None, "best": None}
    first, last = first_and_last(values)
    return {"first": first, "last": last, "gain": last - first, "best": max(values)}

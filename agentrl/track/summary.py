"""The summary of a run: one dictionary, written as ``summary.json`` and printed."""

from __future__ import annotations

import json
import math
import shlex
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from agentrl.core.adapter_files import holds_adapter
from agentrl.core.callbacks import Callback, MetricsRow
from agentrl.core.disk import write_problem
from agentrl.core.errors import StorageError
from agentrl.core.files import write_text
from agentrl.core.paths import shown_path
from agentrl.core.redaction import redacted_words
from agentrl.env.given import PREFIX
from agentrl.env.plan import DataConfig
from agentrl.rollout.plan import RolloutConfig
from agentrl.track.jsonl import encode_indented
from agentrl.track.text import Screen, count, counted, duration, mean, number, percent, sparkline

FIRST_STEPS, LAST_STEPS = 5, 10
LEDGER = ("submitted", "trained", "filtered", "dropped", "in_flight")
OUTPUTS = {
    "config": "config.json",
    "metrics": "metrics.jsonl",
    "trajectories": "trajectories.jsonl",
    "requests": "requests.jsonl",
    "tensorboard": "tensorboard",
    "model": "model",
    "evaluations": "evaluations.jsonl",
    "best": "best",
}


def first_and_last(values: Sequence[float]) -> tuple[float, float]:
    """Return the means over the first and over the last few steps; NaN without a step."""
    first, last = ends(len(values))
    return mean(values[:first]), mean(values[-last:])


def ends(steps: int) -> tuple[int, int]:
    """Return how many steps count as the first and how many as the last ones; no step counts as both where there are two."""
    first = max(1, min(FIRST_STEPS, steps // 2))
    return first, max(1, min(LAST_STEPS, steps - first))


class Summary(Callback):
    """Takes in the rows of a run: curves over its steps, and its evaluations.

    Args:
        curves: Metrics whose values of every step are kept.

    Attributes:
        steps: Steps done.
        latest: The newest row of a step.
    """

    def __init__(self, *curves: str) -> None:
        self.steps, self.latest = 0, dict[str, float]()
        self._curves: dict[str, list[float]] = {name: [] for name in curves}
        self._evaluations: dict[int, Mapping[str, float]] = {}

    def on_metrics(self, event: MetricsRow) -> None:
        """Take in the metrics of a step."""
        self.add({**event.metrics, "step": event.step})

    def add(self, row: Mapping[str, float | None]) -> None:
        """Take in a line of ``metrics.jsonl``; step 0 is an evaluation before the first step."""
        metrics = {name: value for name, value in row.items() if value is not None}
        step = int(metrics["step"])
        if not step or not metrics.keys().isdisjoint(EVALUATED):
            self._evaluations[int(metrics.get("eval/step", step))] = metrics
        if step:
            self.steps, self.latest = self.steps + 1, metrics
            for name, values in self._curves.items():
                values += [metrics[name]] if name in metrics else []
            self._take(metrics)

    def _take(self, metrics: Mapping[str, float]) -> None:
        """Take in what else is summed up of a step."""

    def _common(self, run_dir: Path, wall_s: float, status: str, outputs: Mapping[str, str] = OUTPUTS) -> dict[str, Any]:
        """Return the entries of every summary."""
        return {
            "status": status,
            "steps": self.steps,
            "eval": self._evaluated(),
            "wall_s": wall_s,
            "run_dir": str(run_dir),
            "paths": {label: str(run_dir / name) for label, name in outputs.items() if (run_dir / name).exists()},
        }

    def _evaluated(self) -> dict[str, Any] | None:
        """The first, the last and the best evaluation; `None` without one."""
        if not self._evaluations:
            return None
        evaluations = sorted(self._evaluations.items())
        (first, begin), (last, end) = evaluations[0], evaluations[-1]
        kept = [metrics for _, metrics in evaluations if "eval/best" in metrics]
        best = {"step": int(kept[-1]["eval/best_step"]), "value": kept[-1]["eval/best"]} if kept else None
        return {"first": {"step": first, **self._figures(begin)}, "last": {"step": last, **self._figures(end)}, "best": best}

    def _figures(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """The metrics of an evaluation, by name."""
        return {name.removeprefix("eval/"): value for name, value in metrics.items() if name.startswith("eval/")}


EVALUATED = frozenset({"eval/tasks", "eval/loss"})
"""Metrics of which every evaluation has one."""


class TuneSummary(Summary):
    """The summary of a run on given data.

    Args:
        command: Its method.
        shown: Metrics that are shown beside the loss.
    """

    def __init__(self, command: str, shown: Sequence[str]) -> None:
        super().__init__("loss", *shown)
        self._command, self.losses = command, self._curves["loss"]

    def build(self, *, run_dir: Path, wall_s: float, status: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Return the summary as a JSON-ready dictionary; arguments as those of `SummaryBuilder.build`, and what became of the rows."""
        trends = {name: dict(zip(("first", "last"), first_and_last(each), strict=True)) for name, each in self._curves.items() if each}
        common = self._common(run_dir, wall_s, status, {**OUTPUTS, "samples": "samples.txt"})
        return {"command": self._command, **common, "train": trends, "data": dict(data)}


class SummaryBuilder(Summary):
    """The summary of a run of reinforcement learning."""

    def __init__(self) -> None:
        super().__init__("reward/mean", "score/mean")
        self.rewards = self._curves["reward/mean"]  # mean of every step
        self._totals: dict[str, float] = {}
        self._highs: dict[str, float] = {}
        self._means: dict[str, list[float]] = {}

    def _take(self, metrics: Mapping[str, float]) -> None:
        for name in ("tokens", "episode/count", "time/train_s", "publish/seconds", "publish/export_s"):
            self._totals[name] = self._totals.get(name, 0.0) + metrics.get(name, 0.0)
        for name in ("staleness/max", "mismatch/max", "tokens_per_s"):
            if name in metrics:
                self._highs[name] = max(self._highs.get(name, metrics[name]), metrics[name])
        for name in ("staleness/mean", "tokens_per_s", "idle/generator", "idle/learner"):
            if name in metrics:
                self._means.setdefault(name, []).append(metrics[name])

    def build(
        self,
        *,
        run_dir: Path,
        wall_s: float,
        ledger: Mapping[str, float] | None = None,
        status: str = "finished",
        stop_reason: str | None = None,
    ) -> dict[str, Any]:
        """Return the summary as a JSON-ready dictionary; what is not known is ``None``.

        Args:
            run_dir: Directory of the run; what is there is listed under ``paths``.
            wall_s: Seconds from the start of the command until now.
            ledger: Final accounts, named as in the metrics; those of the last step if not given.
            status: ``finished``, ``interrupted`` or ``failed``.
            stop_reason: Why a callback asked for the end of the run.
        """
        accounts = self.latest if ledger is None else ledger
        return {
            **self._common(run_dir, wall_s, status),
            "stop_reason": stop_reason,
            "reward": _trend(self.rewards),
            "score": _trend(self._curves["score/mean"]),
            "episodes": int(self._totals.get("episode/count", 0)),
            "tokens": int(self._totals.get("tokens", 0)),
            "time": self._time(wall_s),
            "tokens_per_s": {"mean": self._mean("tokens_per_s"), "peak": self._highs.get("tokens_per_s")},
            "idle": {"generator": self._mean("idle/generator"), "learner": self._mean("idle/learner")},
            "staleness": {"mean": self._mean("staleness/mean"), "max": self._highs.get("staleness/max")},
            "mismatch_max": self._highs.get("mismatch/max"),
            "ledger": {name: int(accounts[f"ledger/{name}"]) for name in LEDGER if f"ledger/{name}" in accounts},
        }

    def _figures(self, metrics: Mapping[str, float]) -> dict[str, float]:
        figures = super()._figures(metrics)
        passes = [name for name in figures if name.startswith("pass@") and name[5:].isdigit()]
        return {name: value for name, value in figures.items() if name in ("reward", "score", *passes)}

    def _mean(self, name: str) -> float | None:
        return mean(self._means[name]) if name in self._means else None

    def _time(self, wall_s: float) -> dict[str, float]:
        """The learner's time: loop time that is neither training nor publishing was spent waiting for episodes."""
        loop_s = min(wall_s, self.latest.get("time_s", 0.0))
        train_s = self._totals.get("time/train_s", 0.0)
        publish_s = self._totals.get("publish/seconds", 0.0) + self._totals.get("publish/export_s", 0.0)
        wait_s = max(0.0, loop_s - train_s - publish_s)
        return {"outside_loop_s": wall_s - loop_s, "loop_s": loop_s, "train_s": train_s, "publish_s": publish_s, "wait_s": wait_s}


def write_summary(summary: Mapping[str, Any], path: Path) -> None:
    """Write `summary` as indented JSON, whole or not at all.

    Raises:
        StorageError: If it cannot be written.
    """
    try:
        write_text(path, encode_indented(summary))
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {write_problem(error, path)}") from error


def _trend(values: list[float]) -> dict[str, float | None]:
    """Means over the first and the last steps, their difference and the best step; all `None` without a step."""
    if not values:
        return {"first": None, "last": None, "gain": None, "best": None}
    first, last = first_and_last(values)
    return {"first": first, "last": last, "gain": last - first, "best": max(values)}


def print_summary(
    summary: Mapping[str, Any], *, console: Console, rewards: Sequence[float] = (), agent: str = "", commands: Sequence[str] | None = None
) -> None:
    """Print the summary, with a curve of the `rewards` or losses per step, and commands: those for the `agent` as given to ``--agent``."""
    screen = Screen(console)
    screen.line()
    print_rows(screen, summary_rows(summary, rewards=rewards, agent=agent, unicode=screen.unicode, commands=commands))


def print_rows(screen: Screen, rows: Iterable[tuple[str, str]]) -> None:
    """Print labels with their texts; paths and commands stay on one line, to be copied."""
    part = ""
    for label, text in rows:
        part = label or part
        screen.labelled(label, text, whole=part in ("saved", "next"))


def summary_rows(
    summary: Mapping[str, Any], *, rewards: Sequence[float], agent: str, unicode: bool = True, commands: Sequence[str] | None = None
) -> list[tuple[str, str]]:
    """Return label and text of every line; a continued row has the label ""."""
    rows = [(str(summary["status"]), f"{counted(summary['steps'], 'step')} in {duration(summary['wall_s'])}")]
    rows += [("stopped by", str(summary["stop_reason"]))] if summary.get("stop_reason") else []
    curve = [("", sparkline(rewards, 60))] if unicode and len(rewards) > 1 else []
    if "train" in summary:
        trends = [f"{name} {number(trend['first'])} to {number(trend['last'])}" for name, trend in summary["train"].items()]
        rows += [("training", ", ".join(trends) or "nothing measured"), *curve]
        held_out = [name for name in (summary["eval"] or {"first": {}})["first"] if name not in ("step", "seconds", "best", "best_step")]
        rows += evaluation_rows("held out", summary["eval"], held_out[:4])
    elif summary["steps"]:
        rows += [("reward", _trend_text(summary["reward"], summary["steps"])), *curve]
        if (score := summary["score"])["last"] is not None:
            rows += [("score", f"{number(score['first'])} to {number(score['last'])}")]
        rows += evaluation_rows("evaluation", summary["eval"], ("reward", "score", "pass@1"))
        rows += _metric_rows(summary)
    rows += recorded_rows(summary.get("recorded"))
    for warning in summary.get("warnings", ()):
        rows += [("warning", f"{warning['text']}."), ("", warning["remedy"])]
    for name, took in summary.get("callbacks", {}).items():
        rows += [("callback", f"{name}: {counted(took['calls'], 'call')}, {duration(took['seconds'])}")]
    rows += [("saved", shown_path(summary["run_dir"]))]
    rows += [("", "  ".join(Path(path).name for path in summary["paths"].values()))] if summary["paths"] else []
    commands = _next_commands(summary, agent) if commands is None else commands
    return rows + [("next" if i == 0 else "", command) for i, command in enumerate(commands)]


def evaluation_rows(label: str, evaluated: Mapping[str, Any] | None, names: Iterable[str]) -> list[tuple[str, str]]:
    """Return the metrics of the first and the last evaluation, and which model was the best; no row without an evaluation."""
    if not evaluated:
        return []
    first, last, best = evaluated["first"], evaluated["last"], evaluated["best"]
    metrics = [f"{name} {number(first[name])} to {number(last[name])}" for name in names if name in first and name in last]
    text = f"{', '.join(metrics) or 'nothing measured'}; steps {first['step']} to {last['step']}"
    return [(label, text + (f"; best {number(best['value'])} after step {best['step']}" if best else ""))]


def recorded_rows(recorded: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """Return how many of the played episodes are recorded; no row where none was played or asked for."""
    if not recorded or not recorded["episodes"]:
        return []
    return [("recorded", f"{recorded['episodes']} of {counted(recorded['played'], 'episode')}, {recorded['bytes'] / 2**20:.1f} MiB")]


def _trend_text(reward: Mapping[str, float], steps: int) -> str:
    first, last = ends(steps)
    means = "first and last step" if last == 1 else f"mean of the first {first} and of the last {last} steps"
    return f"{number(reward['first'])} to {number(reward['last'])} ({reward['gain']:+.3f}); {means}; best {number(reward['best'])}"


def _metric_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    time, staleness, idle, speed = (summary[name] for name in ("time", "staleness", "idle", "tokens_per_s"))
    loop_s = time["loop_s"] or math.nan
    return [
        ("episodes", f"{summary['episodes']}, {count(summary['tokens'])} tokens sampled, {count(_or_nan(speed['mean']))} tokens/s"),
        (
            "time",
            f"start and end {duration(time['outside_loop_s'])}, training loop {duration(time['loop_s'])}: "
            f"training {percent(time['train_s'] / loop_s)}, publishing {percent(time['publish_s'] / loop_s)}, "
            f"waiting for episodes {percent(time['wait_s'] / loop_s)}",
        ),
        ("idle", f"generator {percent(_or_nan(idle['generator']))}, learner {percent(_or_nan(idle['learner']))}"),
        ("staleness", f"mean {number(_or_nan(staleness['mean']), 2)}, max {number(_or_nan(staleness['max']), 0)} steps"),
        ("mismatch", f"max {_or_nan(summary['mismatch_max']):.1e} between engine and learner log-probabilities"),
        ("groups", _ledger_line(summary["ledger"])),
    ]


def _ledger_line(ledger: Mapping[str, int]) -> str:
    parts = " + ".join(f"{ledger.get(name, 0)} {name.replace('_', ' ')}" for name in ("trained", "filtered", "dropped", "in_flight"))
    return f"{ledger.get('submitted', 0)} submitted = {parts}"


DOCTOR = "agentrl doctor"
"""Words of a remedy after which the command for this run follows the summary."""


def _next_commands(summary: Mapping[str, Any], agent: str) -> list[str]:
    paths = summary["paths"]
    commands = []
    if any(DOCTOR in warning["remedy"] for warning in summary.get("warnings", ())):
        commands.append(_command("agentrl", "doctor", summary["run_dir"]))
    if "trajectories" in paths:
        commands += [_command("agentrl", name, summary["run_dir"]) for name in ("view", "inspect")]
    if "tensorboard" in paths:
        commands.append(_command("tensorboard", "--logdir", paths["tensorboard"]))
    if "model" in paths and holds_adapter(Path(paths["model"])):
        return [*commands, _command("agentrl", "export", summary["run_dir"], "--merge")]
    if agent.startswith(PREFIX):  # no command can load it
        name, model = agent.removeprefix(PREFIX), paths.get("model")
        return [*commands, f"agentrl.train({name}, model={model!r})"] if model else commands
    if "model" in paths and "evaluations" in paths:
        commands.append(_command("agentrl", "eval", "--run", summary["run_dir"], "--baseline", "start"))
    if "model" in paths and agent:
        commands.append(_command("agentrl", "train", "--agent", agent, *_task_flags(paths.get("config")), "--model", paths["model"]))
    return commands


def _task_flags(path: str | None) -> list[str]:
    """Return the flags that say where a run's tasks come from and how much an episode may do, as far as they differ from the defaults."""
    try:
        config = json.loads(Path(path or "").read_text(encoding="utf-8"))
        given = {**config.get("rollout", {}), **config["data"]}
    except (OSError, ValueError, KeyError):
        return []
    words: list[str] = []
    budgets = RolloutConfig()
    for name, default in {**asdict(DataConfig()), "max_turns": budgets.max_turns, "max_new_tokens": budgets.max_new_tokens}.items():
        value, flag = given.get(name, default), name.replace("_", "-")
        if value != default and name != "remote_rm_url":  # the agent of the run says it
            words += [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    return words


def _command(program: str, *words: str) -> str:
    """Return a command line; a program that the shell does not find is named by its path beside this Python."""
    beside = Path(sys.executable).parent / program
    if not shutil.which(program) and beside.exists():
        program = str(beside.relative_to(Path.cwd()) if beside.is_relative_to(Path.cwd()) else beside)
    return shlex.join([program, *redacted_words([*map(shown_path, words)])])


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value

"""Display and summary of a run: the metrics of a step, and its summary at the end."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from agentrl.config.methods import Method
from agentrl.core.callbacks import Callback, MetricsRow
from agentrl.core.paths import shown_path
from agentrl.track.display import SPARKLINE_WIDTH, Form, RunView, left_parts, step_text
from agentrl.track.summary import OUTPUTS, evaluation_rows, first_and_last, print_rows
from agentrl.track.text import Screen, count, counted, duration, number, sparkline


def display_form(method: Method) -> Form:
    """Return what a display shows of a method: the loss and its metrics."""
    names = ("loss", *method.shown)

    def parts(view: RunView) -> list[str]:
        metrics = [f"{name} {number(view.latest.get(name, math.nan))}" for name in names]
        evaluated = [f"held out: {name} {number(view.latest[f'eval/{name}'])}" for name in names[:2] if f"eval/{name}" in view.latest]
        rate = f"learning rate {view.latest.get('learning_rate', math.nan):.1e}"
        return [step_text(view), *metrics, *left_parts(view), *evaluated, rate]

    def rows(view: RunView, blocks: str) -> Table:
        table = Table.grid(Column(style="cyan", no_wrap=True), Column(overflow="ellipsis", no_wrap=True), padding=(0, 2))
        curve = sparkline(view.rewards, SPARKLINE_WIDTH, blocks=blocks)
        table.add_row("loss", f"[bold]{number(view.latest.get('loss', math.nan))}[/bold]  {curve}  {view.trend:+.3f} since the first steps")
        for name in method.shown:
            table.add_row(name, number(view.latest.get(name, math.nan)))
        for name in names:
            if f"eval/{name}" in view.latest:
                table.add_row(f"held out: {name}", number(view.latest[f"eval/{name}"]))
        return table

    return Form(curve="loss", parts=parts, rows=rows)


class TuneSummary(Callback):
    """Takes in the rows of a run, and sums it up."""

    def __init__(self, method: Method) -> None:
        self._method = method
        self.losses: list[float] = []
        self.latest: Mapping[str, float] = {}
        self._curves: dict[str, list[float]] = {}
        self._evaluations: dict[int, Mapping[str, float]] = {}

    def on_metrics(self, event: MetricsRow) -> None:
        """Take in the row of a step, or of an evaluation before the first."""
        self.add({**event.metrics, "step": event.step})

    def add(self, row: Mapping[str, float | None]) -> None:
        """Take in a line of ``metrics.jsonl``."""
        values = {name: value for name, value in row.items() if value is not None}
        if any(name.startswith("eval/") for name in values):
            self._evaluations[int(values["step"])] = {
                name.removeprefix("eval/"): value for name, value in values.items() if name.startswith("eval/")
            }
        if not values["step"]:
            return
        self.latest = values
        self.losses.append(values.get("loss", math.nan))
        for name in ("loss", *self._method.shown):
            if name in values:
                self._curves.setdefault(name, []).append(values[name])

    @property
    def best(self) -> Mapping[str, float] | None:
        """Return the newest evaluation that improved on those before it."""
        kept = [metrics for _, metrics in sorted(self._evaluations.items()) if "best" in metrics]
        return kept[-1] if kept else None

    def build(self, *, run_dir: Path, wall_s: float, status: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Return the summary as a JSON-ready dictionary.

        Args:
            run_dir: Directory of the run; what is there is listed under ``paths``.
            wall_s: Seconds from the start of the command until now.
            status: ``finished``, ``interrupted`` or ``failed``.
            data: What became of the rows.
        """
        trends = {}
        for name, values in self._curves.items():
            first, last = first_and_last(values)
            trends[name] = {"first": first, "last": last}
        evaluated: dict[str, Any] | None = None
        if self._evaluations:
            first_step, last_step = min(self._evaluations), max(self._evaluations)
            evaluated = {
                "first": {"step": first_step, **self._evaluations[first_step]},
                "last": {"step": last_step, **self._evaluations[last_step]},
            }
            evaluated["best"] = {"step": int(self.best["best_step"]), "value": self.best["best"]} if self.best else None
        outputs = {**OUTPUTS, "samples": "samples.txt"}
        return {
            "command": self._method.command,
            "status": status,
            "steps": len(self.losses),
            "train": trends,
            "eval": evaluated,
            "data": dict(data),
            "wall_s": wall_s,
            "run_dir": str(run_dir),
            "paths": {label: str(run_dir / name) for label, name in outputs.items() if (run_dir / name).exists()},
        }


def data_text(counts: Mapping[str, int], max_length: int) -> str:
    """Return in one sentence what became of the rows of a data set."""
    cut = [f"{counts[name]} {text}" for name, text in (("dropped", "dropped"), ("cut", "cut"), ("split", "split")) if counts[name]]
    above = f"; above --max-length {max_length}: {', '.join(cut)}" if cut else ""
    tokens = f"{count(counts['tokens'])} tokens, {count(counts['trained'])} of them trained, the longest row {counts['longest']}"
    branches = f", {counts['branches']} of them because the chat template rewrites earlier turns," if counts.get("branches") else ""
    return f"{counted(counts['rows'], 'row')}{branches} with {tokens}{above}"


def print_tune_summary(summary: Mapping[str, Any], losses: Sequence[float], *, console: Console, next_commands: Sequence[str]) -> None:
    """Print the summary of a run and what can be done with its model."""
    screen = Screen(console)
    screen.line()
    rows = [(summary["status"], f"{counted(summary['steps'], 'step')} in {duration(summary['wall_s'])}")]
    trends = [f"{name} {number(trend['first'])} to {number(trend['last'])}" for name, trend in summary["train"].items()]
    rows.append(("training", ", ".join(trends) or "nothing measured"))
    if screen.unicode and len(losses) > 1:
        rows.append(("", sparkline(losses, 60)))
    held_out = [name for name in (summary["eval"] or {"first": {}})["first"] if name not in ("step", "seconds", "best", "best_step")]
    rows += evaluation_rows("held out", summary["eval"], held_out[:4])
    rows.append(("saved", shown_path(summary["run_dir"])))
    rows.append(("", "  ".join(Path(path).name for path in summary["paths"].values())))
    rows += [("next" if not index else "", command) for index, command in enumerate(next_commands)]
    print_rows(screen, rows)

"""Output of ``agentrl eval``: its progress, and a table at the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import TypeAlias, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from agentrl.evaluation.assessment import Assessment, Comparison, Difference, TaskOutcome
from agentrl.evaluation.statistics import Estimate
from agentrl.track.jsonl import JsonLines, encode
from agentrl.track.text import counted, duration, figures_table, number, percent


def log_evaluation(path: Path, step: int, assessment: Assessment, seconds: float, outcomes: Sequence[TaskOutcome] = ()) -> None:
    """Append the evaluation of the weights of `step` to the file, which is made with the first.

    The line has intervals, kinds, failures, and reward, score and number of episodes of each task.
    """
    lines = JsonLines(path)
    by_task = {outcome.task_id: _task_line(outcome) for outcome in outcomes}
    lines.write(encode({"step": step, "seconds": seconds, **asdict(assessment), "by_task": by_task}))
    lines.close()


def _task_line(outcome: TaskOutcome) -> dict[str, float | str | None]:
    scores = [episode.score for episode in outcome.episodes if episode.score is not None]
    return {
        "kind": outcome.kind,
        "reward": fmean(episode.reward for episode in outcome.episodes) if outcome.episodes else None,
        "score": fmean(scores) if scores else None,
        "episodes": len(outcome.episodes),
        "failures": len(outcome.failures),
    }


def evaluation_line(assessment: Assessment) -> str:
    """An evaluation in one line; names of equal figures share one."""
    names: dict[str, list[str]] = {}
    for name, estimate in assessment.overall.items():
        names.setdefault(estimate_text(estimate), []).append(name)
    figures = ", ".join(f"{' = '.join(equal)} {text}" for text, equal in names.items())
    return f"{figures or 'nothing measured'}; {counted(assessment.tasks, 'task')}{failure_text(assessment)}"


def estimate_text(estimate: Estimate) -> str:
    """A mean and its interval: ``0.512 (0.471 to 0.553)``."""
    if estimate.low is None or estimate.high is None:
        return number(estimate.value)
    return f"{number(estimate.value)} ({number(estimate.low)} to {number(estimate.high)})"


def failure_text(assessment: Assessment) -> str:
    """Return the failures of an evaluation as text that continues a sentence; empty if there are none."""
    if not assessment.failed_episodes:
        return ""
    cause, _ = next(iter(assessment.causes.items()))
    tasks = f", {len(assessment.failed_tasks)} more failed" if assessment.failed_tasks else ""
    return f"{tasks}; {counted(assessment.failed_episodes, 'episode')} failed, most often with {cause}"


Figure = TypeVar("Figure", Estimate, Difference)

LINE_EVERY_S = 5.0


class EvalProgress:
    """Stages and finished tasks: a bar in a terminal, now and then a line elsewhere."""

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._clock, self._started_s = console, clock, clock()
        self._line_s = self._started_s
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._live = console.is_terminal and not console.is_dumb_terminal
        self._bars = Progress(*columns, console=console, transient=True)
        self._bar: TaskID | None = None

    def on_stage(self, name: str) -> None:
        """Say what begins."""
        self.close()
        self._line_s = self._clock()
        self._console.print(
            f"[{duration(self._clock() - self._started_s):>7}] {name}", markup=False, highlight=False, soft_wrap=not self._live
        )

    def on_task(self, done: int, total: int) -> None:
        """A task is done."""
        if self._live:
            if self._bar is None:
                self._bars.start()
                self._bar = self._bars.add_task("tasks", total=total)
            self._bars.update(self._bar, completed=done)
        elif self._clock() - self._line_s >= LINE_EVERY_S and done < total:
            self.on_stage(f"{done} of {counted(total, 'task')}")

    def close(self) -> None:
        """Give the terminal back; safe to call twice."""
        if self._bar is not None:
            self._bars.stop()
            self._bars.remove_task(self._bar)
            self._bar = None


Rows: TypeAlias = tuple[tuple[str, ...], list[tuple[str, ...]]]
"""Headings of a table, and its rows."""


def assessment_rows(assessment: Assessment) -> Rows:
    """Return the table of one model: a row per figure, over all tasks and for each kind."""
    found = _rows(assessment.overall, assessment.by_kind, assessment.by_agent)
    rows: list[tuple[str, ...]] = [(name, number(each.value), _interval(each), str(each.tasks)) for name, each in found]
    return ("", "mean", "95% interval", "tasks"), rows


def comparison_rows(comparison: Comparison) -> Rows:
    """Return the table of two models: a row per figure, with the difference and how many tasks went better or worse."""
    rows: list[tuple[str, ...]] = []
    for name, difference in _rows(comparison.overall, comparison.by_kind, comparison.by_agent):
        gain, means = difference.difference, (number(difference.model), number(difference.baseline))
        rows.append((name, *means, f"{gain.value:+.3f}", _interval(gain, sign="+"), percent(difference.better), percent(difference.worse)))
    return ("", "model", "baseline", "difference", "95% interval", "tasks better", "worse"), rows


def print_assessment(console: Console, assessment: Assessment) -> None:
    """Print the table of one model."""
    console.print(figures_table(*assessment_rows(assessment), style="bold cyan"))
    console.print(Text(_episodes_text(assessment)), soft_wrap=not console.is_terminal)


def print_comparison(console: Console, comparison: Comparison, model: Assessment, baseline: Assessment) -> None:
    """Print the table of two models, with clear differences in bold."""
    headings, rows = comparison_rows(comparison)
    table = figures_table(headings, (), style="bold cyan")
    differences = _rows(comparison.overall, comparison.by_kind, comparison.by_agent)
    for row, (_, difference) in zip(rows, differences, strict=True):
        table.add_row(*row, style="bold" if difference.clear else "")
    console.print(table)
    for name, assessment in (("model", model), ("baseline", baseline)):
        console.print(Text(f"{name:<10}{_episodes_text(assessment)}"), soft_wrap=not console.is_terminal)
    if comparison.unpaired:
        tasks = f"{comparison.unpaired} task{'s were' if comparison.unpaired != 1 else ' was'}"
        console.print(Text(f"{tasks} measured for one of the two only, and left out above"), soft_wrap=not console.is_terminal)


def _rows(overall: Mapping[str, Figure], *parts: Mapping[str, Mapping[str, Figure]]) -> list[tuple[str, Figure]]:
    rows = [(f"{part}: {name}", figure) for by_part in parts for part, figures in by_part.items() for name, figure in figures.items()]
    return list(overall.items()) + rows


def _interval(estimate: Estimate, sign: str = "") -> str:
    if estimate.low is None or estimate.high is None:
        return "one task only"
    return f"{estimate.low:{sign}.3f} to {estimate.high:{sign}.3f}"


def _episodes_text(assessment: Assessment) -> str:
    text = f"{counted(assessment.episodes, 'episode')}, {number(assessment.tokens, 1)} tokens and {number(assessment.turns, 1)} turns each"
    text += f", {percent(assessment.truncated)} truncated"
    if not assessment.failed_episodes:
        return text
    lines = "".join(f"\n  {count} x {cause}" for cause, count in assessment.causes.items())
    return (
        f"{text}; {assessment.failed_episodes} more failed and are in no figure, "
        f"{len(assessment.failed_tasks)} task{'s have' if len(assessment.failed_tasks) != 1 else ' has'} none that did not:{lines}"
    )

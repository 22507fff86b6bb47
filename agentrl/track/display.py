"""The display of a run: redrawn in place in a terminal, lines elsewhere."""

from __future__ import annotations

import atexit
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Column, Table
from rich.text import Text

from agentrl.core.callbacks import Callback, EvaluationEnd, GroupJudged, MetricsRow, RunEnd
from agentrl.core.summaries import GroupSummary
from agentrl.track.summary import first_and_last
from agentrl.track.text import ASCII_BLOCKS, BLOCKS, count, counted, duration, mean, number, percent, sparkline, visible, wrapped

ETA_STEPS = 10
MAX_ERRORS = 5


class RunView:
    """State of one run as a person sees it; its curve is that of one metric."""

    def __init__(self, num_steps: int, *, curve: str = "reward/mean", clock: Callable[[], float] = time.monotonic) -> None:
        self.num_steps, self._curve, self._clock = num_steps, curve, clock
        self.started_s = self._stage_s = clock()
        self.stages: list[tuple[str, float]] = []  # finished ones with their seconds, oldest first
        self.stage = ""  # the one that is going on; empty while training
        self.rewards: list[float] = []  # mean of every step, or another metric that the curve shows
        self.latest: Mapping[str, float] = {}  # metrics of the newest step
        self.groups = 0  # attempts that finished
        self.failed: Counter[str] = Counter()  # episodes by status
        self.errors: list[str] = []  # distinct messages of failed episodes, the first few
        self._step_ends: list[float] = []

    @property
    def elapsed_s(self) -> float:
        """Seconds since the run started."""
        return self._clock() - self.started_s

    @property
    def stage_s(self) -> float:
        """Seconds that the current stage has lasted."""
        return self._clock() - self._stage_s

    @property
    def step(self) -> int:
        """Steps done."""
        return int(self.latest.get("step", 0))

    @property
    def eta_s(self) -> float:
        """Seconds left at the pace of the latest steps; NaN before the second step."""
        pace = mean([later - earlier for earlier, later in itertools.pairwise(self._step_ends)])
        return pace * max(0, self.num_steps - self.step)

    @property
    def trend(self) -> float:
        """Mean reward of the last few steps minus that of the first few; NaN without a step."""
        first, last = first_and_last(self.rewards)
        return last - first

    def on_stage(self, name: str) -> None:
        """End the current stage and begin `name`."""
        self._end_stage()
        self.stage, self._stage_s = name, self._clock()

    def on_group(self, summary: GroupSummary) -> list[str]:
        """Count a finished attempt; returns messages of failures not seen before."""
        if not self.rewards:
            self._end_stage()
        self.groups += 1
        failed = [episode[0] for episode in summary.episodes if episode[0].status.failed]
        self.failed.update(str(member.status) for member in failed)
        messages = dict.fromkeys(f"{member.status}: {visible(member.error or 'no message')}" for member in failed)
        fresh = [text for text in messages if text not in self.errors][: MAX_ERRORS - len(self.errors)]
        self.errors += fresh
        return fresh

    def on_step(self, metrics: Mapping[str, float]) -> None:
        """Take in the metrics of a finished step."""
        self._end_stage()
        self.latest = dict(metrics)
        self.rewards.append(float(metrics.get(self._curve, float("nan"))))
        self._step_ends = [*self._step_ends[-ETA_STEPS:], self._clock()]

    def _end_stage(self) -> None:
        if self.stage:
            self.stages.append((self.stage, self.stage_s))
            self.stage = ""


NAN = math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """The metrics that a display shows of a step.

    Attributes:
        curve: Metric whose curve is drawn.
        parts: Returns the figures of the newest step as phrases, the most important first; a line shows those that fit.
        rows: Returns the metrics of the newest step as labelled rows, drawing curves with the given characters.
    """

    curve: str
    parts: Callable[[RunView], list[str]]
    rows: Callable[[RunView, str], Table]


def loss_form(shown: Sequence[str]) -> Form:
    """Return what a display shows of a run on given data: the loss, and the metrics of its method."""
    names = ("loss", *shown)

    def parts(view: RunView) -> list[str]:
        metrics = [f"{name} {number(view.latest.get(name, math.nan))}" for name in names]
        evaluated = [f"held out: {name} {number(view.latest[f'eval/{name}'])}" for name in names[:2] if f"eval/{name}" in view.latest]
        rate = f"learning rate {view.latest.get('learning_rate', math.nan):.1e}"
        return [step_text(view), *metrics, *left_parts(view), *evaluated, rate]

    def rows(view: RunView, blocks: str) -> Table:
        table = Table.grid(Column(style="cyan", no_wrap=True), Column(overflow="ellipsis", no_wrap=True), padding=(0, 2))
        curve = sparkline(view.rewards, SPARKLINE_WIDTH, blocks=blocks)
        table.add_row("loss", f"[bold]{number(view.latest.get('loss', math.nan))}[/bold]  {curve}  {view.trend:+.3f} since the first steps")
        for name in shown:
            table.add_row(name, number(view.latest.get(name, math.nan)))
        for name in names:
            if f"eval/{name}" in view.latest:
                table.add_row(f"held out: {name}", number(view.latest[f"eval/{name}"]))
        return table

    return Form(curve="loss", parts=parts, rows=rows)


class Display(Callback):
    """Shows a run as it goes; the terminal is given back when the run ends."""

    def __init__(self, num_steps: int, *, form: Form | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._form = form or EPISODES
        self._view = RunView(num_steps, curve=self._form.curve, clock=clock)

    def on_stage(self, name: str) -> None:
        """Show the stage that the run entered."""
        self._view.on_stage(name)

    def on_group_judged(self, event: GroupJudged) -> None:
        """Count the group, and show failures of a kind not seen before."""
        for message in self._view.on_group(event.summary):
            self._failure(message)

    def on_metrics(self, event: MetricsRow) -> None:
        """Show the metrics of a step."""
        if event.step:
            self._view.on_step(event.metrics)

    def on_run_end(self, event: RunEnd) -> None:
        """Give the terminal back."""
        self.close()

    def warn(self, message: str) -> None:
        """Show a warning."""

    def _failure(self, message: str) -> None:
        """Show a failure of a kind not seen before."""

    def close(self) -> None:
        """Give the terminal back; safe to call twice."""


class LineDisplay(Display):
    """Prints one line per stage, per step and per new kind of failure.

    Steps that end less than `min_interval_s` after the last printed one are skipped, except the first and the last. Lines fit into
    `width` columns, if it is given.
    """

    def __init__(
        self,
        num_steps: int,
        *,
        title: str,
        stream: IO[str],
        form: Form | None = None,
        width: int | None = None,
        min_interval_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(num_steps, form=form, clock=clock)
        self._stream, self._width, self._min_s, self._clock = stream, width, min_interval_s, clock
        self._printed_s, self._printed_step = -float("inf"), 0
        self._write(title)

    def on_stage(self, name: str) -> None:
        """Print the stage with the time since the start."""
        super().on_stage(name)
        self._write_now(name)

    def on_metrics(self, event: MetricsRow) -> None:
        """Print the step, unless one was printed a moment ago."""
        super().on_metrics(event)
        if event.step and (event.step >= self._view.num_steps or self._clock() - self._printed_s >= self._min_s):
            self._print_step()

    def on_evaluation_end(self, event: EvaluationEnd) -> None:
        """Print the result."""
        self._write_now(f"evaluation of step {event.step}: {event.text}")

    def close(self) -> None:
        """Print the last step if it was skipped; safe to call twice."""
        if self._view.step > self._printed_step:
            self._print_step()

    def warn(self, message: str) -> None:
        """Print it."""
        self._write_now(f"warning: {message}")

    def _failure(self, message: str) -> None:
        self._write_now(f"episode failed: {message}")

    def _print_step(self) -> None:
        self._printed_s, self._printed_step = self._clock(), self._view.step
        self._write(fitted(self._form.parts(self._view), self._width))

    def _write_now(self, text: str) -> None:
        time = f"[{duration(self._view.elapsed_s):>7}] "
        lines = [text] if self._width is None else wrapped(text, self._width - len(time))
        self._write(time + ("\n" + " " * len(time)).join(lines))

    def _write(self, line: str) -> None:
        # In a terminal of another encoding a character becomes a question mark; the error would end the run.
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        self._stream.write(line.encode(encoding, "replace").decode(encoding) + "\n")
        self._stream.flush()


def step_parts(view: RunView) -> list[str]:
    """Return the newest step as phrases, the most important first."""
    get = view.latest.get
    return [
        step_text(view),
        f"reward {number(get('reward/mean', NAN))}",
        f"score {number(get('score/mean', NAN))}",
        *left_parts(view),
        f"staleness {number(get('staleness/mean', NAN), 1)} max {number(get('staleness/max', NAN), 0)}",
        tokens_text(view.latest),
        f"idle generator {percent(get('idle/generator', NAN))} learner {percent(get('idle/learner', NAN))}",
        f"groups {ledger_text(view.latest)}",
    ]


def step_text(view: RunView) -> str:
    """Return the time and the number of the newest step."""
    return f"[{duration(view.elapsed_s):>7}] step {view.step:>{len(str(view.num_steps))}}/{view.num_steps}"


def left_parts(view: RunView) -> list[str]:
    """Return the time that is left as a phrase, where it is known."""
    return [left_text(view)] if view.step >= view.num_steps or math.isfinite(view.eta_s) else []


def fitted(parts: Sequence[str], width: int | None) -> str:
    """Return the first phrases that fit into a line, at least one; all of them without a `width`."""
    line = parts[0]
    for part in parts[1:]:
        if width is not None and len(line) + 2 + len(part) > width:
            break
        line += f"  {part}"
    return line


def tokens_text(metrics: Mapping[str, float]) -> str:
    """Return the speed of generation; the last steps of an asynchronous run have their episodes already, and sample none."""
    speed = metrics.get("tokens_per_s", NAN)
    return "nothing left to sample" if speed == 0.0 else f"{count(speed)} tokens/s"


def left_text(view: RunView) -> str:
    """Return the time that is left."""
    if view.step >= view.num_steps:
        return "all steps done"
    return "time left: known after two steps" if math.isnan(view.eta_s) else f"{duration(view.eta_s)} left"


def ledger_text(metrics: Mapping[str, float]) -> str:
    """Return the numbers of trained, filtered and dropped groups and of those in flight, in one phrase."""
    names = ("trained", "filtered", "dropped", "in_flight")
    return ", ".join(f"{number(metrics.get(f'ledger/{name}', NAN), 0)} {name.replace('_', ' ')}" for name in names)


SPARKLINE_WIDTH = 30
"""Width of a curve, with which its row fits into 80 columns."""


class LiveDisplay(Display):
    """Redraws a few lines in place; the terminal is given back by `close`, and at interpreter exit if that never came."""

    def __init__(self, num_steps: int, *, title: str, console: Console, form: Form | None = None) -> None:
        super().__init__(num_steps, form=form)
        self._title, self._console = title, console
        self._spinner = Spinner("dots" if _unicode(console) else "line")
        self._live = Live(get_renderable=self.render, console=console, refresh_per_second=4.0, transient=True)
        atexit.register(self.close)
        self._live.start()

    def on_evaluation_end(self, event: EvaluationEnd) -> None:
        """Print the result above the display."""
        self._console.print(Text.assemble((f"evaluation of step {event.step}: ", "green"), event.text))

    def warn(self, message: str) -> None:
        """Print it above the display."""
        self._console.print(Text(f"warning: {message}", style="bold yellow"))

    def _failure(self, message: str) -> None:
        self._console.print(Text(f"episode failed: {message}", style="yellow"))

    def close(self) -> None:
        """Remove the display and restore the terminal; safe to call twice."""
        atexit.unregister(self.close)
        self._live.stop()

    def render(self) -> RenderableType:
        """Return the display as it is now."""
        parts: list[RenderableType] = [Text(self._title, style="bold")]
        if self._view.rewards:
            parts += [self._progress(), self._form.rows(self._view, BLOCKS if _unicode(self._console) else ASCII_BLOCKS)]
        else:
            parts += [Text(f"  done  {name}  {duration(seconds)}", style="dim") for name, seconds in self._view.stages]
        return Group(*parts, *self._current())

    def _progress(self) -> RenderableType:
        view = self._view
        row = Table.grid(Column(no_wrap=True), Column(ratio=1), Column(no_wrap=True, justify="right"), padding=(0, 2), expand=True)
        times = f"{duration(view.elapsed_s)}, {left_text(view)}"
        row.add_row(f"step {view.step}/{view.num_steps}", ProgressBar(total=view.num_steps, completed=view.step), times)
        return row

    def _current(self) -> list[RenderableType]:
        view = self._view
        if view.rewards and not view.stage:
            return []
        waiting = f"first step: {counted(view.groups, 'group')} finished  {duration(view.elapsed_s)}"
        self._spinner.update(text=f" {view.stage}  {duration(view.stage_s)}" if view.stage else f" {waiting}")
        return [self._spinner]


def metric_rows(view: RunView, blocks: str) -> Table:
    """Return the metrics of the newest step as labelled rows."""
    get = view.latest.get
    table = Table.grid(Column(style="cyan", no_wrap=True), Column(overflow="ellipsis", no_wrap=True), padding=(0, 2))
    curve = sparkline(view.rewards, SPARKLINE_WIDTH, blocks=blocks)
    table.add_row("reward", f"[bold]{number(get('reward/mean', NAN))}[/bold]  {curve}  {view.trend:+.3f} since the first steps")
    table.add_row("score", number(get("score/mean", NAN)))
    table.add_row("staleness", f"mean {number(get('staleness/mean', NAN), 2)}, max {number(get('staleness/max', NAN), 0)}")
    table.add_row("sampling", tokens_text(view.latest))
    table.add_row("idle", f"generator {percent(get('idle/generator', NAN))}, learner {percent(get('idle/learner', NAN))}")
    table.add_row("groups", ledger_text(view.latest))
    if view.failed:
        table.add_row("failed", ", ".join(f"{status} {number_of}" for status, number_of in view.failed.most_common()), style="yellow")
    return table


EPISODES = Form(curve="reward/mean", parts=step_parts, rows=metric_rows)
"""The metrics of reinforcement learning."""


def _unicode(console: Console) -> bool:
    return console.encoding.lower().startswith("utf")

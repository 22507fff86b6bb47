"""The live display in a terminal: start-up stages, then progress, reward and how busy both sides are."""

from __future__ import annotations

import atexit
from collections.abc import Mapping

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from agentrl.core.summaries import GroupSummary
from agentrl.track.lines import NAN, ledger_text
from agentrl.track.text import ASCII_BLOCKS, BLOCKS, count, duration, number, percent, sparkline
from agentrl.track.view import RunView

SPARKLINE_WIDTH = 40


class LiveDisplay:
    """Redraws a few lines in place until it is closed.

    The terminal is given back by `close`, and at interpreter exit if that never came.

    Args:
        num_steps: Steps that the run is to take.
        title: First line.
        console: A terminal.
        refresh_per_second: How often to redraw.
    """

    def __init__(self, num_steps: int, *, title: str, console: Console, refresh_per_second: float = 4.0) -> None:
        self._view, self._title, self._console = RunView(num_steps), title, console
        self._spinner = Spinner("dots" if _unicode(console) else "line")
        self._live = Live(get_renderable=self.render, console=console, refresh_per_second=refresh_per_second, transient=True)
        atexit.register(self.close)
        self._live.start()

    def on_stage(self, name: str) -> None:
        """Show the stage with its own clock."""
        self._view.on_stage(name)

    def on_group(self, summary: GroupSummary) -> None:
        """Count it; print failures of a kind not seen before above the display."""
        for message in self._view.on_group(summary):
            self._console.print(Text(f"episode failed: {message}", style="yellow"))

    def on_step(self, metrics: Mapping[str, float]) -> None:
        """Show the step's metrics."""
        self._view.on_step(metrics)

    def on_evaluation(self, step: int, text: str) -> None:
        """Print it above the display."""
        self._console.print(Text.assemble((f"evaluation of step {step}: ", "green"), text))

    def close(self) -> None:
        """Remove the display and restore the terminal; safe to call twice."""
        atexit.unregister(self.close)
        self._live.stop()

    def render(self) -> RenderableType:
        """The display as it is now."""
        parts: list[RenderableType] = [Text(self._title, style="bold")]
        if self._view.rewards:
            parts += [self._progress(), metric_rows(self._view, BLOCKS if _unicode(self._console) else ASCII_BLOCKS)]
        else:
            parts += [Text(f"  done  {name}  {duration(seconds)}", style="dim") for name, seconds in self._view.stages]
        return Group(*parts, *self._current())

    def _progress(self) -> RenderableType:
        view = self._view
        row = Table.grid(padding=(0, 2), expand=True)
        row.add_column(no_wrap=True)
        row.add_column(ratio=1)
        row.add_column(no_wrap=True, justify="right")
        times = f"{duration(view.elapsed_s)}, {duration(view.eta_s)} left"
        row.add_row(f"step {view.step}/{view.num_steps}", ProgressBar(total=view.num_steps, completed=view.step), times)
        return row

    def _current(self) -> list[RenderableType]:
        view = self._view
        if view.stage:
            self._spinner.update(text=f" {view.stage}  {duration(view.stage_s)}")
            return [self._spinner]
        if not view.rewards:
            self._spinner.update(text=f" first step: {view.groups} groups finished  {duration(view.elapsed_s)}")
            return [self._spinner]
        return []


def metric_rows(view: RunView, blocks: str) -> Table:
    """The newest step's figures as labelled rows."""
    get = view.latest.get
    table = Table.grid(padding=(0, 2))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="ellipsis", no_wrap=True)
    curve = sparkline(view.rewards, SPARKLINE_WIDTH, blocks=blocks)
    table.add_row("reward", f"[bold]{number(get('reward/mean', NAN))}[/bold]  {curve}  {view.trend:+.3f} since the first steps")
    table.add_row("score", number(get("score/mean", NAN)))
    table.add_row("staleness", f"mean {number(get('staleness/mean', NAN), 2)}, max {number(get('staleness/max', NAN), 0)}")
    table.add_row("tokens/s", count(get("tokens_per_s", NAN)))
    table.add_row("idle", f"generator {percent(get('idle/generator', NAN))}, learner {percent(get('idle/learner', NAN))}")
    table.add_row("groups", ledger_text(view.latest))
    if view.failed:
        table.add_row("failed", ", ".join(f"{status} {number_of}" for status, number_of in view.failed.most_common()), style="yellow")
    return table


def _unicode(console: Console) -> bool:
    return console.encoding.lower().startswith("utf")

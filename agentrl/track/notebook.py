"""The display of a run in a notebook: one output of the cell, which is drawn again in place."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from rich.console import Console

from agentrl.core.callbacks import EvaluationEnd, MetricsRow
from agentrl.track.display import Display, Form, RunView, left_text
from agentrl.track.html import curve, escaped
from agentrl.track.text import BLOCKS, counted, duration

WIDTH = 110
"""Characters of a line."""
DRAW_EVERY_S = 0.3
"""Seconds between two drawings of the progress; a front end that is far away need not follow every step of a quick run."""


class Handle(Protocol):
    """The part of IPython's handle of an output that is used here."""

    def update(self, data: Mapping[str, str], *, raw: bool) -> None:
        """Replace the output."""


def _shown(data: Mapping[str, str]) -> Handle:
    from IPython import display

    untyped: Any = display
    handle: Handle = untyped.display(data, raw=True, display_id=True)
    return handle


class CellOutput(io.TextIOBase):
    """One output of a notebook cell: the progress of a run, and below it the lines that are written to this file.

    Args:
        show: Makes the output and returns its handle.
    """

    encoding = "utf-8"

    def __init__(self, show: Callable[[Mapping[str, str]], Handle] = _shown, clock: Callable[[], float] = time.monotonic) -> None:
        self._show, self._clock = show, clock
        self._handle: Handle | None = None
        self._progress, self._summary, self._lines = "", "", ""
        self._drawn_s = -DRAW_EVERY_S

    def write(self, text: str) -> int:
        """Add a part of a line."""
        self._lines += text
        return len(text)

    def flush(self) -> None:
        """Draw the output."""
        self._drawn_s = self._clock()
        below = f'<pre style="margin:4px 0">{escaped(self._lines)}</pre>' if self._lines else ""
        plain = "\n".join(filter(None, (self._summary, self._lines)))
        data = {"text/html": f"<div>{self._progress}{below}</div>", "text/plain": plain}
        if self._handle is None:
            self._handle = self._show(data)
        else:
            self._handle.update(data, raw=True)

    def progress(self, html: str, summary: str, *, at_once: bool = False) -> None:
        """Show a progress, and its `summary` where HTML is not shown; drawn `at_once`, or if that was not done a moment ago."""
        self._progress, self._summary = html, summary
        if at_once or self._clock() - self._drawn_s >= DRAW_EVERY_S:
            self.flush()


class NotebookDisplay(Display):
    """Draws stage, steps, curve and metrics in one output, and writes warnings, failures and evaluations below them."""

    def __init__(self, num_steps: int, *, title: str, output: CellOutput, form: Form | None = None) -> None:
        super().__init__(num_steps, form=form)
        self._title, self._output = title, output
        self._is_closed = False
        self._draw(at_once=True)

    def on_stage(self, name: str) -> None:
        """Show the stage."""
        super().on_stage(name)
        self._draw(at_once=True)

    def on_metrics(self, event: MetricsRow) -> None:
        """Show the step."""
        super().on_metrics(event)
        self._draw()

    def on_evaluation_end(self, event: EvaluationEnd) -> None:
        """Write the result."""
        self._line(f"evaluation of step {event.step}: {event.text}")

    def warn(self, message: str) -> None:
        """Write it."""
        self._line(f"warning: {message}")

    def close(self) -> None:
        """Leave the curve, to which the summary is added; safe to call twice."""
        self._is_closed = True
        self._draw(at_once=True)

    def _failure(self, message: str) -> None:
        self._line(f"episode failed: {message}")

    def _line(self, text: str) -> None:
        self._output.write(text + "\n")
        self._output.flush()

    def _draw(self, *, at_once: bool = False) -> None:
        view = self._view
        done = f"step {view.step}/{view.num_steps}, {duration(view.elapsed_s)}"
        now = "" if self._is_closed else _now(view)
        bar = f'<progress max="{view.num_steps}" value="{view.step}" style="width:16em"></progress>'
        rows = f'<pre style="margin:4px 0">{escaped(self._rows())}</pre>' if view.rewards and not self._is_closed else ""
        parts = [f"<b>{escaped(self._title)}</b><br>{bar} {done}{escaped(now)}", curve(view.rewards, name=self._form.curve), rows]
        self._output.progress("".join(parts), f"{self._title}\n{done}{now}", at_once=at_once)

    def _rows(self) -> str:
        console = text_console(io.StringIO())
        console.print(self._form.rows(self._view, BLOCKS))
        return str(console.file.getvalue())  # type: ignore[attr-defined]


def _now(view: RunView) -> str:
    if view.stage:
        return f", {view.stage}"
    return f", {left_text(view)}" if view.rewards else f", first step: {counted(view.groups, 'group')} finished"


def text_console(file: Any) -> Console:
    """Return a console that writes plain text to a file."""
    return Console(file=file, width=WIDTH, force_jupyter=False, force_terminal=False, color_system=None)

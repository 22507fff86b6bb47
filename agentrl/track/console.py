"""The console of a command, and the display that suits it: a terminal, a pipe, or an output of a notebook cell."""

from __future__ import annotations

import logging
import os
import warnings

from rich.console import Console

from agentrl.track.display import Display, Form, LineDisplay, LiveDisplay
from agentrl.track.notebook import CellOutput, NotebookDisplay, text_console


def open_console() -> Console:
    """Return the console of a command: standard output, or where a notebook cell called it one output of the cell."""
    console = Console()
    if not console.is_jupyter:
        return console
    # Libraries that miss ipywidgets for progress bars of their own, which a run does not show, would say so below ours.
    warnings.filterwarnings("ignore", message="IProgress not found")
    logging.getLogger("ray.widgets.util").setLevel(logging.WARNING)
    return text_console(CellOutput())


def make_display(num_steps: int, *, title: str, console: Console | None = None, form: Form | None = None) -> Display:
    """Make the display: drawn in place in a terminal and in a notebook; plain lines in a pipe, with ``TERM=dumb`` or with ``NO_COLOR``.

    Args:
        num_steps: Steps of the run.
        title: First line.
        console: Where to show it.
        form: Metrics to show.
    """
    console = console or open_console()
    if isinstance(console.file, CellOutput):
        return NotebookDisplay(num_steps, title=title, output=console.file, form=form)
    if console.is_terminal and not console.is_dumb_terminal and not os.environ.get("NO_COLOR"):
        return LiveDisplay(num_steps, title=title, console=console, form=form)
    width = console.width if console.is_terminal else None
    return LineDisplay(num_steps, title=title, stream=console.file, form=form, width=width)

"""Which display a run gets: live in a terminal, lines elsewhere."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Protocol

from rich.console import Console

from agentrl.core.summaries import GroupSummary


class Display(Protocol):
    """Shows a run as it goes."""

    def on_stage(self, name: str) -> None:
        """The run entered another stage."""

    def on_group(self, summary: GroupSummary) -> None:
        """An attempt at a group finished, failed or not."""

    def on_step(self, metrics: Mapping[str, float]) -> None:
        """A step ended; `metrics["step"]` counts from 1."""

    def on_evaluation(self, step: int, text: str) -> None:
        """The weights of `step` were evaluated; `text` is the result in one line."""

    def close(self) -> None:
        """Give the terminal back; safe to call twice."""


def make_display(num_steps: int, *, title: str, console: Console | None = None) -> Display:
    """A live display in a terminal; plain lines in a pipe, with ``TERM=dumb`` or with ``NO_COLOR``.

    Args:
        num_steps: Steps that the run is to take.
        title: What is being trained, as one line.
        console: Where to show it; standard output by default.
    """
    console = console or Console()
    if console.is_terminal and not console.is_dumb_terminal and not os.environ.get("NO_COLOR"):
        from agentrl.track.live import LiveDisplay

        return LiveDisplay(num_steps, title=title, console=console)
    from agentrl.track.lines import LineDisplay

    return LineDisplay(num_steps, title=title, stream=console.file)

"""Plain lines for logs, pipes and terminals that cannot redraw."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import IO

from agentrl.core.summaries import GroupSummary
from agentrl.track.text import count, duration, number, percent
from agentrl.track.view import RunView

Metrics = Mapping[str, float]
NAN = float("nan")


class LineDisplay:
    """One line per stage, per step and per new kind of failure.

    Steps that end less than `min_interval_s` after the last printed one are skipped, except the first and the last.

    Args:
        num_steps: Steps that the run is to take.
        title: First line.
        stream: Where lines go.
        min_interval_s: Seconds between two step lines at least.
        clock: Seconds, monotonic.
    """

    def __init__(
        self, num_steps: int, *, title: str, stream: IO[str], min_interval_s: float = 1.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._view = RunView(num_steps, clock=clock)
        self._stream, self._min_s, self._clock = stream, min_interval_s, clock
        self._printed_s, self._printed_step = -float("inf"), 0
        self._write(title)

    def on_stage(self, name: str) -> None:
        """Print the stage with the time since the start."""
        self._view.on_stage(name)
        self._write(f"[{duration(self._view.elapsed_s):>7}] {name}")

    def on_group(self, summary: GroupSummary) -> None:
        """Print failures of a kind not seen before."""
        for message in self._view.on_group(summary):
            self._write(f"[{duration(self._view.elapsed_s):>7}] episode failed: {message}")

    def on_step(self, metrics: Metrics) -> None:
        """Print the step, unless one was printed a moment ago."""
        self._view.on_step(metrics)
        if self._view.step >= self._view.num_steps or self._clock() - self._printed_s >= self._min_s:
            self._print_step()

    def on_evaluation(self, step: int, text: str) -> None:
        """Print it."""
        self._write(f"[{duration(self._view.elapsed_s):>7}] evaluation of step {step}: {text}")

    def close(self) -> None:
        """Print the last step if it was skipped; safe to call twice."""
        if self._view.step > self._printed_step:
            self._print_step()

    def _print_step(self) -> None:
        self._printed_s, self._printed_step = self._clock(), self._view.step
        self._write(step_line(self._view))

    def _write(self, line: str) -> None:
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        self._stream.write(line.encode(encoding, "replace").decode(encoding) + "\n")
        self._stream.flush()


def step_line(view: RunView) -> str:
    """The newest step as one line."""
    get = view.latest.get
    width = len(str(view.num_steps))
    return "  ".join(
        [
            f"[{duration(view.elapsed_s):>7}] step {view.step:>{width}}/{view.num_steps}",
            f"reward {number(get('reward/mean', NAN))}",
            f"score {number(get('score/mean', NAN))}",
            f"staleness {number(get('staleness/mean', NAN), 1)} max {number(get('staleness/max', NAN), 0)}",
            f"{count(get('tokens_per_s', NAN))} tokens/s",
            f"idle generator {percent(get('idle/generator', NAN))} learner {percent(get('idle/learner', NAN))}",
            f"groups {ledger_text(view.latest)}",
            f"{duration(view.eta_s)} left",
        ]
    )


def ledger_text(metrics: Metrics) -> str:
    """What became of the groups submitted so far, in one phrase."""
    names = ("trained", "filtered", "dropped", "in_flight")
    return ", ".join(f"{number(metrics.get(f'ledger/{name}', NAN), 0)} {name.replace('_', ' ')}" for name in names)

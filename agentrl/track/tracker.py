"""The one observer of a run: passes what happens on to sinks, recorder, display and summary."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console

from agentrl.config.schema import TrainConfig
from agentrl.core.errors import StorageError
from agentrl.core.protocols import MetricSink
from agentrl.core.summaries import GroupSummary
from agentrl.track.display import Display, make_display
from agentrl.track.jsonl import JsonLines, encode
from agentrl.track.sinks import open_sinks
from agentrl.track.summary import SummaryBuilder, print_summary, write_summary

MAX_LINE_BYTES = 1_000_000


class TrajectoryRecorder:
    """Appends the records that come with finished groups.

    Args:
        path: File to append to.
        max_line_bytes: A longer record has its texts and lists shortened until it fits.
        clock: Seconds since an arbitrary moment.
    """

    def __init__(self, path: Path, *, max_line_bytes: int = MAX_LINE_BYTES, clock: Callable[[], float] = time.time) -> None:
        self._lines, self._max, self._clock = JsonLines(path), max_line_bytes, clock

    def on_group(self, summary: GroupSummary) -> None:
        """Write every record of one group, with the time at which the group ended and how long it took."""
        when = {"ended_s": round(self._clock(), 4), "group_s": round(summary.seconds, 4)}
        for record in summary.records:
            self._lines.write(encode_capped({**record, **when}, self._max))

    def close(self) -> None:
        """Close the file; safe to call twice."""
        self._lines.close()


def encode_capped(record: Mapping[str, Any], max_bytes: int) -> str:
    """Encode `record` in at most `max_bytes` bytes.

    Args:
        record: A JSON-ready mapping.
        max_bytes: Longest line allowed, newline excluded; at least 100.

    Returns:
        The line. If the record was too long, its texts and lists are shortened alike and ``"clipped": true`` is added;
        if even that does not fit, only the size is kept.
    """
    line = encode(record)
    size, keep = len(line), max_bytes
    while len(line) > max_bytes and keep > 0:
        keep //= 2
        line = encode({**clip(record, keep), "clipped": True})
    return line if len(line) <= max_bytes else encode({"clipped": True, "bytes": size})


def clip(value: Any, keep: int) -> Any:
    """`value` with every text and list in it cut to its first `keep` characters or items."""
    if isinstance(value, str):
        return value if len(value) <= keep else value[:keep] + "…"
    if isinstance(value, Mapping):
        return {key: clip(item, keep) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [clip(item, keep) for item in value[:keep]]
    return value


_log = logging.getLogger(__name__)


class RunTracker:
    """Observer of a run; a context manager that closes everything, also when the run fails.

    Args:
        run_dir: Directory of the run.
        sinks: Where step metrics go.
        recorder: Where trajectories go, if they are recorded.
        display: What a person sees.
        console: Where the summary is printed.
        clock: Seconds, monotonic; the run starts now.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        sinks: MetricSink,
        recorder: TrajectoryRecorder | None,
        display: Display,
        console: Console,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run_dir, self._sinks, self._recorder, self._display, self._console = run_dir, sinks, recorder, display, console
        self._summary, self._clock, self._started_s = SummaryBuilder(), clock, clock()

    def replay(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Let the summary include steps of an earlier part of the run, which are in ``metrics.jsonl`` already."""
        for row in rows:
            metrics = {name: value for name, value in row.items() if value is not None}
            (self._summary.on_step if metrics["step"] else self._summary.on_start)(metrics)

    def on_stage(self, name: str) -> None:
        """Show it."""
        self._display.on_stage(name)

    def on_group(self, summary: GroupSummary) -> None:
        """Record its trajectories and show it."""
        if self._recorder is not None:
            self._recorder.on_group(summary)
        self._display.on_group(summary)

    def on_step(self, metrics: Mapping[str, float]) -> None:
        """Log, add up and show the metrics."""
        self._sinks.log(int(metrics["step"]), metrics)
        self._summary.on_step(metrics)
        self._display.on_step(metrics)

    def on_evaluation(self, step: int, text: str) -> None:
        """Show an evaluation in one line; its figures come with the metrics of the step."""
        self._display.on_evaluation(step, text)

    def on_start(self, metrics: Mapping[str, float]) -> None:
        """Log and add up what was measured before the first step, as the metrics of step 0."""
        self._sinks.log(0, metrics)
        self._summary.on_start(metrics)

    def finish(self, *, status: str = "finished", ledger: Mapping[str, float] | None = None, agent: str = "") -> dict[str, Any]:
        """Close everything, write ``summary.json`` and print the summary.

        Args:
            status: ``finished``, ``interrupted`` or ``failed``.
            ledger: Final accounts, named as in the metrics.
            agent: The environment as given to ``--agent``.

        Returns:
            The summary.
        """
        self.close()
        summary = self._summary.build(run_dir=self._run_dir, wall_s=self._clock() - self._started_s, ledger=ledger, status=status)
        try:
            write_summary(summary, self._run_dir / "summary.json")
        except StorageError as error:
            if status != "failed":
                raise
            _log.warning("%s", error)  # what the run failed with matters more
        print_summary(summary, console=self._console, rewards=self._summary.rewards, agent=agent)
        return summary

    def close(self) -> None:
        """Give the terminal back and close the files; safe to call twice."""
        with ExitStack() as stack:
            stack.callback(self._sinks.close)
            if self._recorder is not None:
                stack.callback(self._recorder.close)
            stack.callback(self._display.close)

    def __enter__(self) -> RunTracker:
        """This tracker."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close everything."""
        self.close()


def open_tracker(
    config: TrainConfig, run_dir: Path, *, title: str, settings: Mapping[str, Any] | None = None, console: Console | None = None
) -> RunTracker:
    """The tracker that `config` asks for.

    Args:
        config: The run's configuration.
        run_dir: Directory of the run; made if missing.
        title: What is being trained, as one line.
        settings: The resolved configuration, for Weights & Biases.
        console: Where to show the run; standard output by default.

    Raises:
        ConfigError: If Weights & Biases is asked for and not installed.
    """
    track, console = config.track, console or Console()
    run_dir.mkdir(parents=True, exist_ok=True)
    sinks = open_sinks(run_dir, tensorboard=track.tensorboard, wandb_project=track.wandb_project, config=settings or {})
    recorder = None if track.record == "none" else TrajectoryRecorder(run_dir / "trajectories.jsonl")
    display = make_display(config.run.num_steps, title=title, console=console)
    return RunTracker(run_dir, sinks=sinks, recorder=recorder, display=display, console=console)

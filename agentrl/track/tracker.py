"""The dispatcher of a run's events: built-in callbacks first, which write and show, then those of the user."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console

from agentrl.algo.advantages import estimator_facts
from agentrl.config.load import to_json
from agentrl.config.schema import TrainConfig
from agentrl.core.callbacks import METHODS, Callback, Event, MetricsRow, RunBegin, RunEnd, StepEnd
from agentrl.core.errors import CallbackError, StorageError
from agentrl.track.callbacks import CallbackLike, UserCallbacks
from agentrl.track.diagnosis import Diagnosis, Sign
from agentrl.track.display import Display, make_display
from agentrl.track.sinks import open_sinks
from agentrl.track.summary import SummaryBuilder, print_summary, write_summary

_log = logging.getLogger(__name__)

RESTARTING = "restarting"
"""Status of a part of a run that another part follows at once; it has no summary of its own."""


class RunTracker:
    """Tells the callbacks of a run what happens, and sums the run up at its end.

    Args:
        run_dir: Directory of the run.
        sinks: Built-in callbacks that write.
        display: Built-in callback that shows the run to a person.
        console: Where the summary is printed.
        users: Callbacks of the user.
        diagnosis: Built-in callback that looks for signs that the run cannot learn.
        clock: Seconds, monotonic; the run starts now.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        sinks: Sequence[Callback],
        display: Display,
        console: Console,
        users: UserCallbacks | None = None,
        diagnosis: Diagnosis | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run_dir, self._display, self._console = run_dir, display, console
        self._summary, self._users = SummaryBuilder(), users or UserCallbacks()
        self._diagnosis = diagnosis or Diagnosis(compares_groups=False, max_new_tokens=0, max_turns=0)
        self._builtin: tuple[Callback, ...] = (*sinks, self._summary, display, self._diagnosis)
        self._clock, self._started_s = clock, clock()

    def on_stage(self, name: str) -> None:
        """Show the stage that the run entered."""
        self._display.on_stage(name)

    def warn(self, sign: Sign) -> None:
        """Say a sign that the run cannot learn; the summary repeats it."""
        self._diagnosis.add(sign)

    async def begin(self, config: TrainConfig, rows: Iterable[Mapping[str, Any]] = ()) -> None:
        """Tell that the run begins, or goes on.

        Args:
            config: The resolved configuration.
            rows: Lines of ``metrics.jsonl`` from an earlier part of the run, which the summary includes.

        Raises:
            CallbackError: If a callback failed.
        """
        step = 0
        for row in rows:
            self._summary.add(row)
            step = int(row["step"])
        await self.notify(RunBegin(config=json.loads(to_json(config)), run_dir=self._run_dir, resumed=step > 0, step=step))

    async def notify(self, event: Event) -> None:
        """Tell every callback of an event; the end of a step is followed by its complete metrics.

        Raises:
            CallbackError: If a callback of the user failed.
            StorageError: If a file cannot be written.
        """
        if isinstance(event, StepEnd):
            added = await self._users.tell(event)
            event = MetricsRow(step=event.step, metrics={**event.metrics, **added})
        for callback in self._builtin:
            getattr(callback, METHODS[type(event)])(event)
        await self._users.tell(event)

    async def finish(
        self, *, status: str = "finished", ledger: Mapping[str, float] | None = None, agent: str = "", stop_reason: str | None = None
    ) -> dict[str, Any]:
        """Write ``summary.json``, tell that the run ended, close everything, and print the summary.

        Args:
            status: ``finished``, ``interrupted``, ``failed`` or ``restarting``.
            ledger: Final accounts, named as in the metrics.
            agent: The environment as given to ``--agent``.
            stop_reason: Why a callback asked for the end of the run.

        Returns:
            The summary.

        Raises:
            StorageError: If the summary cannot be written; for a run that did not fail.
            CallbackError: If a callback failed at the end of the run; the same.
        """
        wall_s = self._clock() - self._started_s
        summary = self._summary.build(run_dir=self._run_dir, wall_s=wall_s, ledger=ledger, status=status, stop_reason=stop_reason)
        summary["callbacks"] = self._users.times()
        summary["warnings"] = self._diagnosis.as_json()
        problems: list[StorageError | CallbackError] = []
        if status != RESTARTING:
            try:
                write_summary(summary, self._run_dir / "summary.json")
            except StorageError as error:
                problems.append(error)
        try:
            await self._end(RunEnd(status=status, summary=summary))
        except CallbackError as error:
            problems.append(error)
        if status != RESTARTING:
            print_summary(summary, console=self._console, rewards=self._summary.rewards, agent=agent)
        for problem in problems:
            if status == "finished":
                raise problem
            _log.warning("%s", problem)  # why the run ended matters more
        return summary

    async def _end(self, event: RunEnd) -> None:
        """Tell of the end, the display first; all are told, also when one fails."""
        try:
            with ExitStack() as stack:
                for callback in self._builtin:
                    stack.callback(callback.on_run_end, event)
        finally:
            await self._users.tell(event)


def open_tracker(
    config: TrainConfig,
    run_dir: Path,
    *,
    title: str,
    callbacks: Sequence[CallbackLike] = (),
    ask_stop: Callable[[str], None] = lambda reason: None,
    console: Console | None = None,
) -> RunTracker:
    """Open the tracker that `config` asks for.

    Args:
        config: The run's configuration.
        run_dir: Directory of the run; made if missing.
        title: What is being trained, as one line.
        callbacks: Callbacks of the user, as `load_callbacks` returns them.
        ask_stop: Called with a reason when a callback asks for the end of the run.
        console: Where to show the run; standard output by default.

    Raises:
        ConfigError: If a service is asked for whose package is not installed.
    """
    console = console or Console()
    run_dir.mkdir(parents=True, exist_ok=True)
    sinks = open_sinks(run_dir, config.track)
    display = make_display(config.run.num_steps, title=title, console=console)
    users = UserCallbacks(callbacks, timeout_s=config.track.callback_timeout_s, ask_stop=ask_stop)
    diagnosis = Diagnosis(
        compares_groups=estimator_facts(config.algo.advantage_estimator).compares_group,
        max_new_tokens=config.rollout.max_new_tokens,
        max_turns=config.rollout.max_turns,
        say=lambda sign: display.warn(f"{sign.text}. {sign.remedy}"),
    )
    return RunTracker(run_dir, sinks=sinks, display=display, console=console, users=users, diagnosis=diagnosis)

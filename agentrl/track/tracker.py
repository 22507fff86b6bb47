"""The dispatcher of a run's events: built-in callbacks first, which write, show and find signs of trouble, then those of the user."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from agentrl.core.callbacks import METHODS, Callback, Event, MetricsRow, RunBegin, RunEnd, StepEnd
from agentrl.core.errors import CallbackError, StorageError
from agentrl.core.recording import RecordBudget
from agentrl.track.callbacks import CallbackLike, UserCallbacks
from agentrl.track.console import make_display, open_console
from agentrl.track.display import Display
from agentrl.track.plan import TrackPlan
from agentrl.track.sinks import open_sinks
from agentrl.track.summary import SummaryBuilder, print_summary, write_summary

_log = logging.getLogger(__name__)

RESTARTING = "restarting"
"""Status of a part of a run that another part follows at once; it has no summary of its own."""


FLAT_STEPS = 5
"""Steps in a row in which every group is flat before that is said."""
ZERO_GRADIENT_STEPS = 3
CLIPPED_SHARE = 0.05
"""Share of the episodes of a step whose clipped rewards are said; a few outliers are what a clip is for."""
TRUNCATED_STEPS = 3
NEARLY_ALL = 0.95
"""Share of the episodes that counts as nearly all of them."""
FAILED_SHARE = 0.25
MIN_EPISODES = 32
"""Episodes before a share of failures is looked at."""
FLAT_LOW = """Either no answer is ever right (are the labels there? `agentrl doctor RUN` names the cause), or the task is too hard: \
reward partial success, or begin with easier tasks."""
FLAT_HIGH = """The reward may be at its highest for all of them: take harder tasks, or a reward that tells good from better; \
--flat-groups resample plays other tasks in their place."""
AUDITS_OFF = {
    1.0: "several ranks run a row together, or its weights are in 4 bits",
    2.0: "the learner has no memory for a second copy of the model",
}
"""Reasons that ``audit/off`` stands for."""
FAILURES = ("env_error", "timeout", "engine_error")


@dataclass(frozen=True, slots=True)
class RunWarning:
    """A warning that a run cannot learn: its name for scripts, and a sentence each about what is seen and what to do."""

    id: str
    text: str
    remedy: str


class Diagnosis(Callback):
    """Finds in the metrics of its steps that a run cannot learn, and emits each warning once.

    Args:
        max_new_tokens: Tokens of a turn at most, for remedies.
        max_turns: Turns of an episode at most, for remedies.
        context: The flag that limits the tokens of an episode, with its value, for remedies; empty: the model does.
        emit: Called with each new warning.
    """

    def __init__(
        self, *, max_new_tokens: int, max_turns: int, context: str = "", emit: Callable[[RunWarning], None] = lambda warning: None
    ) -> None:
        self._emit, self._context = emit, context
        self._max_new_tokens, self._max_turns = max_new_tokens, max_turns
        self._row: dict[str, int] = {}
        self._episodes = 0.0
        self._failed = dict.fromkeys(FAILURES, 0.0)
        self.warnings: list[RunWarning] = []

    def on_metrics(self, event: MetricsRow) -> None:
        """Take in the metrics of a step."""
        if not event.step:
            return
        metrics = event.metrics
        flat = metrics.get("group/zero_variance", 0.0) >= 1.0
        if self._in_a_row("flat-groups", flat, FLAT_STEPS):
            self.add(_flat(metrics["reward/mean"]))
        elif self._in_a_row("zero-gradient", metrics.get("grad_norm") == 0.0, ZERO_GRADIENT_STEPS) and not flat:
            self.add(_zero_gradient(metrics))
        if (clipped := metrics.get("reward/clipped", 0.0)) >= CLIPPED_SHARE:
            self.add(_clipped(event.step, clipped))
        overflowed = metrics.get("episode/overflowed", 0.0) >= NEARLY_ALL
        if self._in_a_row("observations-do-not-fit", overflowed, TRUNCATED_STEPS):
            self.add(self._too_long())
        truncated = metrics.get("episode/truncated", 0.0) >= NEARLY_ALL and not overflowed
        if self._in_a_row("all-truncated", truncated, TRUNCATED_STEPS):
            self.add(self._truncated(metrics))
        self._compare(event.step, metrics)
        self._count_failures(metrics)

    def _compare(self, step: int, metrics: Mapping[str, float]) -> None:
        """Look at the numbers that two ways to compute the same must have alike."""
        limit = metrics.get("mismatch/limit", math.inf)
        if (gap := metrics.get("mismatch/mean", 0.0)) > limit:
            self.add(_mismatch(step, gap, limit))
        if (gap := metrics.get("audit/logprob_error", 0.0)) > limit:
            self.add(_audit(step, gap, limit))
        if reason := AUDITS_OFF.get(metrics.get("audit/off", 0.0)):
            self.add(RunWarning("audits-off", f"no row is computed again in float32, because {reason}", "--audit-every 0 asks for none."))

    def _in_a_row(self, name: str, holds: bool, steps: int) -> bool:
        self._row[name] = self._row.get(name, 0) + 1 if holds else 0
        return self._row[name] == steps

    def add(self, warning: RunWarning) -> None:
        """Emit a warning, unless one of its name was emitted before."""
        if warning.id not in {known.id for known in self.warnings}:
            self.warnings.append(warning)
            self._emit(warning)

    def _too_long(self) -> RunWarning:
        text = f"nearly every episode of {TRUNCATED_STEPS} steps in a row ended because an observation did not fit into the context"
        more = f"raise {self._context}" if self._context else "take a model with a longer context"
        return RunWarning(
            "observations-do-not-fit", text, f"Return shorter observations, or {more}; `agentrl play` shows what the model reads."
        )

    def _truncated(self, metrics: Mapping[str, float]) -> RunWarning:
        text = f"nearly every episode of {TRUNCATED_STEPS} steps in a row was cut before the environment ended it"
        remedy = f"Raise --max-new-tokens (now {self._max_new_tokens}) or --max-episode-tokens, or ask for shorter answers."
        if metrics.get("episode/turns_mean", 0.0) >= self._max_turns > 1:
            remedy = f"Raise --max-turns (now {self._max_turns}), or have step return terminated=True earlier."
        return RunWarning("all-truncated", text, remedy)

    def _count_failures(self, metrics: Mapping[str, float]) -> None:
        self._episodes += metrics.get("episode/count", 0.0)
        for name in FAILURES:
            self._failed[name] += metrics.get(f"failures/{name}", 0.0)
        failed = sum(self._failed.values())
        episodes = self._episodes + failed
        if episodes >= MIN_EPISODES and failed >= FAILED_SHARE * episodes:
            most = max(FAILURES, key=self._failed.__getitem__)
            text = f"{failed / episodes:.0%} of the episodes failed, most with {most}; failed episodes are not trained on"
            remedy = f"`agentrl inspect RUN --status {most}` shows their errors; `agentrl check` finds causes."
            self.add(RunWarning("many-failures", text, remedy))


def _mismatch(step: int, gap: float, limit: float) -> RunWarning:
    text = f"engine and learner differed by {gap:.3g} nats on average in step {step}, about tokens of the same weights (limit {limit:g})"
    remedy = "If audit/logprob_error is small, the engine is at fault: its weights (--weight-transport) or its type (--engine-dtype)."
    return RunWarning("mismatch", text, f"{remedy} Else try --attn-implementation eager, then --learner-dtype float32.")


def _audit(step: int, gap: float, limit: float) -> RunWarning:
    text = f"the learner differed by {gap:.3g} nats on average from its own row alone in float32 in step {step} (limit {limit:g})"
    return RunWarning("audit", text, "Try --attn-implementation eager, then --no-share-prompts, then --learner-dtype float32.")


def _flat(reward: float) -> RunWarning:
    text = f"the episodes of every group earned the same for {FLAT_STEPS} steps (mean reward {reward:.3g}), so nothing is learned"
    return RunWarning("flat-groups", text, FLAT_LOW if reward <= 0.0 else FLAT_HIGH)


def _clipped(step: int, share: float) -> RunWarning:
    text = f"--reward-clip-range changed the rewards of {share:.0%} of the episodes in step {step}, which now count the same"
    return RunWarning("rewards-clipped", text, "Leave it out, widen it, or scale the rewards.")


def _zero_gradient(metrics: Mapping[str, float]) -> RunWarning:
    text = f"the gradient was zero for {ZERO_GRADIENT_STEPS} steps in a row, so the policy does not change"
    remedy = "Every advantage is zero or every ratio is clipped: look at advantage/abs and policy/clip_fraction."
    if metrics.get("off_policy/masked", 0.0) >= 1.0:
        remedy = "The off-policy correction masks every token: widen --off-policy-range."
    elif metrics.get("learning_rate") == 0.0:
        remedy = "The learning rate is 0: set --learning-rate."
    return RunWarning("zero-gradient", text, remedy)


class RunTracker:
    """Tells the callbacks of a run what happens, and sums the run up at its end; by its clock the run starts now."""

    def __init__(
        self,
        run_dir: Path,
        *,
        sinks: Sequence[Callback],
        display: Display,
        console: Console,
        users: UserCallbacks | None = None,
        diagnosis: Diagnosis | None = None,
        records: RecordBudget | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run_dir, self._display, self._console, self.records = run_dir, display, console, records
        self._summary, self._users = SummaryBuilder(), users or UserCallbacks()
        self._diagnosis = diagnosis or Diagnosis(max_new_tokens=0, max_turns=0)
        self._builtin: tuple[Callback, ...] = (*sinks, self._summary, display, self._diagnosis)
        self._clock, self._started_s = clock, clock()

    def on_stage(self, name: str) -> None:
        """Show the stage that the run entered."""
        self._display.on_stage(name)

    def warn(self, warning: RunWarning) -> None:
        """Emit a warning that the run cannot learn; the summary repeats it."""
        self._diagnosis.add(warning)

    async def begin(self, settings: Mapping[str, Any], rows: Iterable[Mapping[str, Any]] = ()) -> None:
        """Tell that the run begins, or goes on after the `rows` of ``metrics.jsonl``, which the summary includes.

        `settings` are those of the run by section, in JSON's own types.

        Raises:
            CallbackError: If a callback failed.
        """
        step = 0
        for row in rows:
            self._summary.add(row)
            step = int(row["step"])
        await self.notify(RunBegin(config=settings, run_dir=self._run_dir, resumed=step > 0, step=step))

    async def notify(self, event: Event) -> None:
        """Tell every callback of an event; the end of a step is followed by its complete metrics.

        Raises:
            CallbackError: If a callback of the user failed.
            StorageError: If a file cannot be written.
        """
        if isinstance(event, StepEnd):
            # The callbacks of the user come first here, because what they add belongs to the row that the built-in ones write.
            added = await self._users.tell(event)
            self._tell_builtin(event)
            event = MetricsRow(step=event.step, metrics={**event.metrics, **added})
        self._tell_builtin(event)
        await self._users.tell(event)

    def _tell_builtin(self, event: Event) -> None:
        for callback in self._builtin:
            getattr(callback, METHODS[type(event)])(event)

    async def finish(
        self, *, status: str = "finished", ledger: Mapping[str, float] | None = None, agent: str = "", stop_reason: str | None = None
    ) -> dict[str, Any]:
        """Write ``summary.json``, tell that the run ended, close everything, and print the summary.

        Args:
            status: ``finished``, ``interrupted``, ``failed`` or ``restarting``.
            ledger: Final accounts, named as in the metrics.
            agent: The environment as given to ``--agent``.
            stop_reason: Why a callback asked for the end of the run.

        Raises:
            StorageError: If the summary of a finished run cannot be written.
            CallbackError: If a callback failed at the end of a finished run.
        """
        wall_s = self._clock() - self._started_s
        summary = self._summary.build(run_dir=self._run_dir, wall_s=wall_s, ledger=ledger, status=status, stop_reason=stop_reason)
        summary["recorded"] = self.records.to_json() if self.records is not None else None
        summary["callbacks"] = self._users.times()
        summary["warnings"] = [asdict(warning) for warning in self._diagnosis.warnings]
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
            # The stack calls in reverse order, so that the display gives the terminal back before files are closed.
            with ExitStack() as stack:
                for callback in self._builtin:
                    stack.callback(callback.on_run_end, event)
        finally:
            await self._users.tell(event)


def diagnosis_of(plan: TrackPlan, emit: Callable[[RunWarning], None] = lambda warning: None) -> Diagnosis:
    """Return the diagnosis of a run."""
    limits = {"--max-episode-tokens": plan.max_episode_tokens, "--max-model-len": plan.max_model_len}
    return Diagnosis(
        max_new_tokens=plan.max_new_tokens,
        max_turns=plan.max_turns,
        context=next((f"{flag} (now {value})" for flag, value in limits.items() if value), ""),
        emit=emit,
    )


def open_tracker(
    plan: TrackPlan,
    run_dir: Path,
    *,
    title: str,
    callbacks: Sequence[CallbackLike] = (),
    ask_stop: Callable[[str], None] = lambda reason: None,
    console: Console | None = None,
) -> RunTracker:
    """Open the tracker of a run, with the callbacks of the user; a missing `run_dir` is made.

    Raises:
        ConfigError: If a service is asked for whose package is not installed.
    """
    console = console or open_console()
    run_dir.mkdir(parents=True, exist_ok=True)
    records = plan.record_budget()
    sinks = open_sinks(run_dir, plan.track, plan.record.record, records)
    display = make_display(plan.num_steps, title=title, console=console)
    users = UserCallbacks(callbacks, ask_stop=ask_stop)
    diagnosis = diagnosis_of(plan, lambda warning: display.warn(f"{warning.text}. {warning.remedy}"))
    return RunTracker(run_dir, sinks=sinks, display=display, console=console, users=users, diagnosis=diagnosis, records=records)

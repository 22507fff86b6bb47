"""What the loops of one run share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import anyio

from agentrl.core.protocols import GroupRef, Learner
from agentrl.core.summaries import GroupSummary
from agentrl.core.types import Task, Ticket
from agentrl.flow.checkpoint import Checkpoints
from agentrl.flow.health import Health
from agentrl.flow.ledger import Ledger
from agentrl.flow.metrics import Meter, Trained
from agentrl.flow.progress import Admissions, Progress
from agentrl.flow.queue import GroupQueue
from agentrl.flow.safe_point import AfterStep, Reached, SafePoint
from agentrl.flow.settings import FlowSettings
from agentrl.flow.slots import Slots
from agentrl.flow.watch import WaitBoard
from agentrl.rollout.pool import RolloutPool

Keep: TypeAlias = Callable[[GroupSummary], str | None]
"""Dynamic filter: the reason for which a group is rejected, or `None` to keep it."""


class Observer(Protocol):
    """Sees the run as it goes, for display and recording; called synchronously, so it must be quick. Its errors end the run."""

    def on_stage(self, name: str) -> None:
        """The run entered another stage."""

    def on_group(self, summary: GroupSummary) -> None:
        """An attempt at a group finished, failed or not."""

    def on_step(self, metrics: Mapping[str, float]) -> None:
        """A step ended: its weights are live. `metrics["step"]` counts from 1 and equals the live version."""


@dataclass(frozen=True, slots=True)
class Finished:
    """One attempt at a group that came to its end."""

    ticket: Ticket
    summary: GroupSummary
    ref: GroupRef


class RunState:
    """Everything the loops of one run share; each part is changed by the loop that its comment names."""

    def __init__(
        self,
        *,
        settings: FlowSettings,
        pool: RolloutPool,
        learner: Learner,
        tasks: Iterator[Task],
        keep: Keep,
        observer: Observer,
        after_step: Sequence[AfterStep],
        clock: Callable[[], float],
        progress: Progress,
        repeat: Sequence[tuple[int, Task]] = (),
        checkpoints: Checkpoints | None = None,
    ) -> None:
        self.settings, self.pool, self.learner, self.checkpoints = settings, pool, learner, checkpoints
        self.admissions = Admissions(tasks, progress, repeat)
        self.first_step = progress.step
        self.keep, self.observer, self.after_step, self.clock = keep, observer, tuple(after_step), clock
        self.slots = Slots(settings.num_slots, max(0, settings.num_steps - progress.step) * settings.groups_removed_per_step)
        self.queue = GroupQueue(settings.max_staleness, settings.groups_per_step, settings.spare_groups)
        self.ledger = Ledger()
        self.ledger.restore(trained=progress.trained, filtered=progress.filtered, dropped=progress.dropped)
        self.health = Health(settings)
        self.board = WaitBoard(clock)
        self.meter = Meter(clock)
        self.meter.start_s -= progress.elapsed_s
        self.live = Reached(progress.step)  # version of every worker's weights; publish
        self.last_step_groups = settings.groups_per_step if progress.step else 0  # train
        self.hooked = Reached(progress.step)  # steps whose hooks are done; train
        self.notes: dict[int, dict[str, float]] = {}  # step -> what its hooks have to say, until publish takes it; train
        self.reported = Reached(progress.step)  # steps whose metrics the observer has; publish
        self.running: dict[int, float] = {}  # group id -> start of its attempt; admit, collect
        self.scopes: dict[int, anyio.CancelScope] = {}  # group id -> its attempt; cancelled by train
        self.finished_in, self.finished = anyio.create_memory_object_stream[Finished](math.inf)
        self.trained_in, self.trained = anyio.create_memory_object_stream[Trained](1)
        self.latest = progress  # where the run stood after the last step, which may not be saved yet; train
        self.saved_step = progress.step  # train
        self.save_lock = anyio.Lock()  # held by the checkpoint that is being written
        self.stopped = self.training_over = False
        self.hooks: anyio.CancelScope | None = None  # the hooks after a step while they run; train
        self.publisher_idle = anyio.Semaphore(1)  # train takes it before an export, publish gives it back when live

    def close(self) -> None:
        """Close the streams between the loops; safe to call twice."""
        for stream in (self.finished_in, self.finished, self.trained_in, self.trained):
            stream.close()

    def stop(self) -> None:
        """End early: no group is run or taken any more, and those under way are given up, to be run again on resumption.

        Groups are still admitted until `train` ends, so that the accounts of the last step are those of a run that goes on.
        """
        if self.training_over:
            return
        self.stopped = True
        self.queue.stop()
        for scope in [*self.scopes.values(), *([self.hooks] if self.hooks else [])]:
            scope.cancel()

    def progress(self, step: int) -> Progress:
        """Where the run stands after `step` steps, of which the last has just been trained."""
        counts = self.ledger.check()
        return self.admissions.progress(
            step=step,
            in_flight=self.ledger.in_flight,
            trained=counts.trained,
            filtered=counts.filtered,
            dropped=counts.dropped,
            elapsed_s=self.clock() - self.meter.start_s,
        )

    @property
    def live_version(self) -> int:
        """Version of every worker's weights."""
        return self.live.value

    def safe_point(self, step: int) -> SafePoint:
        """What hooks are given after `step` steps."""
        return SafePoint(step, lambda: self.live.until(step), self.board.progress)

    def describe(self) -> str:
        """Where every group is, for a diagnosis."""
        now = self.clock()
        oldest = min(self.running.items(), key=lambda item: item[1], default=None)
        age = f", the oldest is group {oldest[0]} after {now - oldest[1]:.1f} s" if oldest else ""
        return (
            f"  groups running: {len(self.running)}{age}\n  workers: {self.pool.describe()}\n"
            f"  slots in use: {self.slots.in_use} of {self.slots.capacity}; accepted groups waiting: {self.queue.depth}; "
            f"live weights: version {self.live_version}"
        )


Spawn: TypeAlias = Callable[[Ticket], None]
"""Starts an attempt at a group beside the loops."""

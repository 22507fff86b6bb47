"""State that the loops of one run share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import anyio

from agentrl.algo.filters import GroupFilter
from agentrl.core.callbacks import Event
from agentrl.core.protocols import Learner
from agentrl.core.recording import RecordBudget
from agentrl.core.scoring import ScoreMoments
from agentrl.core.types import GroupRequest, Task
from agentrl.flow.checkpoint import Progress
from agentrl.flow.ledger import Health, Ledger
from agentrl.flow.metrics import Meter, Trained
from agentrl.flow.pool import RolloutPool
from agentrl.flow.queue import Admissions, GroupQueue, Inbox, Slots
from agentrl.flow.saving import Checkpoints
from agentrl.flow.settings import FlowSettings
from agentrl.flow.stall import WaitTracker


class AwaitableCounter:
    """A number that only grows and can be waited for."""

    def __init__(self, value: int) -> None:
        self.value = value
        self._more = anyio.Event()

    def advance(self, value: int) -> None:
        """Let it grow, and wake who waits."""
        self.value = max(self.value, value)
        # An event of anyio cannot be cleared: waiters of this one wake, later ones get a new one.
        self._more.set()
        self._more = anyio.Event()

    async def until(self, value: int) -> None:
        """Wait until it is at least `value`."""
        while self.value < value:
            await self._more.wait()


@dataclass(frozen=True, slots=True)
class SafePoint:
    """The moment between two steps at which a hook runs: while it runs, the learner holds the weights of `step` and does not train.

    Work that needs the weights in the workers alone is handed to `beside`: the learner trains the next step meanwhile, and exports it
    when the work is done. So the weights of `step` stay those of every worker, whatever time the work takes.
    """

    step: int  # steps done
    until_live: Callable[[], Awaitable[None]]  # waits until these weights are those of every worker; they stay so until hook and work end
    progress: Callable[[], None]  # to be called now and then by what takes long, so that the run is not thought to hang
    beside: Callable[[Work], None]  # takes work to be done beside the next step; its figures are added to the metrics of this step
    apart: Callable[[Work], None]  # takes work that no step waits for, only the end of the run; nobody takes what it returns


Work: TypeAlias = Callable[[], Awaitable[Mapping[str, float] | None]]
"""Work of a hook beside the next step; what it returns is added to the metrics of the step."""

AfterStep: TypeAlias = Callable[[SafePoint], Awaitable[Mapping[str, float] | None]]
"""A hook between two steps; what it returns is added to the metrics of the step."""


class Observer(Protocol):
    """Follows the run, for display and recording; the loop that tells it waits, and its errors end the run."""

    def on_stage(self, name: str) -> None:
        """Follow the beginning of another stage."""

    async def notify(self, event: Event) -> None:
        """Follow a judged group, the end of a step whose weights are live, or a checkpoint."""


class RunState:
    """Everything the loops of one run share; each part is changed by the loop that its comment names."""

    def __init__(
        self,
        *,
        settings: FlowSettings,
        pool: RolloutPool,
        learner: Learner,
        tasks: Iterator[Task],
        keep: GroupFilter,
        observer: Observer,
        after_step: Sequence[AfterStep],
        clock: Callable[[], float],
        progress: Progress,
        repeat: Sequence[tuple[int, Task]] = (),
        checkpoints: Checkpoints | None = None,
        records: RecordBudget | None = None,
    ) -> None:
        self.settings, self.pool, self.learner, self.checkpoints = settings, pool, learner, checkpoints
        self.records = records or settings.record_budget()  # of which the observer says how they are used
        self.admissions = Admissions(tasks, progress, repeat)
        self.first_step = progress.step
        self.keep, self.observer, self.after_step, self.clock = keep, observer, tuple(after_step), clock
        self.slots = Slots(settings.num_slots, max(0, settings.training.num_steps - progress.step) * settings.groups_removed_per_step)
        self.queue = GroupQueue(settings.max_staleness, settings.flow.groups_per_step, settings.oversampled_groups)
        self.ledger = Ledger()
        self.ledger.restore(trained=progress.trained, filtered=progress.filtered, dropped=progress.dropped, forked=progress.forked)
        self.health = Health(settings)
        self.score_moments = ScoreMoments(progress.score_moments)  # of the trained episodes' scores; train
        self.board = WaitTracker(clock)
        self.meter = Meter(clock)
        self.meter.start_s -= progress.elapsed_s
        self.live = AwaitableCounter(progress.step)  # version of every worker's weights; publish
        self.last_step_groups = settings.flow.groups_per_step if progress.step else 0  # train
        self.hooked = AwaitableCounter(progress.step)  # steps whose hooks are done, and what these left to be done beside; train
        self.notes: dict[int, dict[str, float]] = {}  # step -> further metrics, until publish takes them; train
        self.reported = AwaitableCounter(progress.step)  # steps whose metrics the observer has; publish
        self.running: dict[int, float] = {}  # group id -> start of its attempt; admit, collect
        self.attempts: dict[int, asyncio.Task[None]] = {}  # group id -> its attempt; cancelled by train
        self.finished = Inbox()
        self.over = asyncio.Event()  # no attempt begins any more; train
        self.trained_in, self.trained = anyio.create_memory_object_stream[Trained](1)
        self.latest = progress  # where the run stood after the last step, which may not be saved yet; train
        self.saved_step = progress.step  # train
        self.save_lock = anyio.Lock()  # held by the checkpoint that is being written
        self.stopped = self.training_over = False
        self.stop_reason = ""
        self.hooks: anyio.CancelScope | None = None  # the hooks after a step while they run; train
        self.beside: anyio.CancelScope | None = None  # what they left to be done beside the next step, while it runs; train
        self.beside_step = -1  # the step whose hooks left that last; train
        self.apart: set[anyio.CancelScope] = set()  # what hooks left to be done apart from the steps, while it runs; train
        self.publisher_idle = anyio.Semaphore(1)  # train takes it before an export, publish gives it back when live

    def close(self) -> None:
        """Close the streams between the loops; safe to call twice."""
        for stream in (self.finished, self.trained_in, self.trained):
            stream.close()

    def stop(self, reason: str = "") -> None:
        """End early: no group is run or taken any more, and those under way are given up, to be run again on resumption.

        Groups are still admitted until `train` ends, so that the accounts of the last step are those of a run that goes on.
        """
        for apart in self.apart:
            apart.cancel()
        if self.training_over:
            return
        self.stopped, self.stop_reason = True, reason
        self.queue.stop()
        for attempt in list(self.attempts.values()):
            attempt.cancel()
        for scope in (self.hooks, self.beside):
            if scope is not None:
                scope.cancel()

    def progress(self, step: int) -> Progress:
        """Return the progress after `step` steps, of which the last has just been trained."""
        counts = self.ledger.check()
        return self.admissions.progress(
            step=step,
            in_flight=self.ledger.in_flight,
            trained=counts.trained,
            filtered=counts.filtered,
            dropped=counts.dropped,
            forked=counts.forked,
            elapsed_s=self.clock() - self.meter.start_s,
            score_moments=self.score_moments.state(),
        )

    @property
    def reward_scales(self) -> Mapping[str, tuple[float, float]]:
        """Mean and standard deviation by which the scores of a new group's episodes are normalised; empty if they are not."""
        return self.score_moments.scales() if self.settings.reward.normalize_reward else {}

    @property
    def live_version(self) -> int:
        """Version of every worker's weights."""
        return self.live.value

    def safe_point(self, step: int, works: list[Work], apart: Callable[[Work], None]) -> SafePoint:
        """Return what hooks are given after `step` steps; what they leave to be done beside the next step is added to `works`."""
        return SafePoint(step, lambda: self.live.until(step), self.board.progress, works.append, apart)

    def describe(self) -> str:
        """Return the place of every group, for a diagnosis."""
        now = self.clock()
        oldest = min(self.running.items(), key=lambda item: item[1], default=None)
        age = f", the oldest is group {oldest[0]} after {now - oldest[1]:.1f} s" if oldest else ""
        return (
            f"  groups running: {len(self.running)}{age}\n  workers: {self.pool.describe()}\n"
            f"  slots in use: {self.slots.in_use} of {self.slots.capacity}; accepted groups waiting: {self.queue.depth}; "
            f"live weights: version {self.live_version}"
        )


Spawn: TypeAlias = Callable[[GroupRequest], None]
"""Starts an attempt at a group beside the loops."""


class StopRequest:
    """Asks the run it is given to for an early end; made before the run, from the same event loop's thread.

    Attributes:
        heard: True while a run listens. If none does, nothing happens after `ask` until one begins.
        reason: Why a callback asked first; empty after a signal.
        signalled_s: Monotonic time of the first signal; 0 if there was none.
    """

    def __init__(self) -> None:
        self.heard = False
        self.reason = ""
        self.signalled_s = 0.0
        self._asked, self._signalled = anyio.Event(), anyio.Event()

    def ask(self, reason: str = "") -> None:
        """Ask; safe to call twice, and the first reason counts."""
        if not self._asked.is_set():
            self.reason = reason
        if not reason and not self.signalled_s:
            self.signalled_s = time.monotonic()
            self._signalled.set()
        self._asked.set()

    async def wait(self) -> None:
        """Until somebody asks."""
        await self._asked.wait()

    async def wait_for_signal(self) -> None:
        """Until a signal asks."""
        await self._signalled.wait()


async def stop_when_asked(run: RunState, request: StopRequest) -> None:
    """End the loops early.

    Consumes the request. Produces an ended queue, cancelled groups and hooks; `train` then saves and ends the
    others. Waits for somebody to ask. Unblocked by a signal; cancelled when the loops have ended.
    """
    request.heard = True
    try:
        await request.wait()
        run.stop(request.reason)
    finally:
        request.heard = False

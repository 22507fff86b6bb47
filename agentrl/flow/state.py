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
from agentrl.core.summaries import GroupSummary
from agentrl.core.types import GroupRequest, Task
from agentrl.flow.checkpoint import Progress
from agentrl.flow.ledger import Health, Ledger
from agentrl.flow.metrics import Meter, Trained
from agentrl.flow.pool import RolloutPool
from agentrl.flow.queue import Admissions, GroupQueue, Inbox, Slots
from agentrl.flow.saving import Checkpoints
from agentrl.flow.sizes import FlowPlan
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


class View:
    """The sight of a run: the observer that is told, what each loop waits for, the figures of the step under way, and the clock."""

    def __init__(self, observer: Observer, clock: Callable[[], float], elapsed_s: float, flat: Callable[[GroupSummary], bool]) -> None:
        self.observer, self.clock = observer, clock
        self.board = WaitTracker(clock)
        self.meter = Meter(clock, flat)
        # The times of a resumed run go on where those of its earlier part ended.
        self.meter.start_s -= elapsed_s

    def waiting(self, loop: str, what: str) -> None:
        """Note what a loop waits for."""
        self.board.waiting(loop, what)

    def progress(self) -> None:
        """Note that something was done, so that the run is not thought to hang."""
        self.board.progress()

    @property
    def elapsed_s(self) -> float:
        """Seconds of the run, earlier parts included."""
        return self.clock() - self.meter.start_s


class Groups:
    """The groups of a run, from the task that is drawn to what becomes of them; each part is changed by the loops that its comment names.

    Args:
        settings: Sizes and limits.
        tasks: What to run, in order.
        keep: Says which groups are trained on.
        progress: Where the run stood when this part of it began.
        repeat: The groups that were open then, with their tasks.
        records: Decides how many episodes of each group are recorded.
    """

    def __init__(
        self,
        settings: FlowPlan,
        tasks: Iterator[Task],
        keep: GroupFilter,
        progress: Progress,
        repeat: Sequence[tuple[int, Task]] = (),
        records: RecordBudget | None = None,
    ) -> None:
        self.settings, self.keep = settings, keep
        self.records = records or RecordBudget(samples=settings.n_samples_per_prompt, least=0)  # the observer says how they are used
        self.admissions = Admissions(tasks, progress, repeat)
        self.slots = Slots(settings.num_slots, max(0, settings.training.num_steps - progress.step) * settings.groups_removed_per_step)
        self.queue = GroupQueue(settings.max_staleness, settings.flow.groups_per_step, settings.oversampled_groups)
        self.ledger = Ledger()
        self.ledger.restore(trained=progress.trained, filtered=progress.filtered, dropped=progress.dropped, forked=progress.forked)
        self.health = Health(settings)
        self.score_moments = ScoreMoments(progress.score_moments)  # of the trained episodes' scores; train
        self.running: dict[int, float] = {}  # group id -> start of its attempt; admit, collect
        self.attempts: dict[int, asyncio.Task[None]] = {}  # group id -> its attempt; cancelled by train
        self.finished = Inbox()
        self.over = asyncio.Event()  # no attempt begins any more; train
        self.stopped = False  # the run ends early: no group is run or taken any more

    @property
    def reward_scales(self) -> Mapping[str, tuple[float, float]]:
        """Mean and standard deviation by which the scores of a new group's episodes are normalised; empty if they are not."""
        return self.score_moments.scales() if self.settings.normalizes_rewards else {}

    def stop(self) -> None:
        """Give up the groups under way, to be run again on resumption, and take none any more."""
        self.stopped = True
        self.queue.stop()
        for attempt in list(self.attempts.values()):
            attempt.cancel()

    def progress(self, step: int, elapsed_s: float) -> Progress:
        """Return the progress after `step` steps, of which the last has just been trained."""
        counts = self.ledger.check()
        return self.admissions.progress(
            step=step,
            in_flight=self.ledger.in_flight,
            trained=counts.trained,
            filtered=counts.filtered,
            dropped=counts.dropped,
            forked=counts.forked,
            elapsed_s=elapsed_s,
            score_moments=self.score_moments.state(),
        )


class Publication:
    """Weights on their way from the learner to the workers."""

    def __init__(self, version: int) -> None:
        self.live = AwaitableCounter(version)  # version of every worker's weights; publish
        # One place is enough for `send_nowait`, because `idle` lets only one exported version be under way.
        self.trained_in, self.trained = anyio.create_memory_object_stream[Trained](1)
        self.idle = anyio.Semaphore(1)  # train takes it before an export, publish gives it back when live

    @property
    def version(self) -> int:
        """Version of every worker's weights."""
        return self.live.value


class Steps:
    """The steps of the learner: what is done after each of them, and where the run stands; changed by train, but for `reported`.

    Args:
        learner: Trains.
        after_step: Hooks, called in order after each step.
        checkpoints: Where to save; `None` saves nothing.
        progress: Where the run stood when this part of it began.
        last_groups: Groups of the step before.
    """

    def __init__(
        self, learner: Learner, after_step: Sequence[AfterStep], checkpoints: Checkpoints | None, progress: Progress, last_groups: int
    ) -> None:
        self.learner, self.after_step, self.checkpoints = learner, tuple(after_step), checkpoints
        self.first = progress.step
        self.latest = progress  # where the run stood after the last step, which may not be saved yet
        self.saved = progress.step
        self.save_lock = anyio.Lock()  # held by the checkpoint that is being written
        self.last_groups = last_groups
        self.over = False  # the last step is trained
        self.notes: dict[int, dict[str, float]] = {}  # step -> further metrics, until publish takes them
        self.hooked = AwaitableCounter(progress.step)  # steps whose hooks are done, and what these left to be done beside
        self.reported = AwaitableCounter(progress.step)  # steps whose metrics the observer has; publish
        self.hooks: anyio.CancelScope | None = None  # the hooks after a step while they run
        self.beside: anyio.CancelScope | None = None  # what they left to be done beside the next step, while it runs
        self.beside_step = -1  # the step whose hooks left that last
        self.apart: set[anyio.CancelScope] = set()  # what hooks left to be done apart from the steps, while it runs

    def note(self, step: int, figures: Mapping[str, float] | None) -> None:
        """Add to the metrics of a step."""
        self.notes.setdefault(step, {}).update(figures or {})


class RunState:
    """A run under way, in the parts that its loops share."""

    def __init__(self, view: View, groups: Groups, weights: Publication, steps: Steps, pool: RolloutPool) -> None:
        self.view, self.groups, self.weights, self.steps, self.pool = view, groups, weights, steps, pool
        self.stop_reason = ""

    @property
    def stopped(self) -> bool:
        """True if the run ends early."""
        return self.groups.stopped

    def close(self) -> None:
        """Close the streams between the loops; safe to call twice."""
        for stream in (self.groups.finished, self.weights.trained_in, self.weights.trained):
            stream.close()

    def stop(self, reason: str = "") -> None:
        """End early: no group is run or taken any more, and those under way are given up, to be run again on resumption.

        Groups are still admitted until `train` ends, so that the accounts of the last step are those of a run that goes on.
        """
        # Before the question whether the last step is done: the end of the run would wait for this work too.
        for apart in self.steps.apart:
            apart.cancel()
        if self.steps.over:
            return
        self.stop_reason = reason
        self.groups.stop()
        for scope in (self.steps.hooks, self.steps.beside):
            if scope is not None:
                scope.cancel()

    def describe(self) -> str:
        """Return the place of every group, for a diagnosis."""
        groups, now = self.groups, self.view.clock()
        oldest = min(groups.running.items(), key=lambda item: item[1], default=None)
        age = f", the oldest is group {oldest[0]} after {now - oldest[1]:.1f} s" if oldest else ""
        return (
            f"  groups running: {len(groups.running)}{age}\n  workers: {self.pool.describe()}\n"
            f"  slots in use: {groups.slots.in_use} of {groups.slots.capacity}; accepted groups waiting: {groups.queue.depth}; "
            f"live weights: version {self.weights.version}"
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

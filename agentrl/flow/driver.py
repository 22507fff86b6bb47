"""Runs the loops in one task group, and tells in the end what became of every group."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TypeVar

import anyio

from agentrl.algo.filters import GroupFilter, keep_all
from agentrl.algo.plan import flatness
from agentrl.core.errors import LedgerError, NothingToTrainError, TooManyFailuresError
from agentrl.core.protocols import Learner
from agentrl.core.recording import RecordBudget
from agentrl.core.types import Task
from agentrl.flow.checkpoint import Progress
from agentrl.flow.ledger import Health, LedgerCounts
from agentrl.flow.loops import admit, collect, publish, run_attempts, train_steps
from agentrl.flow.pool import RolloutPool
from agentrl.flow.saving import Checkpoints
from agentrl.flow.sizes import FlowPlan
from agentrl.flow.stall import StallReport, watch_for_stall
from agentrl.flow.state import AfterStep, Groups, Observer, Publication, RunState, Steps, StopRequest, View, stop_when_asked

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """The end of a run."""

    steps: int  # optimizer steps done, which is the version of the weights now live
    seconds: float  # of the whole run
    counts: LedgerCounts  # the ledger; nothing is in flight
    ended: str  # why it ended, for people, with the size of the last step where that was smaller
    stopped: bool = False  # whether it was asked to end early; groups may then be in flight, to be run again on resumption
    stop_reason: str = ""  # why a callback asked for the end; empty otherwise


async def train(
    *,
    settings: FlowPlan,
    pool: RolloutPool,  # started rollout workers, all at version 0
    learner: Learner,  # started learner, at version 0 or, when resuming, at that of the checkpoint
    tasks: Iterable[Task],  # what to run, in order; one is drawn per admitted group and never more than are needed
    observer: Observer,
    keep: GroupFilter = keep_all,
    after_step: Sequence[AfterStep] = (),  # called in order after each step, while the learner waits; see `SafePoint`
    progress: Progress | None = None,  # where an earlier part of the run ended; `tasks` go on from there
    repeat: Sequence[tuple[int, Task]] = (),  # the groups that were open then, with their tasks
    checkpoints: Checkpoints | None = None,  # where to save
    stop: StopRequest | None = None,  # asks for an early end, which is saved; see `agentrl.flow.state`
    report: StallReport | None = None,  # writes down what every process does when nothing progresses
    records: RecordBudget | None = None,  # decides how many episodes of each group are recorded
) -> RunResult:
    """Train until the steps are done or the tasks run out.

    Workers and learner are started before and closed after by the caller. Cancellation cancels every group and waits for it.

    Returns:
        How the run ended, earlier parts included.

    Raises:
        CheckpointError: If a checkpoint cannot be written.
        TooManyFailuresError: If too many groups failed.
        NothingToTrainError: If next to no group passed the filter, or there was nothing to train on at all.
        StallError: If nothing progressed for the stall time-out.
        Exception: The first error of any loop, worker, learner or observer, with its own traceback.
    """
    progress = progress or Progress()
    run = RunState(
        View(observer, asyncio.get_running_loop().time, progress.elapsed_s, flatness(settings.algo)),
        Groups(settings, iter(tasks), keep, progress, repeat, records),
        Publication(progress.step),
        Steps(learner, after_step, checkpoints, progress, settings.flow.groups_per_step if progress.step else 0),
        pool,
    )
    with closing(run):
        await first_error(_run_loops(run, stop or StopRequest(), report))
    return _result(run)


async def first_error(work: Awaitable[T]) -> T:
    """Await `work`, and raise a single exception in place of a group of them."""
    try:
        return await work
    except BaseExceptionGroup as group:
        failure = first_cause(group)
    raise failure  # out here, so that its own cause and context stay what they are


def first_cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first single exception inside nested groups; the others are named in a note."""
    first, *others = _leaves(group)
    for other in others:
        first.add_note(f"Then also: {type(other).__name__}: {other}")
    return first


def _leaves(error: BaseException) -> list[BaseException]:
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [leaf for inner in error.exceptions for leaf in _leaves(inner)]


async def _run_loops(run: RunState, stop: StopRequest, report: StallReport | None) -> None:
    view, groups, weights, steps, pool = run.view, run.groups, run.weights, run.steps, run.pool
    # Engines start with the initial model; a resumed run's first groups need the weights of its checkpoint.
    if weights.version:
        view.observer.on_stage(f"publishing version {weights.version}")
        await pool.publish(await steps.learner.export_weights(weights.version))
    view.meter.start(await pool.stats())
    view.observer.on_stage("first groups")
    async with anyio.create_task_group() as watch:
        watch.start_soon(watch_for_stall, view.board, groups.settings.stall_timeout_s, run.describe, view.clock, report, name="watchdog")
        watch.start_soon(pool.supervise, name="supervise")
        watch.start_soon(stop_when_asked, run, stop, name="stop")
        # A group of its own: the loops end by themselves, and their watchers are cancelled then.
        async with anyio.create_task_group() as loops:
            spawn = await loops.start(run_attempts, groups, pool, view, name="attempts")
            loops.start_soon(admit, groups, weights, view, spawn, name="admit")
            loops.start_soon(collect, groups, view, spawn, name="collect")
            loops.start_soon(train_steps, steps, groups, weights, view, name="train")
            loops.start_soon(publish, weights, groups, steps, pool, view, name="publish")
        watch.cancel_scope.cancel()


def _result(run: RunState) -> RunResult:
    counts, done, slots = run.groups.ledger.check(), run.weights.version, run.groups.slots
    if not run.stopped and (counts.in_flight or slots.in_use):
        raise LedgerError(f"the run is over with {counts.in_flight} groups in flight and {slots.in_use} slots in use")
    if not run.stopped and not done:
        raise _nothing_trained(run.groups.health, counts)
    return RunResult(
        steps=done, seconds=run.view.elapsed_s, counts=counts, ended=_ended(run), stopped=run.stopped, stop_reason=run.stop_reason
    )


def _ended(run: RunState) -> str:
    settings, done, last = run.groups.settings, run.weights.version, run.steps.last_groups
    asked, size = settings.training.num_steps, settings.flow.groups_per_step
    if run.stopped:
        return f"stopped after {done} of {asked} steps" + (f" by {run.stop_reason}" if run.stop_reason else "")
    if last < size:
        return f"tasks ran out after {done} of {asked} steps; the last step had {last} of {size} groups"
    return f"tasks ran out after {done} of {asked} steps" if done < asked else f"all {asked} steps done"


def _nothing_trained(health: Health, counts: LedgerCounts) -> Exception:
    if not counts.submitted:
        return NothingToTrainError("there is not a single task to train on: check --prompts or the environment's tasks()")
    if counts.dropped:
        return TooManyFailuresError(
            f"tasks ran out and no group could be trained on: {sum(counts.dropped.values())} of {counts.submitted} failed. "
            f"Most frequent causes:\n{health.causes()}"
        )
    return NothingToTrainError(
        f"tasks ran out and all {counts.submitted} groups were filtered ({health.filter_reasons()}): "
        "widen --score-range, change the tasks, or use --flat-groups train"
    )

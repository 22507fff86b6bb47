"""The four loops of a run, and the diagram they make.

    admit -> (group on a worker) -> collect -> queue -> train -> publish
      ^                                |                           |
      +------- slot: filtered, dropped +------- slot: live --------+

With ``max_staleness = 0`` there are only as many slots as one step has groups, and the same loops take turns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup, TaskStatus

from agentrl.core.callbacks import CheckpointWritten, GroupJudged, StepEnd
from agentrl.core.errors import LedgerError, WeightSyncError
from agentrl.core.types import GroupRequest, Status
from agentrl.flow.checkpoint import Progress
from agentrl.flow.ledger import failure_reason
from agentrl.flow.metrics import Trained
from agentrl.flow.pool import RolloutPool
from agentrl.flow.queue import TOGETHER, Accepted, Finished, Release, Taken
from agentrl.flow.saving import Checkpoints
from agentrl.flow.state import Groups, Publication, SafePoint, Spawn, Steps, View, Work

OVERSAMPLED = "oversampled"
"""Reason for which the oversampled groups of a step are dropped."""


async def admit(groups: Groups, weights: Publication, view: View, spawn: Spawn) -> None:
    """Start groups as fast as slots allow.

    Consumes slots and tasks. Produces running groups. Waits for a free slot. Unblocked by `collect` (a group was filtered or
    dropped) and by `publish` (weights are live). Ends when every group that the run needs is trained, or tasks run out.
    """
    group_request, why = groups.settings.group_requests(), "no more groups are needed"
    view.waiting("admit", "a free slot")
    while await groups.slots.acquire(group_id := groups.admissions.next_id):
        task = groups.admissions.draw()
        if task is None:
            groups.slots.release(group_id, Release.UNUSED)
            why = "the tasks are exhausted"
            break
        groups.ledger.submit(group_id)
        groups.queue.admit(group_id)
        record = groups.records.promise(group_id, weights.version + groups.settings.max_staleness + 1)
        spawn(group_request(group_id=group_id, task=task, version=weights.version, record=record, reward_scales=groups.reward_scales))
        view.waiting("admit", "a free slot")
        # `acquire` does not yield while slots are free, so with thousands of them the other loops would stand still.
        if group_id % TOGETHER == 0:
            await anyio.lowlevel.checkpoint()
    groups.queue.close()
    view.waiting("admit", f"nothing: {why}")


async def run_attempt(groups: Groups, pool: RolloutPool, view: View, group_request: GroupRequest) -> None:
    """Run one attempt at a group on a worker and hand the outcome to `collect`; one task per attempt.

    Consumes the group request. Produces a finished attempt. Waits for the worker. Unblocked by the worker, or cancelled by `train` when the
    group is not needed; then nothing is handed on.
    """
    group_id = group_request.group_id
    # A stopped run goes on admitting groups for its accounts (`RunState.stop`), and runs none of them.
    if groups.stopped or not groups.queue.waits_for(group_id):
        groups.attempts.pop(group_id, None)
        return
    groups.running[group_id] = view.clock()
    try:
        summary, ref = await pool.run_group(group_request)
    finally:
        del groups.running[group_id]
        groups.attempts.pop(group_id, None)
    if summary.group_id != group_id:
        raise LedgerError(f"a worker answered for group {summary.group_id} when asked for group {group_id}")
    if groups.queue.waits_for(group_id):
        groups.finished.put(Finished(group_request, summary, ref))


async def run_attempts(groups: Groups, pool: RolloutPool, view: View, *, task_status: TaskStatus[Spawn]) -> None:
    """Hold the attempts at groups.

    Consumes group requests, through the function that it starts with. Produces a task for each. Waits for the last step and then for the
    attempts under way; unblocked by `train`. The first attempt that raises ends the run.
    """
    async with asyncio.TaskGroup() as attempts:  # of asyncio, because a task of anyio's costs the driver 15 us more

        def spawn(group_request: GroupRequest) -> None:
            group_id = group_request.group_id
            if groups.over.is_set():
                return  # a group that failed after a run was stopped; it is run again on resumption
            groups.attempts[group_id] = attempts.create_task(run_attempt(groups, pool, view, group_request), name=f"group-{group_id}")

        task_status.started(spawn)
        await groups.over.wait()


async def collect(groups: Groups, view: View, spawn: Spawn) -> None:
    """Judge finished groups.

    Consumes finished attempts. Produces accepted groups in the queue, retries, and free slots. Waits for an attempt to finish.
    Unblocked by the workers, and ended by `train`, which closes the stream after the last group is resolved.
    """
    min_members = groups.settings.min_members  # read once: the estimator may be of a user's file
    view.waiting("collect", "a group to finish")
    while (finished := await groups.finished.take()) is not None:
        view.progress()
        if not groups.queue.waits_for(finished.group_request.group_id):
            continue  # given up as an oversampled group between its end and now
        judged = _judge(groups, finished, min_members)
        view.waiting("collect", f"the callbacks about group {judged.group_id}")
        # Callbacks come before the accounts, which may end the run because of this group.
        await view.observer.notify(judged)
        if groups.queue.waits_for(judged.group_id):  # else it was given up while a callback ran
            _carry_out(groups, view, spawn, finished, judged)
        view.waiting("collect", "a group to finish")


def _judge(groups: Groups, finished: Finished, min_members: int) -> GroupJudged:
    """Decide what becomes of a group: trained on, filtered, or, where too much of it failed, retried or dropped."""
    group_request, summary = finished.group_request, finished.summary
    verdict: Literal["kept", "filtered", "retried", "dropped"]
    if summary.num_trainable < min_members:
        reason: str | None = failure_reason(summary)
        verdict = "retried" if group_request.attempt + 1 < groups.settings.flow.max_attempts else "dropped"
        verdict = "filtered" if reason == Status.NOT_SCORED else verdict  # another attempt would find no reward either
    else:
        reason = groups.keep(summary)
        verdict = "kept" if reason is None else "filtered"
    return GroupJudged(
        group_id=group_request.group_id,
        attempt=group_request.attempt,
        task=group_request.task,
        verdict=verdict,
        reason=reason or "",
        summary=summary,
        version=group_request.version,
    )


def _carry_out(groups: Groups, view: View, spawn: Spawn, finished: Finished, judged: GroupJudged) -> None:
    """Count a group as it was judged, and pass it on, repeat it, or give its slot back."""
    group_request, summary, verdict = finished.group_request, finished.summary, judged.verdict
    failed = verdict in ("retried", "dropped")
    view.meter.attempt(summary, failed=failed, retried=verdict == "retried")
    if not failed:
        view.meter.verdict(summary, accepted=judged.kept)
    groups.health.attempt(summary, failed=failed)
    if verdict == "kept" or (verdict == "filtered" and groups.settings.flow.flat_groups == "drop"):
        groups.queue.accept(Accepted(group_request, finished.ref, summary, view.clock(), rejected=judged.reason))
    elif verdict == "retried":
        spawn(replace(group_request, attempt=group_request.attempt + 1))
    else:
        filtered = verdict == "filtered"
        (groups.ledger.filter if filtered else groups.ledger.drop)(group_request.group_id, judged.reason)
        if filtered:
            groups.admissions.closed(group_request, summary)
        groups.queue.discard(group_request.group_id)
        groups.slots.release(group_request.group_id, Release.FILTERED if filtered else Release.DROPPED)
    if not failed:
        groups.health.verdict(None if judged.kept else judged.reason)


async def train_steps(steps: Steps, groups: Groups, weights: Publication, view: View) -> None:
    """Take a step's groups, train, make the weights available, over and over.

    Consumes the oldest groups of the queue; oversampled ones are dropped, rejected ones left out. Produces new weights for `publish`.
    Waits for the oldest groups to be accepted, and before each export for the previous publication to be live, so that at most one exported
    version is under way. Unblocked by `collect` and `publish`. When tasks run out, the whole groups that are left make a last, smaller
    step. When the run is stopped early, the step under way is the last one, and a checkpoint is written.
    """
    size, ended_s = groups.settings.flow.groups_per_step, view.clock()
    async with anyio.create_task_group() as saves:
        for step in range(steps.first, groups.settings.training.num_steps):
            view.waiting("train", f"the {size} oldest groups to be accepted (step {step + 1})")
            taken = await _take(groups, step)
            if not taken.groups:
                break
            _give_up(groups, taken.oversampled)
            ended_s, steps.latest = await _train_one(steps, groups, weights, view, step, taken, ended_s)
            await _after_step(steps, groups, weights, view, step + 1, saves)
            await _checkpoint(steps, groups, view, saves)
        view.waiting("train", f"what runs beside the steps with version {steps.latest.step}, as its evaluation")
        await steps.hooked.until(steps.latest.step)
        # From here on the run ends by itself, so a late request must not mark it as stopped.
        steps.over = True
        await _checkpoint(steps, groups, view, saves)
        view.waiting("train", "the last checkpoint to be complete")
    view.waiting("train", "nothing: the last step is done")
    groups.slots.close()
    groups.finished.close()
    groups.over.set()
    weights.trained_in.close()


async def _take(groups: Groups, step: int) -> Taken:
    """Take the groups of a step. Where all of them were rejected, others are played in the place of the whole line."""
    while not (taken := await groups.queue.take(step)).groups and taken.rejected:
        _give_up(groups, taken.oversampled)
        _leave_out(groups, taken.rejected)
        for group_id in (*taken.oversampled, *(group.group_request.group_id for group in taken.rejected)):
            groups.slots.release(group_id, Release.FILTERED)
    return taken


def _leave_out(groups: Groups, rejected: Sequence[Accepted]) -> None:
    """Close the accounts of rejected groups in whose place no other is played."""
    for group in rejected:
        groups.ledger.filter(group.group_request.group_id, group.rejected)
        groups.admissions.closed(group.group_request, group.summary)


def _give_up(groups: Groups, group_ids: list[int]) -> None:
    """Drop the oversampled groups of a step; their slots stay taken until its weights are live, as those of the others do."""
    for group_id in group_ids:
        groups.ledger.drop(group_id, OVERSAMPLED)
        if (attempt := groups.attempts.pop(group_id, None)) is not None:
            attempt.cancel()


async def _train_one(
    steps: Steps, groups: Groups, weights: Publication, view: View, step: int, taken: Taken, previous_s: float
) -> tuple[float, Progress]:
    """Train step number `step` and hand its weights to `publish`; returns when training ended and where the run stood then."""
    taken_s, depth = view.clock(), groups.queue.depth
    if step == steps.first:
        view.observer.on_stage("first training step")
    steps.last_groups = len(taken.groups) + len(taken.rejected)
    view.waiting("train", f"the learner to train step {step + 1}")
    result = await steps.learner.train(step, [group.ref for group in taken.groups])
    trained_s = view.clock()
    groups.ledger.train((group.group_request.group_id for group in taken.groups), sum(group.summary.num_forked for group in taken.groups))
    _leave_out(groups, taken.rejected)
    for group in taken.groups:
        groups.admissions.closed(group.group_request, group.summary)
        groups.score_moments.add(member.model_scores for member in group.summary.trainable)
    steps.note(step + 1, groups.admissions.step_done())
    # Now, because publication frees slots, and then the next step's groups begin to count.
    progress = groups.progress(step + 1, view.elapsed_s)
    view.waiting("train", f"what runs beside step {step + 1} with version {step}, as its evaluation")
    await steps.hooked.until(step)
    if steps.beside_step == step:
        steps.note(step + 1, {"eval/wait_s": view.clock() - trained_s})
    view.waiting("train", f"the publication before version {step + 1}")
    await weights.idle.acquire()
    view.waiting("train", f"the learner to export version {step + 1}")
    exports_s = view.clock()
    update = await steps.learner.export_weights(step + 1)
    weights.trained_in.send_nowait(
        Trained(
            version=step + 1,
            groups=taken.groups,
            oversampled=taken.oversampled,
            rejected=[group.group_request.group_id for group in taken.rejected],
            result=result,
            update=update,
            interval_s=trained_s - previous_s,
            learner_s=trained_s - taken_s,
            export_s=view.clock() - exports_s,
            queue_depth=depth,
            taken_s=taken_s,
            exported_s=view.clock(),
        )
    )
    return trained_s, progress


async def _checkpoint(steps: Steps, groups: Groups, view: View, saves: TaskGroup) -> None:
    """Save, while generation goes on; the next step begins as soon as the learner has written its part."""
    step = steps.latest.step
    if steps.checkpoints is None or step == steps.saved or not (groups.stopped or steps.checkpoints.due(step)):
        return
    view.waiting("train", f"the checkpoint of step {step}")
    await saves.start(_save, steps, view, steps.checkpoints, steps.latest, name="save")
    steps.saved = step
    view.progress()


async def _save(steps: Steps, view: View, checkpoints: Checkpoints, progress: Progress, *, task_status: TaskStatus[None]) -> None:
    """One checkpoint after the other; complete only when the step's metrics are written, so that none is missing after a crash."""
    async with steps.save_lock:
        async with checkpoints.saving(progress) as path:
            task_status.started()
            await steps.reported.until(progress.step)
        await view.observer.notify(CheckpointWritten(step=progress.step, path=path))


async def _after_step(steps: Steps, groups: Groups, weights: Publication, view: View, step: int, tasks: TaskGroup) -> None:
    """Run the hooks; the step's metrics wait for what they say, and nothing of it if the run is stopped meanwhile.

    The learner goes on with the next step while `tasks` do what the hooks left for that.
    """
    works: list[Work] = []

    def apart(work: Work) -> None:
        tasks.start_soon(_apart, steps, groups, work, name=f"apart since step {step}")

    point = SafePoint(step, lambda: weights.live.until(step), view.progress, works.append, apart)
    if not groups.stopped:
        with anyio.CancelScope() as steps.hooks:
            for hook in steps.after_step:
                view.waiting("train", f"{getattr(hook, '__qualname__', type(hook).__name__)} after step {step}")
                steps.note(step, await hook(point))
                view.progress()
        steps.hooks = None
    if works:
        tasks.start_soon(_beside, steps, groups, view, step, works, name=f"beside step {step + 1}")
    else:
        steps.hooked.advance(step)


async def _beside(steps: Steps, groups: Groups, view: View, step: int, works: list[Work]) -> None:
    """Do what the hooks after `step` left to be done beside the next one; it leaves no figures if the run is stopped meanwhile.

    Consumes live weights, which stay so: the next version is exported afterwards. Produces figures of the step. Waits for the workers.
    """
    steps.beside_step = step
    with anyio.CancelScope() as steps.beside:
        for work in [] if groups.stopped else works:
            steps.note(step, await work())
            view.progress()
    steps.beside = None
    steps.hooked.advance(step)


async def _apart(steps: Steps, groups: Groups, work: Work) -> None:
    """Do work that no step waits for; given up if the run is stopped.

    Consumes and produces what the hook says. Waits for engines of its own, never for a loop; the end of the run waits for it.
    """
    with anyio.CancelScope() as scope:
        steps.apart.add(scope)
        try:
            if not groups.stopped:
                await work()
        finally:
            steps.apart.discard(scope)


async def publish(weights: Publication, groups: Groups, steps: Steps, pool: RolloutPool, view: View) -> None:
    """Make each step's weights live and end the step.

    Consumes trained steps, in order, none skipped. Produces live weights, free slots and the step's metrics. Waits for a trained
    step, for every worker to confirm its version, then for the hooks after the step. Unblocked by `train` and the workers; ended by
    `train`, which closes the stream.
    """
    view.waiting("publish", "a trained step")
    async for trained in weights.trained:
        if trained.update.version != trained.version:
            raise WeightSyncError(f"the learner exported version {trained.update.version} instead of {trained.version}")
        view.waiting("publish", f"every worker to load version {trained.version}")
        starts_s = view.clock()
        await pool.publish(trained.update)
        publish_s = view.clock() - starts_s
        weights.live.advance(trained.version)
        weights.idle.release()
        # Before the step's figures are put together, so that engines have new groups meanwhile.
        for group in trained.groups:
            groups.slots.release(group.group_request.group_id, Release.TRAINED)
        for group_id in trained.oversampled:
            groups.slots.release(group_id, Release.OVERSAMPLED)
        for group_id in trained.rejected:
            groups.slots.release(group_id, Release.LEFT_OUT)
        view.waiting("publish", "the engines' counters")
        stats = await pool.stats()
        counts = groups.ledger.check()
        metrics = view.meter.step(trained, publish_s=publish_s, stats=stats, counts=counts, running=len(groups.running))
        metrics |= pool.metrics() | (steps.checkpoints.metrics() if steps.checkpoints else {})
        view.waiting("publish", f"the hooks after step {trained.version}")
        await steps.hooked.until(trained.version)
        view.waiting("publish", f"the callbacks after step {trained.version}")
        metrics |= steps.notes.pop(trained.version, {})
        await view.observer.notify(_step_end(view, trained, metrics, (starts_s, starts_s + publish_s)))
        steps.reported.advance(trained.version)
        view.progress()
        view.waiting("publish", "a trained step")


def _step_end(view: View, trained: Trained, metrics: dict[str, float], published_s: tuple[float, float]) -> StepEnd:
    """Tell of a step, with its groups and the times of its parts; `published_s` is when its publication began and ended."""
    times = {**trained.times, "publishing_s": published_s[0], "live_s": published_s[1], "now_s": view.clock()}
    groups = tuple(group.group_request.group_id for group in trained.groups)
    return StepEnd(step=trained.version, metrics=metrics, groups=groups, oversampled=tuple(trained.oversampled), times=times)

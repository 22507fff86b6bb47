"""The four loops of a run, and the diagram they make.

    admit -> (group on a worker) -> collect -> queue -> train -> publish
      ^                                |                           |
      +------- slot: filtered, dropped +------- slot: live --------+

With ``max_staleness = 0`` there are only as many slots as one step has groups, and the same loops take turns.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Literal

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup, TaskStatus

from agentrl.core.callbacks import CheckpointWritten, GroupJudged, StepEnd
from agentrl.core.errors import LedgerError, WeightSyncError
from agentrl.core.types import GroupRequest
from agentrl.flow.checkpoint import Progress
from agentrl.flow.ledger import failure_reason
from agentrl.flow.metrics import Trained
from agentrl.flow.queue import TOGETHER, Accepted, Finished, Release, Taken
from agentrl.flow.saving import Checkpoints
from agentrl.flow.state import RunState, Spawn, Work

OVERSAMPLED = "oversampled"
"""Reason for which the oversampled groups of a step are dropped."""


async def admit(run: RunState, spawn: Spawn) -> None:
    """Start groups as fast as slots allow.

    Consumes slots and tasks. Produces running groups. Waits for a free slot. Unblocked by `collect` (a group was filtered or
    dropped) and by `publish` (weights are live). Ends when every group that the run needs is trained, or tasks run out.
    """
    group_request, why = run.settings.group_requests(), "no more groups are needed"
    run.board.waiting("admit", "a free slot")
    while await run.slots.acquire(group_id := run.admissions.next_id):
        task = run.admissions.draw()
        if task is None:
            run.slots.release(group_id, Release.UNUSED)
            why = "the tasks are exhausted"
            break
        run.ledger.submit(group_id)
        run.queue.admit(group_id)
        record = run.records.promise(group_id, run.live_version + run.settings.max_staleness + 1)
        spawn(group_request(group_id=group_id, task=task, version=run.live_version, record=record, reward_scales=run.reward_scales))
        run.board.waiting("admit", "a free slot")
        # `acquire` does not yield while slots are free, so with thousands of them the other loops would stand still.
        if group_id % TOGETHER == 0:
            await anyio.lowlevel.checkpoint()
    run.queue.close()
    run.board.waiting("admit", f"nothing: {why}")


async def run_attempt(run: RunState, group_request: GroupRequest) -> None:
    """Run one attempt at a group on a worker and hand the outcome to `collect`; one task per attempt.

    Consumes the group request. Produces a finished attempt. Waits for the worker. Unblocked by the worker, or cancelled by `train` when the
    group is not needed; then nothing is handed on.
    """
    group_id = group_request.group_id
    if run.stopped or not run.queue.waits_for(group_id):
        run.attempts.pop(group_id, None)
        return
    run.running[group_id] = run.clock()
    try:
        summary, ref = await run.pool.run_group(group_request)
    finally:
        del run.running[group_id]
        run.attempts.pop(group_id, None)
    if summary.group_id != group_id:
        raise LedgerError(f"a worker answered for group {summary.group_id} when asked for group {group_id}")
    if run.queue.waits_for(group_id):
        run.finished.put(Finished(group_request, summary, ref))


async def run_attempts(run: RunState, *, task_status: TaskStatus[Spawn]) -> None:
    """Hold the attempts at groups.

    Consumes group requests, through the function that it starts with. Produces a task for each. Waits for the last step and then for the
    attempts under way; unblocked by `train`. The first attempt that raises ends the run.
    """
    async with asyncio.TaskGroup() as attempts:  # of asyncio, because a task of anyio's costs the driver 15 us more

        def spawn(group_request: GroupRequest) -> None:
            group_id = group_request.group_id
            if run.over.is_set():
                return  # a group that failed after a run was stopped; it is run again on resumption
            run.attempts[group_id] = attempts.create_task(run_attempt(run, group_request), name=f"group-{group_id}")

        task_status.started(spawn)
        await run.over.wait()


async def collect(run: RunState, spawn: Spawn) -> None:
    """Judge finished groups.

    Consumes finished attempts. Produces accepted groups in the queue, retries, and free slots. Waits for an attempt to finish.
    Unblocked by the workers, and ended by `train`, which closes the stream after the last group is resolved.
    """
    min_members = run.settings.min_members  # read once: the estimator may be of a user's file
    run.board.waiting("collect", "a group to finish")
    while (finished := await run.finished.take()) is not None:
        run.board.progress()
        if not run.queue.waits_for(finished.group_request.group_id):
            continue  # given up as an oversampled group between its end and now
        judged = _judge(run, finished, min_members)
        run.board.waiting("collect", f"the callbacks about group {judged.group_id}")
        await run.observer.notify(judged)
        if run.queue.waits_for(judged.group_id):  # else it was given up while a callback ran
            _carry_out(run, spawn, finished, judged)
        run.board.waiting("collect", "a group to finish")


def _judge(run: RunState, finished: Finished, min_members: int) -> GroupJudged:
    """Decide what becomes of a group: trained on, filtered, or, where too much of it failed, retried or dropped."""
    group_request, summary = finished.group_request, finished.summary
    verdict: Literal["kept", "filtered", "retried", "dropped"]
    if summary.num_trainable < min_members:
        verdict = "retried" if group_request.attempt + 1 < run.settings.flow.max_attempts else "dropped"
        reason: str | None = failure_reason(summary)
    else:
        reason = run.keep(summary)
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


def _carry_out(run: RunState, spawn: Spawn, finished: Finished, judged: GroupJudged) -> None:
    """Count a group as it was judged, and pass it on, repeat it, or give its slot back."""
    group_request, summary, verdict = finished.group_request, finished.summary, judged.verdict
    failed = verdict in ("retried", "dropped")
    run.meter.attempt(summary, failed=failed, retried=verdict == "retried")
    if not failed:
        run.meter.verdict(summary, accepted=judged.kept)
    run.health.attempt(summary, failed=failed)
    if verdict == "kept":
        run.queue.accept(Accepted(group_request, finished.ref, summary, run.clock()))
    elif verdict == "retried":
        spawn(replace(group_request, attempt=group_request.attempt + 1))
    else:
        filtered = verdict == "filtered"
        (run.ledger.filter if filtered else run.ledger.drop)(group_request.group_id, judged.reason)
        if filtered:
            run.admissions.closed(group_request, summary)
        run.queue.discard(group_request.group_id)
        run.slots.release(group_request.group_id, Release.FILTERED if filtered else Release.DROPPED)
    if not failed:
        run.health.verdict(None if judged.kept else judged.reason)


async def train_steps(run: RunState) -> None:
    """Take a step's groups, train, make the weights available, over and over.

    Consumes the oldest groups of the queue; oversampled ones are dropped. Produces new weights for `publish`. Waits for the oldest groups
    to be accepted, and before each export for the previous publication to be live, so that at most one exported version is under way.
    Unblocked by `collect` and `publish`. When tasks run out, the whole groups that are left make a last, smaller step. When the run
    is stopped early, the step under way is the last one, and a checkpoint is written.
    """
    size, ended_s = run.settings.flow.groups_per_step, run.clock()
    async with anyio.create_task_group() as saves:
        for step in range(run.first_step, run.settings.training.num_steps):
            run.board.waiting("train", f"the {size} oldest groups to be accepted (step {step + 1})")
            taken = await run.queue.take(step)
            if not taken.groups:
                break
            _give_up(run, taken.oversampled)
            ended_s, run.latest = await _train_one(run, step, taken, ended_s)
            await _after_step(run, step + 1, saves)
            await _checkpoint(run, saves)
        run.board.waiting("train", f"what runs beside the steps with version {run.latest.step}, as its evaluation")
        await run.hooked.until(run.latest.step)
        run.training_over = True
        await _checkpoint(run, saves)
        run.board.waiting("train", "the last checkpoint to be complete")
    run.board.waiting("train", "nothing: the last step is done")
    run.slots.close()
    run.finished.close()
    run.over.set()
    run.trained_in.close()


def _give_up(run: RunState, group_ids: list[int]) -> None:
    """Drop the oversampled groups of a step; their slots stay taken until its weights are live, as those of the others do."""
    for group_id in group_ids:
        run.ledger.drop(group_id, OVERSAMPLED)
        if (attempt := run.attempts.pop(group_id, None)) is not None:
            attempt.cancel()


async def _train_one(run: RunState, step: int, taken: Taken, previous_s: float) -> tuple[float, Progress]:
    """Train step number `step` and hand its weights to `publish`; returns when training ended and where the run stood then."""
    groups = taken.groups
    taken_s, depth = run.clock(), run.queue.depth
    if step == run.first_step:
        run.observer.on_stage("first training step")
    run.last_step_groups = len(groups)
    run.board.waiting("train", f"the learner to train step {step + 1}")
    result = await run.learner.train(step, [group.ref for group in groups])
    trained_s = run.clock()
    run.ledger.train((group.group_request.group_id for group in groups), sum(group.summary.num_forked for group in groups))
    for group in groups:
        run.admissions.closed(group.group_request, group.summary)
        run.score_moments.add(member.model_scores for member in group.summary.trainable)
    run.notes.setdefault(step + 1, {}).update(run.admissions.step_done())
    progress = run.progress(step + 1)  # now, because publication frees slots, and then the next step's groups begin to count
    run.board.waiting("train", f"what runs beside step {step + 1} with version {step}, as its evaluation")
    await run.hooked.until(step)
    if run.beside_step == step:
        run.notes.setdefault(step + 1, {})["eval/wait_s"] = run.clock() - trained_s
    run.board.waiting("train", f"the publication before version {step + 1}")
    await run.publisher_idle.acquire()
    run.board.waiting("train", f"the learner to export version {step + 1}")
    exports_s = run.clock()
    update = await run.learner.export_weights(step + 1)
    run.trained_in.send_nowait(
        Trained(
            version=step + 1,
            groups=groups,
            oversampled=taken.oversampled,
            result=result,
            update=update,
            interval_s=trained_s - previous_s,
            learner_s=trained_s - taken_s,
            export_s=run.clock() - exports_s,
            queue_depth=depth,
            taken_s=taken_s,
            exported_s=run.clock(),
        )
    )
    return trained_s, progress


async def _checkpoint(run: RunState, saves: TaskGroup) -> None:
    """Save, while generation goes on; the next step begins as soon as the learner has written its part."""
    step = run.latest.step
    if run.checkpoints is None or step == run.saved_step or not (run.stopped or run.checkpoints.due(step)):
        return
    run.board.waiting("train", f"the checkpoint of step {step}")
    await saves.start(_save, run, run.checkpoints, run.latest, name="save")
    run.saved_step = step
    run.board.progress()


async def _save(run: RunState, checkpoints: Checkpoints, progress: Progress, *, task_status: TaskStatus[None]) -> None:
    """One checkpoint after the other; complete only when the step's metrics are written, so that none is missing after a crash."""
    async with run.save_lock:
        async with checkpoints.saving(progress) as path:
            task_status.started()
            await run.reported.until(progress.step)
        await run.observer.notify(CheckpointWritten(step=progress.step, path=path))


async def _after_step(run: RunState, step: int, tasks: TaskGroup) -> None:
    """Run the hooks; the step's metrics wait for what they say, and nothing of it if the run is stopped meanwhile.

    The learner goes on with the next step while `tasks` do what the hooks left for that.
    """
    works: list[Work] = []

    def apart(work: Work) -> None:
        tasks.start_soon(_apart, run, work, name=f"apart since step {step}")

    if not run.stopped:
        with anyio.CancelScope() as run.hooks:
            for hook in run.after_step:
                run.board.waiting("train", f"{getattr(hook, '__qualname__', type(hook).__name__)} after step {step}")
                run.notes.setdefault(step, {}).update(await hook(run.safe_point(step, works, apart)) or {})
                run.board.progress()
        run.hooks = None
    if works:
        tasks.start_soon(_beside, run, step, works, name=f"beside step {step + 1}")
    else:
        run.hooked.advance(step)


async def _beside(run: RunState, step: int, works: list[Work]) -> None:
    """Do what the hooks after `step` left to be done beside the next one; it leaves no figures if the run is stopped meanwhile.

    Consumes live weights, which stay so: the next version is exported afterwards. Produces figures of the step. Waits for the workers.
    """
    run.beside_step = step
    with anyio.CancelScope() as run.beside:
        for work in [] if run.stopped else works:
            run.notes.setdefault(step, {}).update(await work() or {})
            run.board.progress()
    run.beside = None
    run.hooked.advance(step)


async def _apart(run: RunState, work: Work) -> None:
    """Do work that no step waits for; given up if the run is stopped.

    Consumes and produces what the hook says. Waits for engines of its own, never for a loop; the end of the run waits for it.
    """
    with anyio.CancelScope() as scope:
        run.apart.add(scope)
        try:
            if not run.stopped:
                await work()
        finally:
            run.apart.discard(scope)


async def publish(run: RunState) -> None:
    """Make each step's weights live and end the step.

    Consumes trained steps, in order, none skipped. Produces live weights, free slots and the step's metrics. Waits for a trained
    step, for every worker to confirm its version, then for the hooks after the step. Unblocked by `train` and the workers; ended by
    `train`, which closes the stream.
    """
    run.board.waiting("publish", "a trained step")
    async for trained in run.trained:
        if trained.update.version != trained.version:
            raise WeightSyncError(f"the learner exported version {trained.update.version} instead of {trained.version}")
        run.board.waiting("publish", f"every worker to load version {trained.version}")
        starts_s = run.clock()
        await run.pool.publish(trained.update)
        publish_s = run.clock() - starts_s
        run.live.advance(trained.version)
        run.publisher_idle.release()
        # Before the step's figures are put together, so that engines have new groups meanwhile.
        for group in trained.groups:
            run.slots.release(group.group_request.group_id, Release.TRAINED)
        for group_id in trained.oversampled:
            run.slots.release(group_id, Release.OVERSAMPLED)
        run.board.waiting("publish", "the engines' counters")
        stats = await run.pool.stats()
        counts = run.ledger.check()
        metrics = run.meter.step(trained, publish_s=publish_s, stats=stats, counts=counts, running=len(run.running))
        metrics |= run.pool.metrics() | (run.checkpoints.metrics() if run.checkpoints else {})
        run.board.waiting("publish", f"the hooks after step {trained.version}")
        await run.hooked.until(trained.version)
        run.board.waiting("publish", f"the callbacks after step {trained.version}")
        metrics |= run.notes.pop(trained.version, {})
        await run.observer.notify(_step_end(run, trained, metrics, (starts_s, starts_s + publish_s)))
        run.reported.advance(trained.version)
        run.board.progress()
        run.board.waiting("publish", "a trained step")


def _step_end(run: RunState, trained: Trained, metrics: dict[str, float], published_s: tuple[float, float]) -> StepEnd:
    """Tell of a step, with its groups and the times of its parts; `published_s` is when its publication began and ended."""
    times = {**trained.times, "publishing_s": published_s[0], "live_s": published_s[1], "now_s": run.clock()}
    groups = tuple(group.group_request.group_id for group in trained.groups)
    return StepEnd(step=trained.version, metrics=metrics, groups=groups, oversampled=tuple(trained.oversampled), times=times)

"""One training run from a checked configuration to its summary: the wiring of all layers, in order."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from agentrl.algo.plan import has_ratios
from agentrl.algo.teacher_specs import teacher_specs
from agentrl.api.checking import REHEARSAL, rehearse
from agentrl.api.hub import check_hub, push_model
from agentrl.api.rewinding import rewind_records
from agentrl.api.scaling import answer_requests
from agentrl.assets import model_path
from agentrl.certify.before import refuse_wrong
from agentrl.check.findings import CheckSettings
from agentrl.cluster.processes import ClusterPlan
from agentrl.cluster.runtime import Runtime, evaluators_of, learner_beside, make_runtime, pool_of
from agentrl.config.mapping import to_json
from agentrl.config.model_defaults import described, rate_warning
from agentrl.config.plugins import plugins
from agentrl.core.callbacks import MetricsRow
from agentrl.core.directories import make_directory
from agentrl.core.errors import CheckpointError, ClusterError, ConfigError, DamagedCheckpointError, LearnerDeadError
from agentrl.core.paths import shown_path
from agentrl.core.plugins import KEPT, copy_plugins
from agentrl.core.process import collect_rarely, on_thread
from agentrl.core.protocols import Learner
from agentrl.core.redaction import redacted
from agentrl.core.remote import absolute
from agentrl.core.tokenizers import check_teacher, load_tokenizer
from agentrl.core.types import Task
from agentrl.env.tasks import TaskSource
from agentrl.evaluation.apart import evaluations_apart
from agentrl.evaluation.evaluations import open_evaluations
from agentrl.flow.checkpoint import INPUTS, Progress, latest_checkpoint, repeated_tasks
from agentrl.flow.driver import RunResult
from agentrl.flow.driver import train as run_loops
from agentrl.flow.past_weights import PastWeights
from agentrl.flow.plan import TrainingConfig
from agentrl.flow.saving import Checkpoints
from agentrl.flow.stall import StallReport
from agentrl.flow.state import StopRequest
from agentrl.flow.uploads import UPLOAD_TIMEOUT_S, Uploads
from agentrl.resolve.demonstrations import demonstrations
from agentrl.resolve.inputs import Inputs, keep_code, of_questions, read_inputs, refuse_changed, shown_changes
from agentrl.resolve.memory import device_sign, gpu_bytes, memory_sign
from agentrl.resolve.parts import DEMONSTRATIONS, check_model
from agentrl.resolve.plan import RunPlan
from agentrl.resolve.saved import ResumePoint, resume_point
from agentrl.resolve.sizing.memory import saved_bytes
from agentrl.resolve.storage import storage_sign
from agentrl.rollout.episode_plan import EpisodePlan
from agentrl.rollout.partner_specs import past_spec
from agentrl.rollout.tasks import check_prompts, context_length, missing_labels
from agentrl.rollout.teachers import HttpTeacher
from agentrl.suites.load import keep_environment
from agentrl.track.callbacks import CallbackLike, load_callbacks
from agentrl.track.text import counted
from agentrl.track.tracker import RESTARTING, RunTracker, RunWarning, open_tracker
from agentrl.tune.prepare import encode_demonstrations, write_encoded

_log = logging.getLogger(__name__)
T = TypeVar("T")

PROMPTS_CHECKED = 1000
"""Tasks whose prompts are measured before training begins."""
PROOF_S = 1.5
"""Seconds that the start of processes waits for the comparison of the learner with the model, which then goes on beside it."""
MAX_LEARNER_RESTARTS = 3
"""Times that a run goes on from its last checkpoint by itself when a learner rank dies."""
STOP_MARGIN_S = 5.0
"""Seconds of ``--stop-timeout-s``, at most half of them, that are left for ending in order after the wait for a copy."""


async def train(plan: RunPlan, stop: StopRequest | None = None, callbacks: Sequence[CallbackLike] = ()) -> RunResult:
    """Train as `plan` says; on return everything is saved and nothing is left running.

    When a learner rank dies, everything is started again from the last checkpoint, and when that is found damaged, from the newest
    other one. `stop` asks for an early end, from which the run can be resumed; `callbacks` come besides those that the plan names.

    Raises:
        ConfigError: If the tasks or the model cannot be used.
        AgentRLError: If the run failed; what was measured until then is in the run directory.
    """
    collect_rarely()
    config = plan.settings
    # Asked before anything starts, so that a long run does not end with a token that the hub refuses.
    await on_thread(check_hub, config.record.push_to_hub)
    run = config.training
    left, lost = MAX_LEARNER_RESTARTS, ""
    while True:
        try:
            return await _uploaded(plan, await _train_once(plan, stop, callbacks, last=not left))
        except DamagedCheckpointError as error:
            _log.warning("%s; going on from the newest other one", error)
        except LearnerDeadError as error:
            if not left or not _can_go_on(run):
                raise LearnerDeadError(f"{error}. {_what_is_left(run)}") from error
            left, lost = left - 1, str(error)
            _log.warning("%s; going on from the last checkpoint, %d more times at most", error, left)
            plan = plan.resuming()
        except ClusterError as error:
            if not lost:
                raise
            raise LearnerDeadError(f"{lost}, and the learner cannot be placed again: {error} {_what_is_left(run)}") from error


async def _uploaded(plan: RunPlan, result: RunResult) -> RunResult:
    name, run_dir = plan.settings.record.push_to_hub, plan.settings.training.run_dir
    if name and run_dir is not None and not result.stopped:
        address = await on_thread(push_model, run_dir / "model", name)
        sys.stdout.write(f"model        {address}\n")
    return result


def _what_is_left(run: TrainingConfig) -> str:
    """Return how a run whose learner is lost can be continued, in a sentence."""
    if _can_go_on(run):
        return f"Continue it with --resume {shown_path(str(run.run_dir))} when the cluster has room."
    return "There is no checkpoint to go on from; --save-every N writes one every N steps."


def _can_go_on(run: TrainingConfig) -> bool:
    return run.run_dir is not None and latest_checkpoint(run.run_dir) is not None


async def _train_once(plan: RunPlan, stop: StopRequest | None, own: Sequence[CallbackLike], *, last: bool = False) -> RunResult:
    config, agent = plan.settings, plan.agent
    check_model(config)
    callbacks = [*load_callbacks(config.record.callback), *own]
    run_dir = config.training.run_dir
    if run_dir is None:
        raise ConfigError("--run-dir", None, "is not resolved", "Give a directory.")
    begin = await on_thread(resume_point, config)  # an address may take its time
    before = Inputs.from_json(begin.inputs) if begin.inputs else None
    tasks, questions = plan.tasks(before, begin.progress.epoch)
    sft = demonstrations(config)
    encoded = None if sft is None else await on_thread(encode_demonstrations, sft, config.engine.max_model_len)
    known = (of_questions(questions, tasks), encoded.fingerprint if encoded else "")
    inputs = await on_thread(read_inputs, plan.inputs, tasks, *known)
    if before is not None and not plan.accepts_changes:
        refuse_changed(before.files, inputs.files, config.training.resume)
    make_directory(run_dir)
    rows = rewind_records(run_dir, begin.progress)  # also of a run that ended before its first step
    tracker = open_tracker(plan.track, run_dir, title=_title(plan), callbacks=callbacks, ask_stop=(stop := stop or StopRequest()).ask)
    runtime = make_runtime(plan.cluster, tracker.on_stage)
    status, ledger, stop_reason = "failed", None, None
    # Begun early, so that it runs beside the checks that follow.
    proof = asyncio.create_task(_refuse_wrong(plan, plan.cluster))
    proof.add_done_callback(lambda task: task.cancelled() or task.exception())  # where another error came first, nobody asks for its own
    try:
        if sft is not None and encoded is not None:
            await on_thread(write_encoded, encoded, sft, config.training.num_steps, run_dir / DEMONSTRATIONS)
        _keep(plan, run_dir, inputs)
        keep_code(inputs, before, run_dir, begin.progress.step)
        await tracker.begin(json.loads(to_json(config)), rows)
        for note in plan.notes:
            tracker.on_stage(note)
        _warn_of_changes(tracker, before, inputs, tasks, begin.progress)
        first = tasks.first(PROMPTS_CHECKED)
        if (problem := missing_labels(config.data, agent, first)) is not None:
            tracker.warn(RunWarning("no-labels", *problem))
        await _rehearse(plan, first[0], tracker)
        await _start(plan, [*first, *questions], proof, runtime, tracker)
        result = await _train(plan, run_dir, tasks, questions, runtime, tracker, begin, stop, json.dumps(inputs.to_json()))
        status, ledger = "interrupted" if result.stopped else "finished", result.counts.metrics()
        stop_reason = result.stop_reason or None
        return result
    except DamagedCheckpointError:
        status = RESTARTING
        raise
    except LearnerDeadError:
        status = "failed" if last or not _can_go_on(config.training) else RESTARTING
        raise
    except asyncio.CancelledError:
        status = "interrupted"
        raise
    finally:
        proof.cancel()
        tracker.on_stage("closing")
        await uninterrupted(runtime.close())
        await tracker.finish(status=status, ledger=ledger, agent=config.run.agent, stop_reason=stop_reason)


def _keep(plan: RunPlan, run_dir: Path, inputs: Inputs) -> None:
    """Write into the directory of a run what it is made of: environment, inputs, functions of the user, settings."""
    keep_environment(plan.settings.run.agent, run_dir)
    (run_dir / INPUTS).write_text(json.dumps(inputs.to_json()) + "\n", encoding="utf-8")
    copy_plugins((spec for _, spec in plugins(plan.settings)), run_dir)
    (run_dir / "config.json").write_text(plan.to_json() + "\n", encoding="utf-8")


def _warn_of_changes(tracker: RunTracker, before: Inputs | None, inputs: Inputs, tasks: TaskSource, progress: Progress) -> None:
    """Say what of the inputs of a resumed run is new: added tasks, and changed code."""
    if before is None:
        return
    if tasks.num_added:
        from_epoch = progress.epoch + 1
        tracker.on_stage(f"{counted(tasks.num_added, 'task')} added since the run began, drawn from epoch {from_epoch} on")
    if changed := shown_changes(before, inputs):
        text = f"the environment's code is not what it was until step {progress.step}: {changed}"
        tracker.warn(RunWarning("changed-code", text, f"Both versions are in {KEPT}; rewards before and after may mean different things."))


async def _refuse_wrong(plan: RunPlan, cluster: ClusterPlan) -> None:
    """Compare the learner with the model, unless an earlier part of the run did."""
    run = plan.settings.training
    if cluster.learner is not None and "model" not in run.skip_checks and not run.resume:
        await refuse_wrong(cluster.learner)


def _title(plan: RunPlan) -> str:
    config = plan.settings
    model = Path(config.model.model).name or "the bundled tiny model"
    mode = f"staleness up to {config.flow.staleness}" if config.flow.staleness else "synchronous"
    sized, agent = described(config), redacted(shown_path(config.run.agent))
    return f"{agent} with {model}, {Path(config.algo.advantage_estimator).name}, {mode}{f'; {sized}' if sized else ''}"


async def _rehearse(plan: RunPlan, task: Task, tracker: RunTracker) -> None:
    """Play one scripted episode where the environment may run in a process of this machine, and was not played in an earlier run."""
    config, agent = plan.settings, plan.agent
    isolated = config.isolation.env_isolation == "process"
    skipped = "env" in config.training.skip_checks or isolated or agent.kind.calls_model
    if skipped or config.training.resume or config.run.ray_address:
        return
    tracker.on_stage("playing one scripted episode")
    settings = CheckSettings(
        run=config.run,
        model=config.model,
        data=config.data,
        rollout=config.rollout,
        engine=config.engine,
        check=REHEARSAL,
        ratios=has_ratios(config.algo),
    )
    if warning := await rehearse(settings, task):
        tracker.warn(RunWarning("scripted-episode", warning, "See agentrl check; --skip-checks env skips this episode."))


async def _start(plan: RunPlan, tasks: Sequence[Task], proof: asyncio.Task[None], runtime: Runtime, tracker: RunTracker) -> None:
    """Check the memory of GPUs, the room for checkpoints, the prompts, and the model by its `proof`, and start processes."""
    config = plan.settings
    for sign in (device_sign(config), memory_sign(config, gpu_bytes(config.run.device))):
        if sign is not None:
            tracker.warn(sign)
    if (full := storage_sign(config.training, config.training.run_dir or Path(), *saved_bytes(config))) is not None:
        tracker.warn(full)
    if (warning := rate_warning(config)) is not None:
        tracker.warn(RunWarning("learning-rate", *warning))
    tracker.on_stage("checking prompts")
    await _check_teachers(plan)
    await asyncio.to_thread(check_all_prompts, plan.cluster, tasks)
    tracker.on_stage("comparing the learner with the model")
    await _start_unless_refused(proof, runtime)
    if parser := (await runtime.workers[0].stats()).tool_parser:
        tracker.on_stage(f"tool calls in the model's own form, read by {parser}")


async def _check_teachers(plan: RunPlan) -> None:
    """Refuse a teacher with another tokenizer than the model's."""
    config = plan.settings
    trusted, model = config.model.trust_remote_code, model_path(config.model.model)
    for spec in teacher_specs(config.algo.teacher):
        if spec.kind == "self":
            continue
        if spec.tokenizer:
            await asyncio.to_thread(check_teacher, spec.tokenizer, model, trust_remote_code=trusted)
        else:
            tokenizer = await asyncio.to_thread(load_tokenizer, model, trust_remote_code=trusted)
            await HttpTeacher(spec, config.rollout.reward_timeout_s).check_tokenizer(tokenizer)


async def _start_unless_refused(proof: asyncio.Task[None], runtime: Runtime) -> None:
    """Start processes after the proof, or beside one that takes longer, which ends them if it fails."""
    if (await asyncio.wait({proof}, timeout=PROOF_S))[0]:
        proof.result()
    starting = asyncio.create_task(runtime.start())
    try:
        done, _ = await asyncio.wait({proof, starting}, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        if not starting.done():
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
    for task in sorted(done, key=lambda task: task is starting):  # a model that is refused is why it could not start
        task.result()


def check_all_prompts(plan: ClusterPlan, tasks: Sequence[Task]) -> None:
    """Refuse tasks whose prompts do not fit into the context of the model, or cannot be rendered for it.

    Raises:
        ConfigError: For the first one.
    """
    check_prompts(plan.episodes, tasks, plan.engine.engine.max_model_len or context_length(plan.episodes.model.model))


async def _train(
    plan: RunPlan,
    run_dir: Path,
    tasks: TaskSource,
    questions: Sequence[Task],
    runtime: Runtime,
    tracker: RunTracker,
    begin: ResumePoint,
    stop: StopRequest,
    inputs: str,
) -> RunResult:
    config, pool = plan.settings, pool_of(runtime)
    learner = learner_beside(pool, runtime, config.weights, version=begin.progress.step)
    past = _past_weights(plan.cluster.episodes, learner)
    if begin.progress.step:
        source = f" from {begin.copy.address}" if begin.copy else ""
        tracker.on_stage(f"loading the checkpoint of step {begin.progress.step}{source}")
    loaded = await begin.restore(run_dir, learner)
    if past:
        await past.keep(begin.progress.step)  # the earlier part of the run may have ended before it did so
    uploads = _uploads(config.training, learner)
    if uploads and loaded:
        uploads.offer(loaded)  # it may have been killed before it was copied
    report = StallReport(run_dir, runtime.diagnose)
    resumed, flow = bool(begin.progress.step), plan.flow
    evaluations = open_evaluations(plan.evaluation, flow, questions, pool, learner, tracker, resumed=resumed, report=report)
    if config.training.eval_at_start and not begin.progress.step:
        await tracker.notify(MetricsRow(step=0, metrics=await evaluations.evaluate(0)))
    hook = evaluations_apart(config.training, evaluations, evaluators_of(runtime, pool))
    sizes = {"every": config.training.save_every, "num_steps": config.training.num_steps, "keep": config.training.keep_checkpoints}
    checkpoints = Checkpoints(run_dir, learner, config=plan.to_json(), inputs=inputs, uploads=uploads, **sizes)

    async def work() -> RunResult:
        result = await run_loops(
            settings=flow,
            pool=pool,
            learner=learner,
            tasks=tasks,
            observer=tracker,
            keep=flow.group_filter(),
            after_step=[hook, *([past] if past else [])],
            progress=begin.progress,
            repeat=repeated_tasks(tasks, begin.progress),
            checkpoints=checkpoints,
            stop=stop,
            report=report,
            records=tracker.records,
        )
        if config.record.save_model and not result.stopped:
            tracker.on_stage("saving the model")
            await learner.save_model(str((run_dir / "model").absolute()))
        if uploads:
            tracker.on_stage("waiting for the last copy of a checkpoint")
            await _finish_uploads(uploads, config.training, stop, stopped=result.stopped)
        return result

    if uploads:
        return await _beside(uploads.run(checkpoints.remove_old), _beside(answer_requests(run_dir, pool), work()))
    return await _beside(answer_requests(run_dir, pool), work())


def _past_weights(episodes: EpisodePlan, learner: Learner) -> PastWeights | None:
    folder = episodes.partner_folder
    return PastWeights(Path(folder), learner, every=past_spec(episodes.partner).every) if folder else None


def _uploads(run: TrainingConfig, learner: Learner) -> Uploads | None:
    if not run.checkpoint_upload:
        return None
    return Uploads(absolute(run.checkpoint_upload), learner, keep=run.keep_checkpoints)


async def _finish_uploads(uploads: Uploads, run: TrainingConfig, stop: StopRequest, *, stopped: bool) -> None:
    """Wait for the last copy; from a signal on only as long as ``--stop-timeout-s`` leaves.

    Raises:
        CheckpointError: If the last checkpoint of a run that was not stopped, and so will not be resumed, could not be copied.
    """
    margin_s = min(STOP_MARGIN_S, run.stop_timeout_s / 2)
    stop.heard = True
    copied, asked = asyncio.ensure_future(uploads.finish(UPLOAD_TIMEOUT_S)), asyncio.ensure_future(stop.wait_for_signal())
    try:
        await asyncio.wait([copied, asked], return_when=asyncio.FIRST_COMPLETED)
        if not copied.done():
            # Only the wait is cancelled; the copy goes on, and is waited for once more with the time that is left.
            copied.cancel()
            await asyncio.gather(copied, return_exceptions=True)
            left_s = stop.signalled_s + run.stop_timeout_s - margin_s - time.monotonic()
            copied = asyncio.ensure_future(uploads.finish(max(0.0, left_s)))
        await copied
    except CheckpointError as error:
        if not stopped:
            raise
        _log.warning("%s", error)
    finally:
        stop.heard = False
        for task in (copied, asked):
            task.cancel()


async def _beside(companion: Coroutine[Any, Any, None], work: Coroutine[Any, Any, T]) -> T:
    """Finish `work`; `companion` runs as long as it does."""
    task = asyncio.ensure_future(companion)
    try:
        return await work
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def uninterrupted(work: Coroutine[Any, Any, None]) -> None:
    """Finish cleaning up although this task has been cancelled; errors of the clean-up do not hide the run's own."""
    task = asyncio.ensure_future(work)
    with contextlib.suppress(Exception):
        await asyncio.shield(task)

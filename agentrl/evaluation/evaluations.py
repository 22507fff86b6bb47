"""Playing tasks to see how good a model is, on the same workers and the same rollout code as training."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean

import anyio
import anyio.lowlevel

from agentrl.core.callbacks import EvaluationEnd
from agentrl.core.errors import ConfigError, TooManyFailuresError, WeightSyncError
from agentrl.core.protocols import Learner
from agentrl.core.summaries import GroupSummary, MemberSummary
from agentrl.core.types import EvalSampling, GroupRequest, Status, Task, derive_seed
from agentrl.evaluation.assessment import EpisodeOutcome, TaskOutcome, assess
from agentrl.evaluation.best import BestModel
from agentrl.evaluation.plan import EvalConfig
from agentrl.evaluation.report import evaluation_line, log_evaluation
from agentrl.flow.driver import first_error
from agentrl.flow.plan import TrainingConfig
from agentrl.flow.pool import RolloutPool
from agentrl.flow.sizes import FlowPlan
from agentrl.flow.stall import StallReport, WaitTracker, watch_for_stall
from agentrl.flow.state import Observer, SafePoint
from agentrl.track.sinks import EVAL_TRAJECTORIES, TrajectoryRecorder
from agentrl.track.text import counted

KIND_KEYS = ("kind", "source")
"""Metadata that say the kind of a task if no key is named."""

MAX_CAUSE_CHARS = 300

OnGroup = Callable[[GroupSummary, int, int], None]
"""Told of every task that is done: its group, how many are done, and how many there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalPlan:
    """The plan of an evaluation: its section, and values of others.

    Attributes:
        eval: Section with samples, temperature and kinds.
        num_engines: Engines that play.
        max_num_seqs: Sequences that one of them decodes at once.
        seed: Makes every evaluation draw the same numbers.
        stall_timeout_s: Seconds without progress after which it ends with a diagnosis.
        num_recorded: Episodes per task to render as JSON records.
        with_messages: The records hold the episodes as chat messages too.
    """

    eval: EvalConfig = field(default_factory=EvalConfig)
    num_engines: int = 1
    max_num_seqs: int = 1
    seed: int = 0
    stall_timeout_s: float = 600.0
    num_recorded: int = 0
    with_messages: bool = False

    @property
    def max_concurrent_tasks(self) -> int:
        """Tasks under way at once: as many as the engines have sequences for, at least one."""
        return max(1, self.num_engines * self.max_num_seqs // self.eval.eval_samples)


async def evaluate(
    pool: RolloutPool,  # started workers whose weights are `version`, and stay so until this returns
    tasks: Sequence[Task],  # with ids that differ
    settings: EvalPlan,
    *,
    version: int,  # the weights to be measured
    name: str = "eval",  # what the ids of the trajectories begin with
    on_group: OnGroup | None = None,  # told of every task that is done
    report: StallReport | None = None,  # writes down what every process does when nothing progresses
    supervise: bool = False,  # whether to look after the workers meanwhile; in a training run somebody does
) -> list[TaskOutcome]:
    """Play every task and tell what came of it.

    Consumes nothing of a run that trains on the same workers: no slot, no task, no random number. Produces one outcome per
    task, in their order. Waits for the workers. Unblocked by them, or by the stall time-out.

    Raises:
        WeightSyncError: If a token was sampled by other weights.
        StallError: If nothing is done for too long.
        Exception: The first error of a worker that is no failure of an episode.
    """
    playing = _Playing(pool, settings, version, name, len(tasks), on_group)
    await first_error(playing.run(tasks, report, supervise))
    return [playing.outcomes[index] for index in range(len(tasks))]


class _Playing:
    """The tasks of one evaluation, side by side."""

    def __init__(self, pool: RolloutPool, settings: EvalPlan, version: int, name: str, num_tasks: int, on_group: OnGroup | None) -> None:
        self._pool, self._settings, self._version, self._num_tasks, self._on_group = pool, settings, version, num_tasks, on_group
        self._trial = EvalSampling(name=name, seed=derive_seed(settings.seed, "eval"), temperature=settings.eval.eval_temperature)
        self._limiter = anyio.CapacityLimiter(settings.max_concurrent_tasks)
        self._clock = asyncio.get_running_loop().time
        self._board = WaitTracker(self._clock)
        self.outcomes: dict[int, TaskOutcome] = {}

    async def run(self, tasks: Sequence[Task], report: StallReport | None, supervise: bool) -> None:
        """Play all of them."""
        self._board.waiting("evaluation", f"{counted(len(tasks), 'task')} with version {self._version}")
        async with anyio.create_task_group() as watch:
            watch.start_soon(watch_for_stall, self._board, self._settings.stall_timeout_s, self._describe, self._clock, report)
            if supervise:
                watch.start_soon(self._pool.supervise)
                await anyio.lowlevel.checkpoint()  # it is at work before the first group is
            async with anyio.create_task_group() as groups:
                for index, task in enumerate(tasks):
                    groups.start_soon(self._play, index, task, name=f"{self._trial.name} task {index}")
            watch.cancel_scope.cancel()

    async def _play(self, index: int, task: Task) -> None:
        settings, version = self._settings, self._version
        async with self._limiter:
            group_request = GroupRequest(
                group_id=index,
                task=task,
                n_samples_per_prompt=settings.eval.eval_samples,
                version=version,
                record=settings.num_recorded,
                eval_sampling=self._trial,
                with_messages=settings.with_messages,
            )
            summary, _ = await self._pool.run_group(group_request)
        if summary.versions not in (None, (version, version)):
            raise WeightSyncError(f"version {version} was to be evaluated, but task {task.id!r} was sampled by versions {summary.versions}")
        self.outcomes[index] = outcome_of(task, summary, settings.eval.eval_by)
        self._board.progress()
        if self._on_group is not None:
            self._on_group(summary, len(self.outcomes), self._num_tasks)

    def _describe(self) -> str:
        return f"  tasks done: {len(self.outcomes)}"


def outcome_of(task: Task, summary: GroupSummary, by: str = "") -> TaskOutcome:
    """Return the results of a task's group by episode; an episode with several agents has the mean of its trained agents."""
    ended = [episode for episode in summary.episodes if _ended(episode)]
    failed = [episode[0] for episode in summary.episodes if not _ended(episode) and episode[0].status != Status.NOT_SCORED]
    return TaskOutcome(
        task_id=task.id,
        kind=kind_of(task, by),
        episodes=tuple(map(_outcome, ended)),
        agents=_by_agent(ended),
        failures=tuple(f"{member.status}: {member.error or 'nothing was sampled'}"[:MAX_CAUSE_CHARS] for member in failed),
    )


def _ended(episode: Sequence[MemberSummary]) -> bool:
    return any(member.trainable for member in episode)


def _by_agent(episodes: Sequence[Sequence[MemberSummary]]) -> dict[str, tuple[EpisodeOutcome, ...]]:
    """Return the results of each agent, if there are several."""
    names = sorted({member.agent for episode in episodes for member in episode if member.trainable})
    own = {name: [[member for member in episode if member.agent == name] for episode in episodes] for name in names}
    if len(names) < 2:
        return {}
    return {name: tuple(_outcome(members) for members in played if _ended(members)) for name, played in own.items()}


def _outcome(episode: Sequence[MemberSummary]) -> EpisodeOutcome:
    members = [member for member in episode if member.trainable]
    scores = [member.score for member in members if member.score is not None]
    return EpisodeOutcome(
        reward=fmean(member.reward or 0.0 for member in members),
        score=fmean(scores) if scores else None,
        tokens=sum(member.num_tokens for member in members),
        turns=sum(member.num_turns for member in members),
        truncated=any(member.cut_short for member in members),
    )


def kind_of(task: Task, by: str = "") -> str:
    """The kind of a task: what its metadata hold under `by`, or else under the first of `KIND_KEYS` they have."""
    keys = (by,) if by else KIND_KEYS
    return next((str(task.metadata[key]) for key in keys if key in task.metadata), "")


class Evaluations:
    """Evaluates a run's model every few steps; a hook for `agentrl.flow.driver.train`.

    The weights that were published last stay what they are until it ends. With `beside` the learner trains the next step meanwhile, and
    exports it afterwards; the model is written before, where the best is to be kept. Otherwise the learner waits. Groups to train on
    go on in any case; their slots bound their staleness as always.
    """

    def __init__(
        self,
        pool: RolloutPool,
        tasks: Sequence[Task],  # the same every time
        settings: EvalPlan,  # the same every time, seed included, so that steps differ by their weights alone
        *,
        every: int,  # steps between two evaluations; 0: none
        num_steps: int,  # steps of the run; the last has an evaluation in any case, if any has
        observer: Observer,  # follows the evaluations and the saving of the best model
        best: BestModel | None = None,
        max_failure_rate: float = 0.5,  # share of the episodes that may fail
        run_dir: Path | None = None,  # directory that gets ``evaluations.jsonl`` and recorded episodes; `None` writes nothing
        report: StallReport | None = None,  # writes down what every process does when nothing progresses
        beside: bool = False,  # True: the learner trains the next step meanwhile, with engines that generate all the time
    ) -> None:
        self._pool, self._tasks, self._settings, self._best, self.beside = pool, tasks, settings, best, beside
        self._every, self._num_steps, self._max_failure_rate = every, num_steps, max_failure_rate
        self._run_dir, self._observer, self._report = run_dir, observer, report

    def on(self, pool: RolloutPool, num_engines: int) -> Evaluations:
        """Return the same evaluations on other workers, of which there are `num_engines`."""
        other = copy(self)
        other._pool = pool
        other._settings = replace(self._settings, num_engines=num_engines)
        return other

    def due(self, step: int) -> bool:
        """Return True if there is an evaluation after `step` steps."""
        return bool(self._every) and (step % self._every == 0 or step == self._num_steps)

    async def __call__(self, point: SafePoint) -> Mapping[str, float]:
        """Evaluate if it is time to.

        Returns:
            The figures as ``eval/...``; empty if it is not, or if they come later.
        """
        if not self.due(point.step):
            return {}
        if not self.beside:
            return await self._at(point, None)
        point.beside(partial(self._at, point, await self.write_model()))
        return {}

    async def write_model(self) -> Path | None:
        """Write the model that the learner holds, for `evaluate` to keep if it proves to be the best; `None` if none is kept."""
        return await self._best.write() if self._best is not None else None

    def discard(self, written: Path | None) -> None:
        """Remove what `write_model` wrote, unless it is the best model."""
        if self._best is not None and written is not None:
            self._best.discard(written)

    async def _at(self, point: SafePoint, written: Path | None) -> dict[str, float]:
        """Evaluate the weights of a step as soon as they are live; `written` is removed, unless it is the best model."""
        try:
            await point.until_live()
            return await self.evaluate(point.step, lambda summary, done, total: point.progress(), written)
        finally:
            self.discard(written)

    async def evaluate(self, step: int, on_group: OnGroup | None = None, written: Path | None = None) -> dict[str, float]:
        """Evaluate the weights of `step`, which are live and stay so; `written` has the model if the learner may hold another by then.

        Raises:
            TooManyFailuresError: If too many episodes failed to say anything.
        """
        self._observer.on_stage(f"evaluating step {step} on {counted(len(self._tasks), 'task')}")
        clock = asyncio.get_running_loop().time
        begin = clock()
        with self._recorded(on_group) as following:
            outcomes = await evaluate(
                self._pool, self._tasks, self._settings, version=step, name=f"eval-{step}", on_group=following, report=self._report
            )
        seconds = clock() - begin
        check_failures(outcomes, self._max_failure_rate)
        # On a thread, because groups to train on go on meanwhile, and need this one's event loop.
        assessment = await asyncio.to_thread(assess, outcomes, solved_at=self._settings.eval.eval_pass_score, seed=self._settings.seed)
        if self._run_dir is not None:
            log_evaluation(self._run_dir / "evaluations.jsonl", step, assessment, seconds, outcomes)
        metrics = {f"eval/{name}": value for name, value in assessment.metrics().items()}
        metrics |= {"eval/seconds": seconds, "eval/step": float(step)}
        metrics |= await self._keep(step, metrics, written)
        # Last, because a callback may ask for the end of the run, which cancels what an evaluation still has to do.
        await self._observer.notify(EvaluationEnd(step=step, metrics=metrics, seconds=seconds, text=evaluation_line(assessment)))
        return metrics

    @contextlib.contextmanager
    def _recorded(self, on_group: OnGroup | None) -> Iterator[OnGroup | None]:
        """A follower that also writes the records of the groups, if there are to be some."""
        if self._run_dir is None or not self._settings.num_recorded:
            yield on_group
            return
        recorder = TrajectoryRecorder(self._run_dir / EVAL_TRAJECTORIES)

        def follow(summary: GroupSummary, done: int, total: int) -> None:
            recorder.write(summary)
            if on_group is not None:
                on_group(summary, done, total)

        try:
            yield follow
        finally:
            recorder.close()

    async def _keep(self, step: int, metrics: Mapping[str, float], written: Path | None) -> dict[str, float]:
        """Save the model if it is the best so far; returns which one is."""
        if self._best is None:
            return {}
        saved = await self._best.consider(step, metrics, written)
        if saved is not None:
            await self._observer.notify(saved)
        best = self._best.best
        return {} if best is None else {"eval/best": best.value, "eval/best_step": float(best.step)}


def check_failures(outcomes: Sequence[TaskOutcome], max_failure_rate: float) -> None:
    """Refuse an evaluation that says next to nothing.

    Raises:
        TooManyFailuresError: If a larger share of the episodes failed, or all did.
    """
    causes = Counter(message for outcome in outcomes for message in outcome.failures)
    ended = sum(len(outcome.episodes) for outcome in outcomes)
    if not causes or (ended and causes.total() <= max_failure_rate * (ended + causes.total())):
        return
    listed = "\n".join(f"  {count} x {message}" for message, count in causes.most_common(5))
    raise TooManyFailuresError(
        f"{causes.total()} of {ended + causes.total()} episodes of the evaluation failed (--max-failure-rate {max_failure_rate:g}). "
        f"Most frequent causes:\n{listed}"
    )


def check_kept_kind(tasks: Sequence[Task], training: TrainingConfig, eval_by: str) -> None:
    """Refuse a kind of tasks that ``--keep-best`` names and that is none of those to evaluate on.

    Raises:
        ConfigError: If there is no such kind.
    """
    *_, kind = [*training.keep_best.split("/", 2), ""][:3]
    kinds = {kind_of(task, eval_by) or "other" for task in tasks}
    if kind and (kind not in kinds or len(kinds) < 2):
        known = f"Its kinds are {', '.join(sorted(kinds))}." if len(kinds) > 1 else "All tasks are of one kind; see --eval-by."
        raise ConfigError("--keep-best", training.keep_best, f"there is no task of kind {kind!r}", known)


def open_evaluations(
    plan: EvalPlan,
    run: FlowPlan,
    tasks: Sequence[Task],
    pool: RolloutPool,
    learner: Learner,
    observer: Observer,
    *,
    resumed: bool,
    report: StallReport | None = None,
) -> Evaluations:
    """The evaluations of a run; none is ever due without tasks."""
    training = run.training
    run_dir, keep_best = training.run_dir, training.keep_best
    return Evaluations(
        pool,
        tasks,
        plan,
        every=training.eval_every if tasks else 0,
        num_steps=training.num_steps,
        best=BestModel(run_dir, learner, keep_best, resumed=resumed) if keep_best and run_dir is not None else None,
        max_failure_rate=run.flow.max_failure_rate,
        run_dir=run_dir,
        observer=observer,
        report=report,
        beside=run.flow.staleness > 0,
    )

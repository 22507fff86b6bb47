"""One evaluation from a checked request to its figures: a model in an environment, alone or next to another one."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from agentrl.api.training import check_all_prompts, uninterrupted
from agentrl.assets import CHOSEN_VISION
from agentrl.cluster.runtime import make_runtime, pool_of
from agentrl.config.evaluate import EvaluateConfig
from agentrl.config.mapping import to_json
from agentrl.config.schema import PlaySettings
from agentrl.config.sections import changed
from agentrl.core.errors import ConfigError
from agentrl.core.files import write_text
from agentrl.core.paths import shown_path
from agentrl.core.plugins import KEPT
from agentrl.core.redaction import redacted
from agentrl.core.summaries import GroupSummary
from agentrl.core.types import Task
from agentrl.env.agent_spec import AgentSpec
from agentrl.env.tasks import own_tasks
from agentrl.evaluation.assessment import Assessment, Comparison, TaskOutcome, assess, common_ks, compare
from agentrl.evaluation.evaluations import check_failures, outcome_of
from agentrl.evaluation.evaluations import evaluate as play_tasks
from agentrl.evaluation.report import EvalProgress, assessment_rows, comparison_rows, estimate_text, print_assessment, print_comparison
from agentrl.inspect.directory import TRAJECTORIES
from agentrl.resolve.directories import results_directory
from agentrl.resolve.inputs import Inputs
from agentrl.resolve.parts import P, check_model, cluster_plan, environment, eval_plan, fitting_model, inputs_of_run, temperature_of
from agentrl.rollout.tasks import eval_tasks, open_tasks
from agentrl.suites.load import keep_environment
from agentrl.track.console import open_console
from agentrl.track.html import escaped, table
from agentrl.track.jsonl import encode_indented
from agentrl.track.sinks import TrajectoryRecorder
from agentrl.track.text import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One model on the tasks: its directory or hub name ("" is the bundled one), an outcome per task, and the figures with intervals."""

    model: str
    outcomes: Sequence[TaskOutcome]
    assessment: Assessment


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """An evaluation that has ended; the same is in ``eval.json`` of its directory.

    Attributes:
        path: Directory of the results.
        num_tasks: Tasks to measure on.
        model: The model.
        baseline: The model that it is compared with, if there is one.
        comparison: The differences between the two, with intervals.
        partial: True if it was interrupted; the tasks that take long are missing then.
    """

    path: Path
    num_tasks: int
    model: Measured
    baseline: Measured | None = None
    comparison: Comparison | None = None
    partial: bool = False

    @property
    def assessment(self) -> Assessment:
        """Figures of the model, with intervals: ``assessment.overall["reward"].low``."""
        return self.model.assessment

    @property
    def metrics(self) -> dict[str, float]:
        """Figures of the model under flat names: ``reward``, ``reward_low``, ``pass@1``, ``reward/hard``."""
        return self.model.assessment.metrics()

    @property
    def failed_tasks(self) -> list[int]:
        """Number of tasks that are in no figure because all of their episodes failed, for each model."""
        return [len(part.assessment.failed_tasks) for part in (self.model, self.baseline) if part is not None]

    def _repr_html_(self) -> str:
        """Return the figures with their intervals, and a link to the viewer, for notebooks."""
        from agentrl.api.viewing import viewer_link

        title = f"<b>Evaluation of {escaped(model_name(self.model.model))}</b> on {counted(self.num_tasks, 'task')}"
        against = f", against {escaped(model_name(self.baseline.model))}" if self.baseline is not None else ""
        figures = assessment_rows(self.assessment) if self.comparison is None else comparison_rows(self.comparison)
        partial = "<div>It was interrupted; the tasks that take long are missing.</div>" if self.partial else ""
        return f"<div>{title}{against}{table(*figures)}{partial}{viewer_link(self.path)}</div>"

    def __repr__(self) -> str:
        """Return the directory of the evaluation and its figures."""
        figures = ", ".join(f"{name} {estimate_text(estimate)}" for name, estimate in self.assessment.overall.items())
        return f"<Evaluation {str(self.path)!r}: {counted(self.assessment.tasks, 'task')}, {figures or 'nothing measured'}>"


async def measure(config: EvaluateConfig, console: Console | None = None) -> Evaluation:
    """Measure as `config` says, and show progress and figures; cancelling it saves and shows the tasks that are done.

    Raises:
        ConfigError: If the environment, the tasks or a model cannot be used.
        TooManyFailuresError: If nothing could be measured.
    """
    for model in (config.model.model, config.measure.baseline):
        check_model(changed(config, model=model or ""))
    agent, console = environment(config), console or open_console()
    before, changed_code = inputs_of_run(config, agent)
    tasks, config = measured_tasks(config, agent, before), with_model(config, agent, console)
    warn_of_code(console, changed_code)
    with results_directory(config.source.output, config.run.agent, "eval") as path:
        (path / "config.json").write_text(to_json(config) + "\n", encoding="utf-8")  # for inspect and replay
        keep_environment(config.run.agent, path)
        return await _Measurement(config, tasks, path, console).run()


@dataclass(slots=True)
class _Measurement:
    """One evaluation under way; `done` has the outcomes of each model that was begun, by the number of the task."""

    config: EvaluateConfig
    tasks: Sequence[Task]
    path: Path
    console: Console
    done: list[tuple[str, dict[int, TaskOutcome]]] = field(default_factory=list)

    async def run(self) -> Evaluation:
        config, baseline = self.config, self.config.measure.baseline
        progress, samples = EvalProgress(self.console), config.eval.eval_samples
        total = len(self.tasks)
        heading = f"{redacted(shown_path(config.run.agent))}: {counted(total, 'task')}, {counted(samples, 'episode')} each"
        self.console.print(Text(heading, style="bold"), soft_wrap=not self.console.is_terminal)
        try:
            await self._measure(config.model.model, TRAJECTORIES, progress)
            if baseline is not None:
                await self._measure(baseline, "baseline.jsonl", progress)
        except asyncio.CancelledError:
            progress.close()
            if any(by_task for _, by_task in self.done):
                self._finish(partial=True)
            raise
        finally:
            progress.close()
        return self._finish()

    async def _measure(self, model: str, records: str, progress: EvalProgress) -> None:
        """Start an engine with the model, play the tasks, and close it again."""
        config = changed(self.config, model=model)
        progress.on_stage(f"checking prompts for {model_name(model)}")
        plan = cluster_plan(config)
        await asyncio.to_thread(check_all_prompts, plan, self.tasks)
        settings = eval_plan(config)
        requests = self.path / ("requests.jsonl" if records == TRAJECTORIES else f"requests-{records}")
        recorder = TrajectoryRecorder(self.path / records, requests=requests) if settings.num_recorded else None
        so_far: dict[int, TaskOutcome] = {}
        self.done.append((model, so_far))

        def on_group(summary: GroupSummary, count: int, total: int) -> None:
            so_far[summary.group_id] = outcome_of(self.tasks[summary.group_id], summary, config.eval.eval_by)
            if recorder is not None:
                recorder.write(summary)
            progress.on_task(count, total)

        runtime = make_runtime(plan, progress.on_stage)
        try:
            await runtime.start()
            pool = pool_of(runtime)
            progress.on_stage("playing")
            outcomes = await play_tasks(pool, self.tasks, settings, version=0, on_group=on_group, supervise=True)
        finally:
            await uninterrupted(runtime.close())
            if recorder is not None:
                recorder.close()
        check_failures(outcomes, 1.0)

    def _finish(self, *, partial: bool = False) -> Evaluation:
        """Compare, save and show what is done."""
        config = self.config
        measured = [_measured(config, model, [by_task[task] for task in sorted(by_task)]) for model, by_task in self.done if by_task]
        model, baseline = measured[0], measured[1] if len(measured) > 1 else None
        comparison = None
        if baseline is not None:
            comparison = compare(model.outcomes, baseline.outcomes, solved_at=config.eval.eval_pass_score, seed=config.run.seed)
        result = Evaluation(
            path=self.path, num_tasks=len(self.tasks), model=model, baseline=baseline, comparison=comparison, partial=partial
        )
        _write(result, config)
        if partial:
            counts = " and ".join(f"{len(part.outcomes)} of {counted(len(self.tasks), 'task')}" for part in measured)
            words = f"\ninterrupted after {counts}; those that take long are missing, so these figures are not those of all"
            self.console.print(Text(words, style="bold"), soft_wrap=not self.console.is_terminal)
        _show(self.console, result)
        return result


def with_model(config: P, agent: AgentSpec, console: Console) -> P:
    """Return the settings with a model that reads what the environment shows; where none was named, say which."""
    fitting = fitting_model(config, agent)
    if fitting is not config:
        console.print(f"model {CHOSEN_VISION}", soft_wrap=True)
    return fitting


def warn_of_code(console: Console, changes: str) -> None:
    """Say which code of the run of ``--run`` is not what it was; nothing if `changes` is empty."""
    if changes:
        remedy = f"Its figures may mean something else; the run's copy is in {KEPT}/ of its directory."
        console.print(Text(f"warning: code has changed since the run: {changes}. {remedy}", style="yellow"), soft_wrap=True)


def measured_tasks(config: PlaySettings, agent: AgentSpec, before: Inputs | None = None) -> list[Task]:
    """Return the tasks to measure on: those that a training run with these settings would be evaluated on, else its training tasks.

    Those that a run with the inputs `before` held out, or was evaluated on, are still the same ones.

    Raises:
        ConfigError: If there are none, or no end of them and ``--eval-size`` does not say how many.
    """
    data, seed = config.data, config.run.seed
    if data.eval_prompts or own_tasks(agent, "eval_tasks") is not None:
        return eval_tasks(data, agent, seed=seed, asked=before.questions if before else None)
    if before and before.tasks.held_out:
        return eval_tasks(data, agent, seed=seed, known=before.tasks)
    source = open_tasks(dataclasses.replace(data, eval_size=0), agent, seed=seed)
    total = source.num_tasks
    if data.eval_size and (total is None or data.eval_size < total):
        return eval_tasks(data, agent, seed=seed)
    if total is None:
        raise ConfigError("--eval-size", 0, "there is no end of tasks", "Say how many to measure on.")
    return [dataclasses.replace(task, position=index) for index, task in enumerate(source.first(total))]


def _measured(config: EvaluateConfig, model: str, outcomes: Sequence[TaskOutcome]) -> Measured:
    assessment = assess(outcomes, solved_at=config.eval.eval_pass_score, seed=config.run.seed)
    return Measured(model=model, outcomes=outcomes, assessment=assessment)


def model_name(model: str) -> str:
    """Return the name of a model for people."""
    return model or "the bundled tiny model"


def _write(evaluation: Evaluation, config: EvaluateConfig) -> None:
    """Write ``eval.json``, whole or not at all: figures with their intervals, and every task's own figures."""
    solved_at, baseline, comparison = config.eval.eval_pass_score, evaluation.baseline, evaluation.comparison
    result = {
        "agent": redacted(config.run.agent),
        "tasks": evaluation.num_tasks,
        "partial": evaluation.partial,
        "samples": config.eval.eval_samples,
        "temperature": temperature_of(config),
        "seed": config.run.seed,
        "model": _result(evaluation.model, solved_at),
        "baseline": None if baseline is None else _result(baseline, solved_at),
        "comparison": None if comparison is None else dataclasses.asdict(comparison),
    }
    write_text(evaluation.path / "eval.json", encode_indented(result))


def _result(measured: Measured, solved_at: float) -> dict[str, Any]:
    ks = common_ks(measured.outcomes)

    def figures(outcome: TaskOutcome) -> dict[str, Any]:
        return {"kind": outcome.kind, "failed": len(outcome.failures), **outcome.values(solved_at, ks)}

    by_task = {outcome.task_id: figures(outcome) for outcome in measured.outcomes}
    return {"path": measured.model, **dataclasses.asdict(measured.assessment), "by_task": by_task}


def _show(console: Console, evaluation: Evaluation) -> None:
    model, baseline, comparison = evaluation.model, evaluation.baseline, evaluation.comparison
    console.print(Text(f"\nmodel     {model_name(model.model)}"), soft_wrap=True)
    if baseline is None or comparison is None:
        console.print()
        print_assessment(console, model.assessment)
    else:
        console.print(Text(f"baseline  {model_name(baseline.model)}\n"), soft_wrap=True)
        print_comparison(console, comparison, model.assessment, baseline.assessment)
    console.print(Text(f"\nsaved     {shown_path(evaluation.path / 'eval.json')}"), soft_wrap=True)

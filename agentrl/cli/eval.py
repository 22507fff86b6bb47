"""``agentrl eval``: how good a model is in an environment, alone or next to another one.

Exit codes: 0 everything was measured, 3 some tasks are in no figure because all of their episodes failed, 1 nothing could be
measured or the evaluation failed, 2 the request was wrong, 130 interrupted: the figures are of the tasks that were done by then.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypeAlias

from rich.console import Console
from rich.text import Text

from agentrl.api.signals import run_until_signal
from agentrl.api.training import uninterrupted
from agentrl.cluster.build import model_path
from agentrl.cluster.runtime import make_runtime
from agentrl.config.load import to_json
from agentrl.config.schema import LearnerConfig, TrainConfig
from agentrl.core.errors import ConfigError
from agentrl.core.summaries import GroupSummary
from agentrl.core.types import Task
from agentrl.env.load import AgentSpec, load_agent
from agentrl.env.tasks import own_tasks
from agentrl.evaluation.assessment import Assessment, Comparison, TaskOutcome, assess, compare
from agentrl.evaluation.config import Request, load_request
from agentrl.evaluation.evaluations import check_failures, eval_settings, evaluate, outcome_of
from agentrl.evaluation.report import EvalProgress, print_assessment, print_comparison
from agentrl.rollout.pool import RolloutPool
from agentrl.rollout.settings import episode_settings
from agentrl.rollout.tasks import check_prompts, context_length, eval_tasks, open_tasks
from agentrl.track.jsonl import encode
from agentrl.track.tracker import TrajectoryRecorder

INCOMPLETE = 3

Done: TypeAlias = list[tuple[str, dict[int, TaskOutcome]]]
"""Per model that was begun, its outcomes so far by the number of the task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One model on the tasks.

    Attributes:
        model: Where it is; "" is the bundled one.
        outcomes: One per task.
        assessment: What they add up to.
    """

    model: str
    outcomes: Sequence[TaskOutcome]
    assessment: Assessment


def main(words: list[str]) -> int:
    """Run the command.

    Args:
        words: Flags after ``eval``.

    Returns:
        The exit code.
    """
    request = load_request(words)
    agent = load_agent(request.config.run.agent)
    tasks = measured_tasks(request.config, agent)
    output = request.settings.measure.output or _output(request.config)
    output = output.expanduser()
    output.mkdir(parents=True, exist_ok=True)
    settings = to_json(dataclasses.replace(request.config, learner=LearnerConfig()))
    (output / "config.json").write_text(settings + "\n", encoding="utf-8")  # for inspect and replay
    console = Console()
    done: Done = []
    try:
        model, baseline = run_until_signal(_measure_all(request, tasks, output, console, done))
    except KeyboardInterrupt:
        _keep_partial(output, request, tasks, console, done)
        raise
    comparison = None
    if baseline is not None:
        solved_at, seed = request.config.eval.eval_pass_score, request.config.run.seed
        comparison = compare(model.outcomes, baseline.outcomes, solved_at=solved_at, seed=seed)
    _write(output, request, tasks, model, baseline, comparison)
    _show(console, output, model, baseline, comparison)
    failed = [len(part.assessment.failed_tasks) for part in (model, baseline) if part is not None]
    if not any(failed):
        return 0
    sys.stderr.write(f"agentrl: {' and '.join(map(str, failed))} of {len(tasks)} tasks failed and are in no figure\n")
    return INCOMPLETE


def _keep_partial(output: Path, request: Request, tasks: Sequence[Task], console: Console, done: Done) -> None:
    """Save and show what was measured before the evaluation was interrupted, and say that it is not all."""
    measured = [_measured(request.config, model, outcomes.values()) for model, outcomes in done if outcomes]
    if not measured:
        return
    model, baseline = measured[0], measured[1] if len(measured) > 1 else None
    config, comparison = request.config, None
    if baseline is not None:
        comparison = compare(model.outcomes, baseline.outcomes, solved_at=config.eval.eval_pass_score, seed=config.run.seed)
    _write(output, request, tasks, model, baseline, comparison, partial=True)
    counts = " and ".join(f"{len(part.outcomes)} of {len(tasks)} tasks" for part in measured)
    words = f"\ninterrupted after {counts}; those that take long are missing, so these figures are not those of all"
    console.print(Text(words, style="bold"), soft_wrap=True)
    _show(console, output, model, baseline, comparison)


def measured_tasks(config: TrainConfig, agent: AgentSpec) -> list[Task]:
    """The tasks to measure on: those that a training run with these settings would be evaluated on, else its training tasks.

    Raises:
        ConfigError: If there are none, or no end of them and ``--eval-size`` does not say how many.
    """
    data = config.data
    if data.eval_prompts or own_tasks(agent, "eval_tasks") is not None:
        return eval_tasks(config, agent)
    source = open_tasks(dataclasses.replace(config, data=dataclasses.replace(data, eval_size=0)), agent)
    total = source.num_tasks
    if data.eval_size and (total is None or data.eval_size < total):
        return eval_tasks(config, agent)
    if total is None:
        raise ConfigError("--eval-size", 0, "there is no end of tasks", "Say how many to measure on.")
    return [dataclasses.replace(task, position=index) for index, task in enumerate(source.first(total))]


def _output(config: TrainConfig) -> Path:
    agent = Path(config.run.agent.partition(":")[0]).stem or "run"
    return Path("runs") / f"eval-{agent}-{datetime.now():%Y%m%d-%H%M%S}"


async def _measure_all(
    request: Request, tasks: Sequence[Task], output: Path, console: Console, done: Done
) -> tuple[Measured, Measured | None]:
    progress = EvalProgress(console)
    console.print(Text(f"{request.config.run.agent}: {len(tasks)} tasks, {request.config.eval.eval_samples} episodes each", style="bold"))
    try:
        model = await _measure(request, request.config.model.model, tasks, output / "trajectories.jsonl", progress, done)
        if request.baseline is None:
            return model, None
        return model, await _measure(request, request.baseline, tasks, output / "baseline.jsonl", progress, done)
    finally:
        progress.close()


async def _measure(request: Request, model: str, tasks: Sequence[Task], records: Path, progress: EvalProgress, done: Done) -> Measured:
    """Start an engine with the model, play the tasks, and close it again; what is done so far is in `done`."""
    config = request.with_model(model)
    path = model_path(config)
    progress.on_stage(f"checking prompts for {model_name(model)}")
    context = config.engine.max_model_len or context_length(path)
    await asyncio.to_thread(check_prompts, episode_settings(config, path), tasks, context)
    samples = config.eval.eval_samples
    settings = dataclasses.replace(eval_settings(config), record={"none": 0, "sample": 1, "all": samples}[request.settings.measure.record])
    recorder = TrajectoryRecorder(records) if settings.record else None

    so_far: dict[int, TaskOutcome] = {}
    done.append((model, so_far))

    def on_group(summary: GroupSummary, count: int, total: int) -> None:
        so_far[summary.group_id] = outcome_of(tasks[summary.group_id], summary, settings.by)
        if recorder is not None:
            recorder.on_group(summary)
        progress.on_task(count, total)

    runtime = make_runtime(config, progress.on_stage)
    try:
        await runtime.start()
        pool = RolloutPool({f"engine-{index}": worker for index, worker in enumerate(runtime.workers)}, runtime.supervision)
        progress.on_stage("playing")
        outcomes = await evaluate(pool, tasks, settings, version=0, on_group=on_group, supervise=True)
    finally:
        await uninterrupted(runtime.close())
        if recorder is not None:
            recorder.close()
    check_failures(outcomes, 1.0)
    return _measured(config, model, outcomes)


def _measured(config: TrainConfig, model: str, outcomes: Iterable[TaskOutcome]) -> Measured:
    listed = list(outcomes)
    assessment = assess(listed, solved_at=config.eval.eval_pass_score, seed=config.run.seed)
    return Measured(model=model, outcomes=listed, assessment=assessment)


def model_name(model: str) -> str:
    """A model for people."""
    return model or "the bundled tiny model"


def _write(
    output: Path,
    request: Request,
    tasks: Sequence[Task],
    model: Measured,
    baseline: Measured | None,
    comparison: Comparison | None,
    *,
    partial: bool = False,
) -> None:
    """``eval.json``, whole or not at all: figures with their intervals, and every task's own figures."""
    config = request.config
    solved_at = config.eval.eval_pass_score
    result = {
        "agent": config.run.agent,
        "tasks": len(tasks),
        "partial": partial,
        "samples": config.eval.eval_samples,
        "temperature": config.rollout.temperature if config.eval.eval_temperature is None else config.eval.eval_temperature,
        "seed": config.run.seed,
        "model": _result(model, solved_at),
        "baseline": None if baseline is None else _result(baseline, solved_at),
        "comparison": None if comparison is None else comparison.to_json(),
    }
    unfinished = output / "eval.json.partial"
    unfinished.write_text(json.dumps(json.loads(encode(result)), indent=2) + "\n", encoding="ascii")
    os.replace(unfinished, output / "eval.json")


def _result(measured: Measured, solved_at: float) -> dict[str, Any]:
    by_task = {
        outcome.task_id: {"kind": outcome.kind, "failed": len(outcome.failures), **outcome.values(solved_at)}
        for outcome in measured.outcomes
    }
    return {"path": measured.model, **measured.assessment.to_json(), "by_task": by_task}


def _show(console: Console, output: Path, model: Measured, baseline: Measured | None, comparison: Comparison | None) -> None:
    console.print()
    console.print(Text(f"model     {model_name(model.model)}"), soft_wrap=True)
    if baseline is None or comparison is None:
        console.print()
        print_assessment(console, model.assessment)
    else:
        console.print(Text(f"baseline  {model_name(baseline.model)}\n"), soft_wrap=True)
        print_comparison(console, comparison, model.assessment, baseline.assessment)
    console.print(Text(f"\nsaved     {output / 'eval.json'}"), soft_wrap=True)

"""One data set from a checked request: episodes sampled, scored and written, exactly once per task."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.text import Text

from agentrl.api.evaluation import model_name, warn_of_code, with_model
from agentrl.api.training import check_all_prompts, uninterrupted
from agentrl.cluster.runtime import make_runtime, pool_of
from agentrl.config.evaluate import SampleConfig
from agentrl.config.mapping import differences, to_json
from agentrl.core.errors import ConfigError, TooManyFailuresError
from agentrl.core.files import complete_file, write_text
from agentrl.core.paths import shown_path
from agentrl.core.redaction import redacted
from agentrl.core.summaries import GroupSummary
from agentrl.core.types import Task
from agentrl.env.agent_spec import AgentSpec
from agentrl.evaluation.evaluations import evaluate as play_tasks
from agentrl.evaluation.report import EvalProgress
from agentrl.evaluation.samples import Journal, Row, Selection, check_tasks, select, task_entry
from agentrl.resolve.directories import keep_settings, results_directory
from agentrl.resolve.inputs import Inputs
from agentrl.resolve.parts import check_model, cluster_plan, environment, eval_plan, fitting_model, inputs_of_run, training_tasks
from agentrl.suites.load import keep_environment
from agentrl.track.console import open_console
from agentrl.track.jsonl import encode
from agentrl.track.text import counted, number

JOURNAL, DATA, SETTINGS, SUMMARY = "episodes.jsonl", "data.jsonl", "config.json", "summary.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """A data set that was sampled; the counts are in ``summary.json`` of its directory too.

    Attributes:
        path: Directory of the data set.
        num_tasks: Tasks that were sampled.
        num_episodes: Episodes that did not fail.
        num_failed: Episodes that failed.
        num_rows: Rows of the data set.
        reward: Mean reward of the episodes; `None` if all failed.
        best_reward: Mean over tasks of the highest reward.
        left_out: Reason -> tasks without a row.
    """

    path: Path
    num_tasks: int
    num_episodes: int
    num_failed: int
    num_rows: int
    reward: float | None
    best_reward: float | None
    left_out: Mapping[str, int] = field(default_factory=dict)

    @property
    def data(self) -> Path:
        """The data set: JSON lines."""
        return self.path / DATA


async def sample(config: SampleConfig, console: Console | None = None) -> Sampled:
    """Sample as `config` says; when it is cancelled or killed, ``--resume`` goes on with the tasks that are not done.

    Raises:
        ConfigError: If the environment, the tasks or the model cannot be used, or the directory holds another data set.
        TooManyFailuresError: If every episode failed.
    """
    check_model(config)
    agent, console = environment(config), console or open_console()
    before, changed_code = inputs_of_run(config, agent)
    tasks, config = sampled_tasks(config, agent, before), with_model(config, agent, console)
    warn_of_code(console, changed_code)
    with results_directory(config.source.output, config.run.agent, "sample") as path:
        others = partial(differences, config=config)
        keep_settings(path / SETTINGS, to_json(config), resume=config.select.resume, flag="--output", kind="data set", others=others)
        keep_environment(config.run.agent, path)
        journal = Journal(path / JOURNAL)
        try:
            check_tasks(journal.entries, tasks)
            await _sample_missing(config, tasks, journal, console)
        finally:
            journal.close()
        return _finish(config, path, journal, console)


def sampled_tasks(config: SampleConfig, agent: AgentSpec, before: Inputs | None = None) -> list[Task]:
    """Return the tasks to sample, with their places; what a run with the inputs `before` held out is not among them.

    Raises:
        ConfigError: If there is no end of them and ``--num-tasks`` does not say how many.
    """
    source = training_tasks(config, agent, before.tasks if before else None, epoch=-1)  # tasks that were added since count at once
    total, wanted = source.num_tasks, config.select.num_tasks
    if total is None and not wanted:
        raise ConfigError("--num-tasks", 0, "there is no end of tasks", "Say how many to sample.")
    count = min(filter(None, (total, wanted)))
    drawn = itertools.takewhile(lambda task: task.epoch == 0, (source.draw() for _ in range(count)))  # a generator may end before
    return [replace(task, position=index) for index, task in enumerate(drawn)]


def preview(config: SampleConfig) -> str:
    """Return what ``--dry-run`` says of the work.

    Raises:
        ConfigError: If the environment, the tasks or the model cannot be used.
    """
    check_model(config)
    agent = environment(config)
    tasks, samples = sampled_tasks(config, agent, inputs_of_run(config, agent)[0]), config.sampling.n_samples_per_prompt
    config = fitting_model(config, agent)
    return f"{counted(len(tasks), 'task')}, {counted(samples, 'episode')} each, with {model_name(config.model.model)}"


async def _sample_missing(config: SampleConfig, tasks: Sequence[Task], journal: Journal, console: Console) -> None:
    """Play the tasks that are not in the journal, and write each into it when it is done."""
    missing = [task for task in tasks if task.position not in journal.entries]
    done, samples = len(tasks) - len(missing), config.sampling.n_samples_per_prompt
    heading = f"{redacted(shown_path(config.run.agent))}: {counted(len(tasks), 'task')}, {counted(samples, 'episode')} each"
    console.print(Text(f"{heading}{f', {done} of them done before' if done else ''}", style="bold"), soft_wrap=True)
    if not missing:
        return
    progress = EvalProgress(console)

    def on_group(summary: GroupSummary, count: int, total: int) -> None:
        journal.add(task_entry(missing[summary.group_id], summary.records))
        progress.on_task(done + count, done + total)

    progress.on_stage("checking prompts")
    plan = cluster_plan(config)
    await asyncio.to_thread(check_all_prompts, plan, missing)
    runtime = make_runtime(plan, progress.on_stage)
    try:
        await runtime.start()
        pool = pool_of(runtime)
        progress.on_stage("sampling")
        # The rows are made of records, so every episode is recorded, with its messages.
        settings = replace(eval_plan(config), num_recorded=samples, with_messages=True)
        await play_tasks(pool, missing, settings, version=0, name="sample", on_group=on_group, supervise=True)
    finally:
        progress.close()
        await uninterrupted(runtime.close())


def _finish(config: SampleConfig, path: Path, journal: Journal, console: Console) -> Sampled:
    """Write the data set, whole or not at all, and show what is in it."""
    entries = list(journal.entries.values())
    selection = select(entries, config.select)
    with complete_file(path / DATA) as partial, partial.open("w", encoding="ascii") as file:
        file.writelines(encode(row) + "\n" for row in selection.rows)
    result = _sampled(path, entries, selection)
    summary = {**asdict(result), "path": str(path), "data": str(result.data)}
    write_text(path / SUMMARY, json.dumps(summary, indent=2) + "\n")
    if not result.num_episodes:
        causes = sorted({failure for entry in entries for failure in entry["failures"]})[:3]
        raise TooManyFailuresError("every episode failed, so there is no data set:\n  " + "\n  ".join(causes))
    _show(console, result)
    return result


def _sampled(path: Path, entries: Sequence[Row], selection: Selection) -> Sampled:
    rewards = [[episode["reward"] for episode in entry["episodes"]] for entry in entries if entry["episodes"]]
    return Sampled(
        path=path,
        num_tasks=len(entries),
        num_episodes=sum(map(len, rewards)),
        num_failed=sum(len(entry["failures"]) for entry in entries),
        num_rows=len(selection.rows),
        reward=fmean(reward for own in rewards for reward in own) if rewards else None,
        best_reward=fmean(map(max, rewards)) if rewards else None,
        left_out=selection.left_out,
    )


def _show(console: Console, result: Sampled) -> None:
    failed = f", {result.num_failed} more failed" if result.num_failed else ""
    left_out = "".join(f"; {counted(count, 'task')} left out: {reason}" for reason, count in result.left_out.items())
    lines: list[tuple[str, Any]] = [
        ("episodes", f"{result.num_episodes} of {counted(result.num_tasks, 'task')}{failed}"),
        ("reward", f"mean {number(result.reward or 0.0)}, best of each task {number(result.best_reward or 0.0)}"),
        ("rows", f"{result.num_rows}{left_out}"),
        ("saved", shown_path(result.data)),
    ]
    console.print()
    for name, text in lines:
        console.print(Text(f"{name:<10}{text}"), soft_wrap=True)

"""Evaluations during training, as the configuration says."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.cli.tasks import eval_tasks
from agentrl.config.schema import TrainConfig
from agentrl.core.errors import ConfigError
from agentrl.core.protocols import Learner
from agentrl.core.types import Task
from agentrl.env.load import AgentSpec
from agentrl.flow.best import BestModel
from agentrl.flow.evaluation import EvalSettings, Evaluations, kind_of
from agentrl.flow.stall import StallReport
from agentrl.rollout.pool import RolloutPool
from agentrl.track.tracker import RunTracker


def is_evaluated(config: TrainConfig) -> bool:
    """Whether the run is evaluated at all."""
    return bool(config.eval.eval_every) or config.eval.eval_at_start


def eval_settings(config: TrainConfig) -> EvalSettings:
    """How models are evaluated."""
    measured = config.eval
    return EvalSettings(
        num_samples=measured.eval_samples,
        seed=config.run.seed,
        temperature=measured.eval_temperature,
        by=measured.eval_by,
        solved_at=measured.eval_pass_score,
        live_episodes=config.engine.num_engines * config.engine.max_num_seqs,
        stall_timeout_s=config.run.stall_timeout_s,
    )


def run_eval_tasks(config: TrainConfig, agent: AgentSpec) -> list[Task]:
    """The tasks that a run is evaluated on; none if it is not evaluated.

    Raises:
        ConfigError: If there are none or they cannot be used, or none is of the kind that ``--keep-best`` names.
    """
    if not is_evaluated(config):
        return []
    tasks = eval_tasks(config, agent)
    *_, kind = [*config.eval.keep_best.split("/", 2), ""][:3]
    kinds = {kind_of(task, config.eval.eval_by) or "other" for task in tasks}
    if kind and (kind not in kinds or len(kinds) < 2):
        known = f"Its kinds are {', '.join(sorted(kinds))}." if len(kinds) > 1 else "All tasks are of one kind; see --eval-by."
        raise ConfigError("--keep-best", config.eval.keep_best, f"there is no task of kind {kind!r}", known)
    return tasks


def open_evaluations(
    config: TrainConfig,
    tasks: Sequence[Task],
    pool: RolloutPool,
    learner: Learner,
    tracker: RunTracker,
    *,
    resumed: bool,
    report: StallReport | None = None,
) -> Evaluations:
    """The evaluations of a run; none is ever due without tasks."""
    measured, run_dir = config.eval, config.run.run_dir
    return Evaluations(
        pool,
        tasks,
        eval_settings(config),
        every=measured.eval_every if tasks else 0,
        num_steps=config.run.num_steps,
        best=BestModel(run_dir, learner, measured.keep_best, resumed=resumed) if measured.keep_best and run_dir is not None else None,
        max_failure_rate=config.flow.max_failure_rate,
        on_result=tracker.on_evaluation,
        on_stage=tracker.on_stage,
        report=report,
    )

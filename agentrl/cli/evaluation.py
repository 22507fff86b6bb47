"""Evaluations during training, as the configuration says."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.config.schema import TrainConfig
from agentrl.core.protocols import Learner
from agentrl.core.types import Task
from agentrl.flow.best import BestModel
from agentrl.flow.evaluation import EvalSettings, Evaluations
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


def open_evaluations(config: TrainConfig, tasks: Sequence[Task], pool: RolloutPool, learner: Learner, tracker: RunTracker) -> Evaluations:
    """The evaluations of a run; none is ever due without tasks."""
    measured, run_dir = config.eval, config.run.run_dir
    return Evaluations(
        pool,
        tasks,
        eval_settings(config),
        every=measured.eval_every if tasks else 0,
        num_steps=config.run.num_steps,
        best=BestModel(run_dir, learner, measured.keep_best) if measured.keep_best and run_dir is not None else None,
        max_failure_rate=config.flow.max_failure_rate,
        on_result=tracker.on_evaluation,
        on_stage=tracker.on_stage,
    )

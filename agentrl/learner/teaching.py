"""Scores of a served teacher in a training step: which tokens the policy is asked for, and how far it is from the teacher."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from agentrl.algo.distillation import top_k_divergence
from agentrl.config.algorithm import AlgoConfig
from agentrl.config.teacher import learner_teacher
from agentrl.core.errors import BatchError
from agentrl.learner.batch import Batch
from agentrl.learner.layout import MicroBatch


def check_taught(batch: Batch, algo: AlgoConfig) -> None:
    """Refuse a batch that a served teacher should have scored and has not.

    Raises:
        BatchError: If a turn has no scores.
    """
    if algo.teacher and not learner_teacher(algo.teacher) and batch.teacher is None:
        raise BatchError(f"--teacher {algo.teacher}: a turn was sent to the learner without scores of the teacher")


def with_teachers_tokens(micro: MicroBatch, batch: Batch) -> MicroBatch:
    """Return a micro-batch that asks for the log-probabilities of the teacher's tokens too: targets # [a, 1 + K]; without them as it is."""
    if batch.teacher_ids is None:
        return micro
    return replace(micro, targets=torch.cat([micro.targets[:, None], batch.teacher_ids[micro.actions]], dim=1))


def divergence_from_teacher(scores: Tensor, at: Tensor, batch: Batch, direction: str) -> tuple[Tensor, Tensor | None]:
    """Return the log-probabilities of the action tokens # [a], and the divergence from the teacher # [a] if the policy was asked for that.

    Args:
        scores: What the policy gave for a micro-batch, with gradient. # [a] or [a, 1 + K]
        at: Places of its action tokens in the batch. # [a]
        batch: The batch, with scores of the teacher.
        direction: ``forward`` or ``reverse``.
    """
    if scores.ndim == 1 or batch.teacher_top is None:
        return scores, None
    return scores[:, 0], top_k_divergence(scores[:, 1:], batch.teacher_top[at], direction)

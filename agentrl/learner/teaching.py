"""Scores of a served teacher in a training step: which tokens the policy is asked for, and how far it is from the teacher."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from agentrl.algo.distillation import top_k_divergence
from agentrl.algo.plan import AlgoConfig
from agentrl.algo.teacher_specs import served_teachers
from agentrl.core.errors import BatchError
from agentrl.learner.batch import Batch, TurnRow
from agentrl.learner.layout import MicroBatch


def check_taught(batch: Batch, algo: AlgoConfig) -> None:
    """Refuse a batch that a served teacher should have scored and has not.

    Raises:
        BatchError: If a turn has no scores.
    """
    if served_teachers(algo.teacher) and batch.teacher is None:
        raise BatchError(f"--teacher {algo.teacher}: a turn was sent to the learner without scores of the teacher")


def with_hints(batch: Batch) -> Batch:
    """Return a batch in which each row begins with what ``--teacher self`` reads; its action tokens are the same, in the same order."""
    rows = tuple(_hinted(row) for row in batch.rows)
    lengths = [sum(len(turn.prompt_ids) + len(turn.token_ids) for turn in row.turns) for row in rows]
    return replace(batch, rows=rows, row_lengths=torch.tensor(lengths))


def _hinted(row: TurnRow) -> TurnRow:
    first, *others = (replace(turn, experts=None) for turn in row.turns)  # the engine chose experts for other tokens
    prompt = first.prompt_ids if first.hinted_ids is None else first.hinted_ids
    return replace(row, turns=(replace(first, prompt_ids=prompt), *others))


def with_scores(batch: Batch, scores: Tensor, vocabulary: int) -> Batch:
    """Return a batch with the scores of a teacher on this rank, as one with those of a served teacher.

    Args:
        batch: The batch.
        scores: Log-probability of each action token # [A], or with those of the K most likely tokens and the ids of these # [A, 1 + 2 K].
        vocabulary: Tokens of the policy; a teacher may have more, which are left out.
    """
    if scores.ndim == 1:
        return replace(batch, teacher=scores)
    top_k = scores.shape[1] // 2
    ids = scores[:, 1 + top_k :].to(torch.int64)
    known = ids < vocabulary
    best = scores[:, 1 : 1 + top_k].where(known, float("-inf"))
    return replace(batch, teacher=scores[:, 0], teacher_ids=ids.where(known, 0), teacher_top=best)


def with_teachers_tokens(micro: MicroBatch, batch: Batch) -> MicroBatch:
    """Return a micro-batch that asks for the log-probabilities of the teacher's tokens too: targets # [a, 1 + K]; without them as it is."""
    if batch.teacher_ids is None:
        return micro
    apart = micro.predicted_apart()
    return replace(apart, targets=torch.cat([apart.targets[:, None], batch.teacher_ids[micro.actions]], dim=1))


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

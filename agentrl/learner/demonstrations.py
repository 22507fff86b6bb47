"""Imitation of demonstrations beside reinforcement learning: more micro-batches in each update, with a denominator of their own."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from agentrl.core.types import IntArray
from agentrl.learner.rows import Rows, TokenRow
from agentrl.learner.step import TrainingStep
from agentrl.learner.targets import Update


def as_rows(demonstrations: Sequence[tuple[IntArray, IntArray]]) -> Rows:
    """Return demonstrations, each with its tokens # [L] and the places that predict trained ones # [A], as the rows of a step."""
    counts = torch.tensor([len(reads) for _, reads in demonstrations])
    return Rows(
        rows=tuple(TokenRow(tokens=tokens, reads=reads) for tokens, reads in demonstrations),
        row_lengths=torch.tensor([len(tokens) for tokens, _ in demonstrations]),
        row_actions=counts,
        row=torch.arange(len(counts)).repeat_interleave(counts),
    )


class Imitation:
    """Adds to each update of a step ``coefficient`` times the mean of ``-log p`` over the trained tokens of its demonstrations.

    Args:
        run: The step.
        rows: Its demonstrations, on the CPU; the updates of a pass over the batch share them.
        coefficient: Weight in the loss; with 0 the demonstrations are scored, and not trained.
    """

    def __init__(self, run: TrainingStep, rows: Rows, coefficient: float) -> None:
        self._run, self._coefficient = run, coefficient
        self._parts = run.lay_out(rows, lambda numbers: float(rows.row_actions[list(numbers)].sum()))

    def accumulate(self, update: Update, num_updates: int) -> None:
        """Add the gradient of the demonstrations of an update, whose other micro-batches follow, and record their metrics."""
        # A batch of few groups has fewer updates than there are parts.
        parts = self._parts[update.number :: num_updates]
        tokens, stats, policy = sum(part.sizes for part in parts), self._run.stats, self._run.models.policy
        with self._run.clock.phase("demonstrations"), torch.set_grad_enabled(self._coefficient > 0):
            for part in parts:
                for micro in self._run.on_device(part):
                    surprise = -policy(micro)[0].sum()
                    stats.mean("sft/loss", surprise.item(), float(len(micro.actions)))
                    stats.total("sft/tokens", float(len(micro.actions)))
                    if self._coefficient:
                        loss = self._coefficient * surprise / tokens
                        policy.accumulate(loss, last=False)
                        # The micro-batches of the batch give the means over updates their weight.
                        stats.mean("loss", loss.item(), 0.0)
                        stats.mean("loss/sft", loss.item(), 1.0 / (len(part.micros) * len(parts) * self._run.ranks.data_size))

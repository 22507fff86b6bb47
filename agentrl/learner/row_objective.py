"""Supervised and preference training as the objective of a step: an objective of `agentrl.algo.objectives` over rows of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from agentrl.algo.facts import ObjectiveFacts, facts_of
from agentrl.algo.row_losses import RowObjective, RowScores, StepRows
from agentrl.learner.layout import MicroBatch
from agentrl.learner.parameters import on_device
from agentrl.learner.rows import Rows
from agentrl.learner.step import ModelScores, Objective, TrainingStep
from agentrl.learner.targets import Update


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LabelledRows(Rows):
    """Rows with values of their own; of pairs the chosen row comes first, and the rejected one follows it.

    Attributes:
        columns: Values of each row by name. # [R] each
        labels: Label of each place that is read; `None` where there are none. # [A]
        paired: Rows are pairs, whose two rows are always scored together.
        companions: Rows that are scored by the policy before the update, and not trained.
    """

    columns: Mapping[str, Tensor] = field(default_factory=dict)
    labels: Tensor | None = None
    paired: bool = False
    companions: LabelledRows | None = None

    @property
    def whole_groups(self) -> bool:
        """True for pairs."""
        return self.paired

    def row_group(self) -> Tensor:
        """Number of each pair, or of each row. # [R] int64."""
        numbers = torch.arange(self.num_rows)
        return numbers // 2 if self.paired else numbers


class RowsObjective(Objective):
    """The objective of one step on rows of tokens.

    Args:
        run: The step.
        rows: Its rows, on the CPU.
        function: The objective.
        options: Its options.
    """

    host: LabelledRows

    def __init__(self, run: TrainingStep, rows: LabelledRows, function: RowObjective, options: Any) -> None:
        self.run, self.host, self.function, self.options = run, rows, function, options
        self.facts: ObjectiveFacts = facts_of(function)
        self.row = rows.row.to(run.ranks.device)
        self.reference: Tensor | None = None
        self.columns: dict[str, Tensor] = {}

    def sizes(self, rows: Sequence[int]) -> float:
        """Return the number of losses of an update on some rows."""
        if self.facts.unit == "place":
            return float(self.host.row_actions[list(rows)].sum())
        return len(rows) / 2 if self.facts.unit == "pair" else float(len(rows))

    def prepare(self, updates: Sequence[Update]) -> None:
        """Score rows by the reference, and by the policy where the objective wants it, and let it prepare columns."""
        host, companions, first = self.host, self.host.companions, self.facts.first_pass
        if self.run.settings.algo.aux_loss_coef and torch.is_grad_enabled():
            self.chosen = self._loads(updates)
        sums = reference = torch.zeros(host.num_rows, device=self.row.device)
        if self.facts.reference:
            self.reference = reference = self._sums(self.run.models.reference, host, updates)
        if callable(first) and first(self.options):
            sums = self._sums(self.run.models.policy, host, updates)
        if companions is not None:
            laid_out = self.run.lay_out(companions, len)
            sums, reference = (self._sums(model, companions, laid_out) for model in (self.run.models.policy, self.run.models.reference))
        self.columns = {name: values.to(self.row.device) for name, values in host.columns.items()}
        if self.facts.prepare is not None:
            step = StepRows(lengths=host.row_actions.to(self.row.device), sums=sums, reference=reference)
            self.columns |= self.facts.prepare(step, self.options)

    def _sums(self, model: Any, rows: Rows, updates: Sequence[Update]) -> Tensor:
        """Return the log-probability of each row by a model. # [R]."""
        frozen = model is not self.run.models.policy
        moved = on_device(model, self.run.ranks.device) if frozen else nullcontext()
        with self.run.clock.phase("reference" if frozen else "first_pass"), moved:
            found = self.run.over_batch(lambda micro: model(micro)[0], updates, (rows.num_actions,))
        return found.new_zeros(rows.num_rows).index_add(0, rows.row.to(found.device), found)

    def _loads(self, updates: Sequence[Update]) -> Tensor:
        """Return how often each expert is chosen in each update. # [updates, experts]."""
        with self.run.clock.phase("experts"), torch.no_grad():
            loads = [[self.run.models.policy(micro)[2][0] for micro in self.run.on_device(update)] for update in updates]
        return self.run.ranks.sum(torch.stack([torch.stack(part).sum(0) for part in loads]))

    def asked(self, micro: MicroBatch) -> MicroBatch:
        """Return a micro-batch that asks for the likeliest tokens too, if they are reported, or for the divergence from the teacher."""
        if self.facts.reads == "divergence":
            teacher = self.run.models.teacher
            with torch.no_grad(), on_device(teacher, self.run.ranks.device):
                return replace(micro, teacher=teacher(replace(micro, hidden=True))[0])
        return replace(micro, top_k=int("token_accuracy" in self.facts.figures))

    def losses(self, micro: MicroBatch, scores: ModelScores, update: Update, done: float) -> dict[str, Tensor]:
        """Return the share of a micro-batch in the loss of the step, and record its metrics."""
        found = self.function(self._scores(micro, *scores[:2]), self.options)
        for name, values in found.metrics.items():
            self.run.record_mean(name, values.detach().float())
        return {"loss/objective": found.losses.sum() / update.sizes}

    def _scores(self, micro: MicroBatch, outputs: Tensor, entropies: Tensor) -> RowScores:
        numbers, row = torch.unique(self.row[micro.actions], return_inverse=True)
        figures: dict[str, Tensor] = {}
        if self.facts.reads == "divergence":
            figures = dict(zip(self.facts.figures, entropies.unbind(-1), strict=True))
        elif self.facts.reads == "tokens" and outputs.ndim == 2:
            figures = {"token_accuracy": outputs[:, 2] == micro.by_action(micro.targets), "entropy": entropies}
            outputs = outputs[:, 0]
        labels = None if self.host.labels is None else self.host.labels.to(self.row.device)[micro.actions]
        return RowScores(
            num_rows=len(numbers),
            row=row,
            outputs=outputs,
            figures=figures,
            reference=None if self.reference is None else self.reference[numbers],
            columns={name: values[numbers] for name, values in self.columns.items()},
            labels=labels,
        )

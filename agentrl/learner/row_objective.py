"""Supervised and preference training as the objective of a step: an objective of `agentrl.algo.objectives` over rows of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from agentrl.algo.compute import compute_objective, prepare_rows
from agentrl.algo.facts import ObjectiveFacts, facts_of
from agentrl.algo.row_losses import ObjectiveFunction, RowScores, StepRows
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
        companions: Rows that are scored by the policy before the update, and not trained.
    """

    columns: Mapping[str, Tensor] = field(default_factory=dict)
    labels: Tensor | None = None
    companions: LabelledRows | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowFigures:
    """Figures of rows.

    Attributes:
        losses: Loss of each place # [A], or of each row; that of a pair is at its chosen row. # [R]
        rewards: Reward of each row; `None` where rows have none. # [R]
        logprobs: Log-probability of the token behind each place; `None` for a model that predicts none. # [A]
    """

    losses: Tensor
    rewards: Tensor | None
    logprobs: Tensor | None


class RowsObjective(Objective):
    """The objective of one step on rows of tokens.

    Args:
        run: The step.
        rows: Its rows, on the CPU.
        function: The objective.
        options: Its options.
    """

    host: LabelledRows

    def __init__(self, run: TrainingStep, rows: LabelledRows, function: ObjectiveFunction, options: Any) -> None:
        self.run, self.host, self.function, self.options = run, rows, function, options
        self.facts: ObjectiveFacts = facts_of(function)
        self.row = rows.row.to(run.ranks.device)
        self.reference = torch.zeros(rows.num_rows, device=self.row.device)
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
        sums = torch.zeros_like(self.reference)
        if self.facts.reference:
            self.reference = self._sums(self.run.models.reference, host, updates)
        reference = self.reference
        if first is not None and first(self.options):
            sums = self._sums(self.run.models.policy, host, updates)
        if companions is not None and self.facts.reference:
            laid_out = self.run.lay_out(companions, len)
            sums, reference = (self._sums(model, companions, laid_out) for model in (self.run.models.policy, self.run.models.reference))
        self.columns = {name: values.to(self.row.device) for name, values in host.columns.items()}
        step = StepRows(lengths=host.row_actions.to(self.row.device), sums=sums, reference=reference)
        self.columns |= prepare_rows(self.function, step, self.options)

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
        # Ranks that run the same micro-batches have the same loads.
        return self.run.ranks.sum(torch.stack([torch.stack(part).sum(0) for part in loads]) * self.run.ranks.leads)

    def asked(self, micro: MicroBatch) -> MicroBatch:
        """Return a micro-batch that asks for the likeliest tokens too, if they are reported, or for the divergence from the teacher."""
        if self.facts.reads == "divergence":
            teacher = self.run.models.teacher
            with torch.no_grad(), on_device(teacher, self.run.ranks.device):
                return replace(micro, teacher=teacher(replace(micro, hidden=True))[0])
        return replace(micro, top_k=int("token_accuracy" in self.facts.figures))

    def losses(self, micro: MicroBatch, scores: ModelScores, update: Update, done: float) -> dict[str, Tensor]:
        """Return the share of a micro-batch in the loss of the step, and record its metrics."""
        found = compute_objective(self.function, self._scores(micro, *scores[:2]), self.options)
        for name, values in found.metrics.items():
            self.run.record_mean(name, values.detach().float())
        return {"loss/objective": found.losses.sum() / update.sizes}

    @torch.no_grad()
    def measure(self) -> RowFigures:
        """Return the figures of each row, whose metrics count for no step."""
        host, policy = self.host, self.run.models.policy
        updates = self.run.lay_out(host, self.sizes)
        self.prepare(updates)
        device, size = self.row.device, host.num_actions if self.facts.unit == "place" else host.num_rows
        losses, rewards, rewarded = torch.zeros(size, device=device), torch.zeros(host.num_rows, device=device), False
        for update in updates:
            for micro in self.run.on_device(update):
                found = compute_objective(self.function, self._scores(micro, *policy(self.asked(micro))[:2]), self.options)
                numbers = torch.unique(self.row[micro.actions])
                at = {"place": micro.actions, "row": numbers, "pair": numbers[::2]}[self.facts.unit]
                if self.run.ranks.leads:
                    losses[at] = found.losses
                if self.run.ranks.leads and found.rewards is not None:
                    rewards[numbers] = found.rewards
                rewarded = rewarded or found.rewards is not None
        logprobs = None
        if self.facts.reads != "head":
            logprobs = self.run.over_batch(lambda micro: policy(micro)[0], updates, (host.num_actions,))
        summed = self.run.ranks.sum(rewards) if rewarded else None
        return RowFigures(losses=self.run.ranks.sum(losses), rewards=summed, logprobs=logprobs)

    def _scores(self, micro: MicroBatch, outputs: Tensor, entropies: Tensor) -> RowScores:
        numbers, row = torch.unique(self.row[micro.actions], return_inverse=True)
        figures = dict(zip(self.facts.figures, entropies.unbind(-1), strict=True)) if self.facts.figures else {}
        labels = None if self.host.labels is None else self.host.labels.to(self.row.device)[micro.actions]
        return RowScores(
            num_rows=len(numbers),
            row=row,
            outputs=outputs,
            figures=figures,
            reference=self.reference[numbers],
            columns={name: values[numbers] for name, values in self.columns.items()},
            labels=labels,
        )

"""Objectives of the methods: the losses and metrics that a model gives on a micro-batch.

A loss belongs to a row or to a token; `agentrl.tune.trainer` takes their mean over a step, whatever micro-batches and ranks they are in.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from accelerate.utils import extract_model_from_parallel, reduce
from peft import PeftModel
from torch import Tensor
from torch.nn import functional

from agentrl.algo.facts import ObjectiveFacts, facts_of
from agentrl.algo.objectives import OBJECTIVES as ROW_OBJECTIVES
from agentrl.algo.objectives.distill import compared
from agentrl.algo.row_losses import RowScores, StepRows
from agentrl.learner.head import only_positions, scores_in_chunks
from agentrl.tune.row_text import IGNORED

Batch: TypeAlias = Mapping[str, Any]
"""Tensors that `agentrl.tune.trainer.Collator` makes of rows."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The losses and metrics of a micro-batch.

    Attributes:
        losses: Loss of each row or token. # [n]
        metrics: Values of rows or tokens by the name of their metric, which is their mean.
        balance: Load-balancing loss of a mixture of experts, with its weight; `None` for other models.
    """

    losses: Tensor
    metrics: Mapping[str, Tensor]
    balance: Tensor | None = None


Objective: TypeAlias = Callable[[Any, Any, Any, Batch], Measured]
"""Makes losses and metrics of the method's own settings, its frozen model, the model in training, and a micro-batch.

The frozen model is a teacher or a reference; `None` where there is none, or where the reference is the model without its adapter.
"""


@dataclass(frozen=True, slots=True)
class Scores:
    """The scores of the labelled tokens of a micro-batch: log-probabilities, entropies, and which tokens are the likeliest. # [n] each."""

    mask: Tensor  # the predicted tokens that are labelled # [B, L - 1]
    logprobs: Tensor
    entropies: Tensor
    correct: Tensor
    balance: Tensor | None

    def row_sums(self) -> Tensor:
        """Return the log-probability of each row's answer. # [B]."""
        return torch.zeros_like(self.mask, dtype=self.logprobs.dtype).masked_scatter(self.mask, self.logprobs).sum(dim=1)


def labelled(batch: Batch) -> Tensor:
    """Return which tokens, the first of each row left out, are labelled. # [B, L - 1] bool."""
    return batch["labels"][:, 1:] != IGNORED  # type: ignore[no-any-return]


def inputs_of(batch: Batch) -> dict[str, Any]:
    """Return the arguments of a model for a batch."""
    given = {name: batch[name] for name in ("input_ids", "attention_mask", "position_ids") if name in batch}
    return {**given, **batch.get("pixels", {}), "use_cache": False}


def label_logits(model: Any, batch: Batch) -> tuple[Tensor, Tensor | None]:
    """Return the logits that predict labelled tokens # [n, V], and in training the weighted load-balancing loss of a mixture of experts."""
    plain = extract_model_from_parallel(model)
    coefficient = getattr(plain.config.get_text_config(), "router_aux_loss_coef", None)
    balanced = bool(coefficient) and torch.is_grad_enabled()
    # A label is predicted at the place before it, and nothing is at the last place.
    select = functional.pad(labelled(batch), (0, 1)).flatten().nonzero()[:, 0]
    with only_positions(plain.get_output_embeddings(), select):
        output = model(**inputs_of(batch), **({"output_router_logits": True} if balanced else {}))
    return output.logits[0], coefficient * output.aux_loss if balanced else None


def score(model: Any, batch: Batch) -> Scores:
    """Return the scores of a micro-batch's labelled tokens by a model."""
    logits, balance = label_logits(model, batch)
    mask = labelled(batch)
    targets = batch["labels"][:, 1:][mask]
    logprobs, entropies = scores_in_chunks(logits, targets, torch.ones_like(targets, dtype=torch.float32), entropy_gradient=False)
    return Scores(mask, logprobs, entropies, logits.argmax(dim=-1) == targets, balance)


def count_losses(batch: Batch) -> int:
    """Return the number of losses of a micro-batch: its pairs or answers, or else its labelled tokens."""
    per_row = next((batch[name] for name in ("margin", "desirable") if name in batch), None)
    return int(labelled(batch).sum()) if per_row is None else len(per_row)


@torch.no_grad()
def reference_sums(frozen: Any, model: Any, batch: Batch) -> Tensor:
    """Return the log-probability of each row's answer by the reference. # [B]."""
    plain = extract_model_from_parallel(model)
    with plain.disable_adapter() if frozen is None and isinstance(plain, PeftModel) else nullcontext():
        return score(model if frozen is None else frozen, batch).row_sums()


def scored(command: str, own: Any, frozen: Any, model: Any, batch: Batch) -> tuple[RowScores, Tensor | None]:
    """Return what an objective reads of a micro-batch, and its load-balancing loss."""
    facts: ObjectiveFacts = facts_of(ROW_OBJECTIVES[command])
    mask = labelled(batch)
    row, num_rows = mask.nonzero()[:, 0], len(mask)
    if facts.unit == "pair":  # all chosen ones come first
        row = torch.where(row < num_rows // 2, 2 * row, 2 * row - num_rows + 1)
    rest: dict[str, Any] = {"columns": {"desirable": batch["desirable"]} if "desirable" in batch else {}}
    if "margin" in batch:
        rest["columns"] = {"margin": batch["margin"].repeat_interleave(2)}
    if command == "reward-model":
        places = torch.cat([torch.arange(0, num_rows, 2), torch.arange(1, num_rows, 2)])
        return RowScores(num_rows=num_rows, row=places, outputs=model(**inputs_of(batch)).logits[:, 0], **rest), None
    if facts.reads == "head":
        logits, labels = model(**inputs_of(batch)).logits[:, 1:][mask], batch["labels"][:, 1:][mask]
        return RowScores(num_rows=num_rows, row=row, outputs=logits, labels=labels), None
    if facts.reads == "divergence":
        mine, balance = label_logits(model, batch)
        with torch.no_grad():
            theirs, _ = label_logits(frozen, batch)
        losses, measured = compared(mine, theirs, own)
        return RowScores(num_rows=num_rows, row=row, outputs=losses, figures=dict(zip(facts.figures, measured.T, strict=True))), balance
    scores = score(model, batch)
    if facts.reference:
        reference = reference_sums(frozen, model, batch)
        rest["reference"] = torch.stack(reference.chunk(2), 1).flatten() if facts.unit == "pair" else reference
    figures = {"token_accuracy": scores.correct, "entropy": scores.entropies}
    return RowScores(num_rows=num_rows, row=row, outputs=scores.logprobs, figures=figures, **rest), scores.balance


def measure(command: str, own: Any, frozen: Any, model: Any, batch: Batch) -> Measured:
    """Return the losses and metrics of an objective; what belongs to a step is computed over the micro-batch."""
    scores, balance = scored(command, own, frozen, model, batch)
    prepare, zeros = facts_of(ROW_OBJECTIVES[command]).prepare, torch.zeros(scores.num_rows)
    columns = dict(scores.columns)
    if command == "kto":
        mismatched = batch["mismatched"]
        with torch.no_grad():
            divergence = (score(model, mismatched).row_sums() - reference_sums(frozen, model, mismatched)).mean()
        # One estimate for all ranks, so that the loss of a row does not depend on the rank that it is on.
        columns["divergence"] = reduce(divergence, "mean").clamp(min=0).expand(scores.num_rows)
    elif prepare is not None:
        reference = zeros if scores.reference is None else scores.reference
        step = StepRows(lengths=scores.lengths(), sums=scores.sums().detach(), reference=reference)
        columns |= prepare(step, own)
    found = ROW_OBJECTIVES[command](replace(scores, columns=columns), own)
    return Measured(found.losses, found.metrics, balance)


OBJECTIVES: Mapping[str, Objective] = {command: functools.partial(measure, command) for command in ROW_OBJECTIVES}
"""Command -> objective of its method."""

"""Losses of supervised and preference training: what objectives are given of rows, and what they return.

The objectives themselves are in `agentrl.algo.objectives`. torch is imported when a loss is computed, so that a configuration can be
checked without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from agentrl.algo.statistics import segment_count, segment_sum

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowScores:
    """Scores of r whole rows at the places that are read, a together. The two rows of a pair follow each other, the chosen one first.

    Attributes:
        num_rows: Number of rows, r.
        row: Row of each place, from 0. # [a] int64
        outputs: What the facts of the objective say that it reads, with gradient. # [a], or # [a, labels] of a head
        figures: What is reported of the distribution at each place, by the name of its metric. # [a] each
        reference: Log-probability of each row by the reference; 0 without one. # [r]
        columns: Values of each row by name: those that came with the rows, and those that the objective prepared. # [r] each
        labels: Label of each place; `None` where rows have none. # [a]
    """

    num_rows: int
    row: Tensor
    outputs: Tensor
    reference: Tensor
    figures: Mapping[str, Tensor] = field(default_factory=dict)
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    labels: Any = None

    def lengths(self) -> Tensor:
        """Return the number of places of each row. # [r] int64."""
        return segment_count(self.row, self.num_rows)

    def sums(self) -> Tensor:
        """Return the sum of the outputs of each row: of log-probabilities that of its trained tokens. # [r]."""
        return segment_sum(self.outputs, self.row, self.num_rows)


METRICS = {
    *("token_accuracy", "entropy", "accuracy", "margin", "reward/chosen", "reward/rejected", "reward/mean"),
    *("logprob/chosen", "logprob/rejected", "kl", "nll", "log_odds", "label/mean", "agreement"),
}
"""Metrics of the built-in objectives; another one is reported behind `OWN`."""
OWN = "own/"


def pairs(values: Tensor) -> tuple[Tensor, Tensor]:
    """Divide values of rows # [r] into those of the chosen and of the rejected ones. # [r / 2] each."""
    chosen, rejected = values.view(-1, 2).unbind(1)
    return chosen, rejected


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepRows:
    """Facts of the R rows of a whole step before its update, or of their companions, one for each.

    Attributes:
        lengths: Places of each row that are read. # [R]
        sums: Log-probability of each row by the policy; 0 for those that it was not run on. # [R]
        reference: The same by the reference; 0 without one. # [R]
    """

    lengths: Tensor
    sums: Tensor
    reference: Tensor


Prepare: TypeAlias = "Callable[[StepRows, Any], Mapping[str, Tensor]]"
"""From the rows of a step and the objective's options to values of rows # [R], which losses find among their columns."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowLosses:
    """The losses of rows, places or pairs, and what is reported about them.

    Attributes:
        losses: To be minimised; the loss of a step is their mean. # [n]
        metrics: Values by the name of their metric, which is their mean. # [any] each
        rewards: Reward of each row, for people who read rows; `None` where rows have none. # [r]
    """

    losses: Tensor
    metrics: Mapping[str, Tensor]
    rewards: Tensor | None = None


def preference_metrics(rewards: Tensor) -> dict[str, Tensor]:
    """Return the metrics of the implicit rewards of pairs. # [r] -> [r / 2] each."""
    chosen, rejected = pairs(rewards)
    return {"reward/chosen": chosen, "reward/rejected": rejected, "accuracy": chosen > rejected}


ObjectiveFunction: TypeAlias = "Callable[[RowScores, Any], RowLosses]"
"""From scores and the objective's options to losses."""

"""KTO: answers that are desirable or not, against a reference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentrl.algo.facts import objective
from agentrl.algo.row_losses import RowLosses, RowScores, StepRows
from agentrl.core.settings import NonNegative, Positive

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class KtoOptions:
    """Options of `kto`."""

    beta: Positive = 0.1
    """Strength of the pull to the reference model."""
    desirable_weight: NonNegative = 1.0
    """Weight of the loss of desirable answers."""
    undesirable_weight: NonNegative = 1.0
    """Weight of the loss of undesirable answers."""


def divergence(step: StepRows, options: KtoOptions) -> Mapping[str, Tensor]:
    """Return the estimate z of the divergence between policy and reference: the mean log-ratio of mismatched answers, at least 0. # [R]."""
    return {"divergence": (step.sums - step.reference).mean().clamp(min=0).expand(len(step.sums))}


@objective(unit="row", options=KtoOptions, reference=True, prepare=divergence)
def kto(scores: RowScores, options: KtoOptions) -> RowLosses:
    """The loss of each answer against z, the divergence that mismatched answers of the step estimate; see `kahneman_tversky`."""
    good, z, sums = scores.columns["desirable"].bool(), scores.columns["divergence"], scores.sums()
    ratios = sums - scores.reference
    weights = {"desirable_weight": options.desirable_weight, "undesirable_weight": options.undesirable_weight}
    losses = kahneman_tversky(ratios, good, z, beta=options.beta, **weights)
    rewards = options.beta * ratios
    metrics = {"reward/chosen": rewards[good], "reward/rejected": rewards[~good], "kl": z[:1]}
    metrics |= {"logprob/chosen": sums[good], "logprob/rejected": sums[~good]}
    return RowLosses(losses=losses, metrics=metrics, rewards=rewards)


def kahneman_tversky(
    ratios: Tensor, desirable: Tensor, divergence: Tensor, *, beta: float, desirable_weight: float, undesirable_weight: float
) -> Tensor:
    """Return the KTO loss of each answer (Ethayarajh et al., arXiv:2402.01306, Eq. 7): ``w (1 - sigmoid(s beta (ratio - z)))``.

    Args:
        ratios: Log-ratio of policy to reference of each answer. # [B]
        desirable: Answers with s = 1; the others have s = -1. # [B] bool
        divergence: Estimate z of the divergence between policy and reference, without a gradient. # [B], or a scalar
        beta: Strength of the pull to the reference.
        desirable_weight: Weight w of desirable answers.
        undesirable_weight: Weight w of the others.

    Returns:
        Loss of each answer. # [B]
    """
    import torch

    sign = torch.where(desirable, 1.0, -1.0)
    return torch.where(desirable, desirable_weight, undesirable_weight) * (1 - torch.sigmoid(sign * beta * (ratios - divergence)))

"""Reward models: scores of answers, of which the preferred ones are higher."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentrl.algo.facts import objective
from agentrl.algo.row_losses import RowLosses, RowScores, pairs
from agentrl.core.settings import NonNegative

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class RewardModelOptions:
    """Options of `reward_model`."""

    center_rewards_coefficient: NonNegative = 0.0
    """Weight of the squared sum of a pair's two rewards, which keeps the mean reward near 0 (arXiv:2312.09244)."""


@objective(unit="pair", options=RewardModelOptions, reads="head")
def reward_model(scores: RowScores, options: RewardModelOptions) -> RowLosses:
    """The loss of Bradley and Terry of the rewards of pairs, each read at the end of its row; see `bradley_terry`."""
    rewards = scores.sums()
    chosen, rejected = pairs(rewards)
    margin, _ = pairs(scores.columns["margin"])
    losses = bradley_terry(chosen, rejected, margin=margin, centring=options.center_rewards_coefficient)
    metrics = {"accuracy": chosen > rejected, "margin": chosen - rejected, "reward/mean": rewards}
    return RowLosses(losses=losses, metrics=metrics, rewards=rewards)


def bradley_terry(chosen: Tensor, rejected: Tensor, *, margin: Tensor, centring: float) -> Tensor:
    """Return the loss of each pair of rewards: ``-log sigmoid(chosen - rejected - margin) + c (chosen + rejected)^2``.

    Args:
        chosen: Reward of each preferred answer. # [B]
        rejected: Reward of each other answer. # [B]
        margin: Margin by which the preferred answer is to score higher (arXiv:2307.09288). # [B]
        centring: Weight c of the squared sum, which keeps the mean reward near 0 (arXiv:2312.09244).

    Returns:
        Loss of each pair. # [B]
    """
    from torch.nn.functional import logsigmoid

    return -logsigmoid(chosen - rejected - margin) + centring * (chosen + rejected) ** 2

"""Two objectives of one's own for supervised and preference training; copy the file, and change it.

agentrl sft --data examples/tune/chats.jsonl --loss examples/own_loss.py:focal --focus 2
agentrl dpo --data examples/tune/pairs.jsonl --loss examples/own_loss.py:hard_pairs --beta 0.2
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import agentrl

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Focus:
    """Options of the loss for SFT; each has a default."""

    focus: float = 2.0
    """Power of 1 - p that weighs a token, so that those that are known count less."""


@agentrl.objective(unit="place", options=Focus, figures=("token_accuracy", "entropy"))
def focal(scores: agentrl.RowScores, options: Focus) -> agentrl.RowLosses:
    """The focal loss of each trained token (Lin et al., arXiv:1708.02002, Eq. 4): ``-(1 - p)^focus log p``."""
    weights = (1 - scores.outputs.detach().exp()) ** options.focus
    return agentrl.RowLosses(losses=-weights * scores.outputs, metrics={**scores.figures, "weight": weights})  # own/weight


@dataclass(frozen=True, kw_only=True)
class Pull:
    """Options of the loss of pairs."""

    beta: float = 0.1
    """Strength of the pull to the reference model."""


@agentrl.objective(unit="pair", options=Pull, reference=True)
def hard_pairs(scores: agentrl.RowScores, options: Pull) -> Tensor:
    """DPO's loss of each pair, weighed by how far the policy is from the preference: by 1 - sigmoid(margin)."""
    rewards = options.beta * (scores.sums() - scores.reference)  # one per row
    chosen, rejected = rewards.view(-1, 2).unbind(1)  # the chosen row of a pair comes first
    margin = chosen - rejected
    return -(1 - margin.sigmoid()).detach() * margin.sigmoid().log()

"""Process reward models: a judgement of each step of an answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentrl.algo.facts import objective
from agentrl.algo.options import NoOptions
from agentrl.algo.row_losses import RowLosses, RowScores

if TYPE_CHECKING:
    from torch import Tensor


@objective(unit="place", reads="head")
def process_reward_model(scores: RowScores, options: NoOptions) -> RowLosses:
    """The cross-entropy of each labelled step, judged at its last token (Lightman et al., arXiv:2305.20050); see `step_cross_entropy`."""
    correct = (scores.outputs[:, 1] > scores.outputs[:, 0]) == (scores.labels > 0.5)
    losses = step_cross_entropy(scores.outputs, scores.labels)
    return RowLosses(losses=losses, metrics={"accuracy": correct, "label/mean": scores.labels})


def step_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy of each step's label: ``-(y log p + (1 - y) log(1 - p))`` with p the probability of class 1.

    Args:
        logits: Logits of the classes bad and good. # [S, 2]
        labels: Probability that each step is good, 0 or 1 for a plain label. # [S]

    Returns:
        Loss of each step. # [S]
    """
    from torch.nn import functional

    log_probabilities = functional.log_softmax(logits.float(), dim=-1)
    return -(labels * log_probabilities[:, 1] + (1 - labels) * log_probabilities[:, 0])

"""Losses of the methods: pure functions on tensors, each with its formula and its source."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import logsigmoid


@dataclass(frozen=True, slots=True)
class PairRatios:
    """Log-probabilities of the answers of pairs, summed over their tokens, by the policy and by its reference. # [B] each."""

    policy_chosen: Tensor
    policy_rejected: Tensor
    reference_chosen: Tensor
    reference_rejected: Tensor
    chosen_length: Tensor  # tokens
    rejected_length: Tensor

    @property
    def chosen(self) -> Tensor:
        """Log-ratios of policy to reference of the chosen answers."""
        return self.policy_chosen - self.reference_chosen

    @property
    def rejected(self) -> Tensor:
        """Log-ratios of policy to reference of the rejected answers."""
        return self.policy_rejected - self.reference_rejected

    @property
    def difference(self) -> Tensor:
        """Log-ratios of the chosen answers less those of the rejected ones."""
        return self.chosen - self.rejected

    @property
    def difference_per_token(self) -> Tensor:
        """The same of log-ratios that are means over tokens."""
        return self.chosen / self.chosen_length - self.rejected / self.rejected_length


def smoothed_loss(difference: Tensor, label_smoothing: float) -> Tensor:
    """Return ``-(1 - e) log sigmoid(d) - e log sigmoid(-d)``, the cross-entropy of labels of which a share e is wrong. # [B]."""
    return -(1 - label_smoothing) * logsigmoid(difference) - label_smoothing * logsigmoid(-difference)


def exo(difference: Tensor, label_smoothing: float) -> Tensor:
    """Return the EXO loss (Ji et al., arXiv:2402.00856, Eq. 16): KL(q || p) with q = softmax of the rewards, p = (1 - e, e). # [B]."""
    chosen, rejected = logsigmoid(difference), logsigmoid(-difference)
    return chosen.exp() * (chosen - math.log1p(-label_smoothing)) + rejected.exp() * (rejected - math.log(label_smoothing))


def discovered_preference(difference: Tensor) -> Tensor:
    """Return the loss DiscoPOP (Lu et al., arXiv:2406.08414, Eq. 5), a mixture of the logistic and the exponential loss. # [B]."""
    mixing = torch.sigmoid(difference / DISCOVERED_TEMPERATURE)
    return -logsigmoid(difference) * (1 - mixing) + torch.exp(-difference) * mixing


DISCOVERED_TEMPERATURE = 0.05
"""Temperature of the mixture in `discovered_preference`, the paper's tau."""

PairLoss: TypeAlias = Callable[[PairRatios, float, float], Tensor]
"""From log-ratios, beta and the share of wrong labels to the loss of each pair. # [B]."""

PAIR_LOSSES: Mapping[str, PairLoss] = {
    # Rafailov et al., arXiv:2305.18290, Eq. 7
    "sigmoid": lambda r, beta, e: -logsigmoid(beta * r.difference),
    # Mitchell, A note on DPO with noisy preferences, 2023, Eq. 3
    "cdpo": lambda r, beta, e: smoothed_loss(beta * r.difference, e),
    # Azar et al., arXiv:2310.12036, Eq. 17; with means over tokens, as in TRL, the scale does not grow with the length of answers
    "ipo": lambda r, beta, e: (r.difference_per_token - 1 / (2 * beta)) ** 2,
    # the same equation as written, as in OpenRLHF
    "ipo_sum": lambda r, beta, e: (r.difference - 1 / (2 * beta)) ** 2,
    # Zhao et al., arXiv:2305.10425, with log-ratios as the scores
    "hinge": lambda r, beta, e: torch.relu(1 - beta * r.difference),
    # Chowdhury et al., arXiv:2403.00409, Eq. 12
    "robust": lambda r, beta, e: (-(1 - e) * logsigmoid(beta * r.difference) + e * logsigmoid(-beta * r.difference)) / (1 - 2 * e),
    "exo_pair": lambda r, beta, e: exo(beta * r.difference, e),
    # Chen et al., arXiv:2402.05369
    "nca_pair": lambda r, beta, e: -logsigmoid(beta * r.chosen) - 0.5 * logsigmoid(-beta * r.chosen) - 0.5 * logsigmoid(-beta * r.rejected),
    # Jung et al., arXiv:2404.04656, without the moving mean
    "bco_pair": lambda r, beta, e: -logsigmoid(beta * r.chosen) - logsigmoid(-beta * r.rejected),
    # Wu et al., arXiv:2405.00675, Eq. 4.7 with probabilities 1 and 0
    "sppo_hard": lambda r, beta, e: (r.chosen - 0.5 / beta) ** 2 + (r.rejected + 0.5 / beta) ** 2,
    # Melnyk et al., arXiv:2406.05882: quantiles of the micro-batch are compared, not pairs
    "aot": lambda r, beta, e: smoothed_loss(
        beta * ((r.policy_chosen - r.policy_rejected).sort().values - (r.reference_chosen - r.reference_rejected).sort().values), e
    ),
    "aot_unpaired": lambda r, beta, e: smoothed_loss(beta * (r.chosen.sort().values - r.rejected.sort().values), e),
    # D'Oosterlinck et al., arXiv:2408.06266, Eqs. 7 and 8
    "apo_zero": lambda r, beta, e: 1 - torch.sigmoid(beta * r.chosen) + torch.sigmoid(beta * r.rejected),
    "apo_down": lambda r, beta, e: torch.sigmoid(beta * r.chosen) + 1 - torch.sigmoid(beta * r.difference),
    "discopop": lambda r, beta, e: discovered_preference(beta * r.difference),
    # as `sigmoid`, with means over tokens
    "sigmoid_norm": lambda r, beta, e: -logsigmoid(beta * r.difference_per_token),
}
"""Name in ``agentrl dpo --loss`` -> loss of a pair."""


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
    return -logsigmoid(chosen - rejected - margin) + centring * (chosen + rejected) ** 2


def kahneman_tversky(
    ratios: Tensor, desirable: Tensor, divergence: Tensor, *, beta: float, desirable_weight: float, undesirable_weight: float
) -> Tensor:
    """Return the KTO loss of each answer (Ethayarajh et al., arXiv:2402.01306, Eq. 7): ``w (1 - sigmoid(s beta (ratio - z)))``.

    Args:
        ratios: Log-ratio of policy to reference of each answer. # [B]
        desirable: Answers with s = 1; the others have s = -1. # [B] bool
        divergence: Estimate z of the divergence between policy and reference, a scalar without a gradient.
        beta: Strength of the pull to the reference.
        desirable_weight: Weight w of desirable answers.
        undesirable_weight: Weight w of the others.

    Returns:
        Loss of each answer. # [B]
    """
    sign = torch.where(desirable, 1.0, -1.0)
    return torch.where(desirable, desirable_weight, undesirable_weight) * (1 - torch.sigmoid(sign * beta * (ratios - divergence)))


def odds_ratio(chosen: Tensor, rejected: Tensor) -> tuple[Tensor, Tensor]:
    """Return ORPO's odds-ratio loss of each pair, and the log odds ratio (Hong et al., arXiv:2403.07691, Eqs. 4 and 7).

    With p = exp(mean log-probability of a token of an answer) and odds = p / (1 - p):
    ``-log sigmoid(log odds(chosen) - log odds(rejected))``.

    Args:
        chosen: Mean log-probability per token of each preferred answer, below 0. # [B]
        rejected: The same of the other answers. # [B]

    Returns:
        Loss and log odds ratio of each pair. # [B], [B]
    """
    log_odds = (chosen - rejected) - (_log1mexp(chosen) - _log1mexp(rejected))
    return -logsigmoid(log_odds), log_odds


def _log1mexp(value: Tensor) -> Tensor:
    """Return log(1 - exp(value)) for values below 0, exact near 0 and far from it; 0 counts as the nearest number below."""
    value = value.clamp(max=-torch.finfo(value.dtype).eps)
    near = value > -0.6931472
    # The branch that is not taken needs a finite gradient too: `where` multiplies it by 0, and 0 times infinity is NaN.
    return torch.where(near, torch.log(-torch.expm1(value)), torch.log1p(-torch.exp(torch.where(near, -1.0, value))))


def step_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy of each step's label: ``-(y log p + (1 - y) log(1 - p))`` with p the probability of class 1.

    Args:
        logits: Logits of the classes bad and good. # [S, 2]
        labels: Probability that each step is good, 0 or 1 for a plain label. # [S]

    Returns:
        Loss of each step. # [S]
    """
    log_probabilities = functional.log_softmax(logits.float(), dim=-1)
    return -(labels * log_probabilities[:, 1] + (1 - labels) * log_probabilities[:, 0])


def generalized_jsd(student: Tensor, teacher: Tensor, *, beta: float, temperature: float = 1.0) -> Tensor:
    """Return the generalized Jensen-Shannon divergence at each token (Agarwal et al., arXiv:2306.13649, Eq. 1).

    With P the teacher's distribution, Q the student's and M = beta P + (1 - beta) Q: ``beta KL(P || M) + (1 - beta) KL(Q || M)``; 0 stands
    for the forward divergence KL(P || Q), 1 for the reverse one KL(Q || P), as in TRL.

    Args:
        student: Logits. # [N, V]
        teacher: Logits over the same tokens. # [N, V]
        beta: Place between the two divergences, 0 to 1.
        temperature: Logits are divided by it first.

    Returns:
        Divergence at each token, in nats. # [N]
    """
    q, p = (functional.log_softmax(logits.float() / temperature, dim=-1) for logits in (student, teacher))
    if beta == 0:
        return _divergence(p, q)
    if beta == 1:
        return _divergence(q, p)
    weight = torch.tensor(beta, dtype=p.dtype, device=p.device)
    mixture = torch.logaddexp(p + weight.log(), q + torch.log1p(-weight))
    return beta * _divergence(p, mixture) + (1 - beta) * _divergence(q, mixture)


def _divergence(first: Tensor, second: Tensor) -> Tensor:
    """Return KL(first || second) of log-probabilities. # [N, V] -> [N]."""
    return (first.exp() * (first - second)).sum(dim=-1)

"""Losses that TRL does not have, or has in another form: pure functions on tensors, each with its formula and its source."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def conservative_dpo(chosen: Tensor, rejected: Tensor, *, beta: float, label_smoothing: float) -> Tensor:
    """Return the conservative DPO loss of each pair (Mitchell, A note on DPO with noisy preferences, 2023, Eq. 3).

    With d = beta (chosen - rejected) and e = `label_smoothing`: ``-(1 - e) log sigmoid(d) - e log sigmoid(-d)``.

    Args:
        chosen: Log-ratio of policy to reference of each preferred answer, summed over its tokens. # [B]
        rejected: The same of the other answers. # [B]
        beta: Strength of the pull to the reference.
        label_smoothing: Share of labels taken for wrong.

    Returns:
        Loss of each pair. # [B]
    """
    difference = beta * (chosen - rejected)
    return -(1 - label_smoothing) * functional.logsigmoid(difference) - label_smoothing * functional.logsigmoid(-difference)


def identity_preference(chosen: Tensor, rejected: Tensor, *, beta: float) -> Tensor:
    """Return the IPO loss of each pair (Azar et al., arXiv:2310.12036, Eq. 17): ``(chosen - rejected - 1 / (2 beta))^2``.

    With log-ratios that are sums over tokens this is the paper's formula and OpenRLHF's (``--loss ipo_sum``); with means over tokens it
    is TRL's (``--loss ipo``), whose scale does not grow with the length of answers.

    Args:
        chosen: Log-ratio of policy to reference of each preferred answer. # [B]
        rejected: The same of the other answers. # [B]
        beta: The paper's tau.

    Returns:
        Loss of each pair. # [B]
    """
    return (chosen - rejected - 1 / (2 * beta)) ** 2


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
    return -functional.logsigmoid(log_odds), log_odds


def _log1mexp(value: Tensor) -> Tensor:
    """Return log(1 - exp(value)) for values below 0, exact near 0 and far from it; 0 counts as the nearest number below."""
    value = value.clamp(max=-torch.finfo(value.dtype).eps)
    near = value > -0.6931472
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

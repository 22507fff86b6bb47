"""Distillation on given data: the teacher's distribution at each trained token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentrl.algo.facts import objective
from agentrl.algo.row_losses import RowLosses, RowScores
from agentrl.core.settings import Fraction, Positive

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class DistillOptions:
    """Options of `distill`."""

    beta: Fraction = 0.5
    """Divergence: 0 is forward KL (teacher to student), 1 reverse KL, between them the generalized Jensen-Shannon divergence."""
    temperature: Positive = 1.0
    """Temperature of both distributions in the loss."""


@objective(unit="place", options=DistillOptions, reads="divergence", figures=("kl", "agreement"))
def distill(scores: RowScores, options: DistillOptions) -> RowLosses:
    """The divergence of the teacher's distribution at each trained token, which the output layer computes; see `generalized_jsd`."""
    return RowLosses(losses=scores.outputs, metrics=scores.figures)


def compared(student: Tensor, teacher: Tensor, options: DistillOptions) -> tuple[Tensor, Tensor]:
    """Return the divergences of logits # [n, V], and what is reported of them: forward divergence and agreement. # [n], [n, 2]."""
    import torch

    losses = generalized_jsd(student, teacher, beta=options.beta, temperature=options.temperature)
    with torch.no_grad():
        same = student.argmax(-1) == teacher.argmax(-1)
        return losses, torch.stack([generalized_jsd(student, teacher, beta=0.0), same.to(losses.dtype)], -1)


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
    import torch
    from torch.nn import functional

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

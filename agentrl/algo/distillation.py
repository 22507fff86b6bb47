"""Divergence of a policy from a teacher over the teacher's most likely tokens and one bucket for all others."""

from __future__ import annotations

import torch
from torch import Tensor

from agentrl.core.errors import ConfigError

DIRECTIONS = ("forward", "reverse")
TINY = 1e-6
"""Least probability of the bucket of all other tokens: what float32 leaves of 1 minus a sum near 1 is noise below this."""
LOWEST = -50.0
"""Least log-probability of a token: a policy that excludes a token has -inf, which has no gradient."""


def top_k_divergence(student: Tensor, teacher: Tensor, direction: str) -> Tensor:
    """KL divergence between two distributions over K tokens and the rest, which counts as one token.

    With S and T the probabilities under policy and teacher, over the K tokens j and the rest r, ``S_r = 1 - sum_j S_j``:
    ``forward`` is ``sum_j T_j log(T_j / S_j) + T_r log(T_r / S_r)``, ``reverse`` is ``sum_j S_j log(S_j / T_j) + S_r log(S_r / T_r)``.
    Both are at most the divergence of the whole distributions (the log-sum inequality), and equal to it where K is the vocabulary. Without
    the rest the reverse form could be lowered by moving mass out of the K tokens (Agarwal et al., arXiv:2306.13649, for the whole
    vocabulary).

    Args:
        student: Log-probabilities of the policy for the teacher's tokens, with gradient. # [A, K]
        teacher: Those of the teacher; -inf marks an entry that is not there. # [A, K]
        direction: ``forward`` or ``reverse``.

    Returns:
        One divergence per action token, in nats. # [A]

    Raises:
        ConfigError: If there is no such direction.
    """
    if direction not in DIRECTIONS:
        raise ConfigError("--teacher-loss", direction, "is no direction of a divergence", f"Choose one of {', '.join(DIRECTIONS)}.")
    present = torch.isfinite(teacher)
    # Entries that are not there become 0 before the difference: a mask behind it would not keep NaN out of the gradient.
    t = torch.where(present, teacher, 0.0)
    s = torch.where(present, student.clamp(min=LOWEST), 0.0)
    teacher_mass, student_mass = (torch.where(present, logs.exp(), 0.0) for logs in (t, s))
    teacher_rest, student_rest = ((1.0 - mass.sum(-1)).clamp(min=TINY) for mass in (teacher_mass, student_mass))
    if direction == "forward":
        return (teacher_mass * (t - s)).sum(-1) + teacher_rest * (teacher_rest.log() - student_rest.log())
    return (student_mass * (s - t)).sum(-1) + student_rest * (student_rest.log() - teacher_rest.log())

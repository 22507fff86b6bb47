"""Corrections for tokens that were not sampled by the weights they train: what they are given and return, and their diagnostics.

``rho = exp(clamp(old - behaviour, +-20))`` says how much likelier a token is under the learner's weights than it was when sampled. It
differs from 1 because the weights are newer (staleness) and because engine and learner compute slightly different numbers (mismatch); both
are corrected together and reported apart. Nothing here has a gradient. The corrections themselves are in `agentrl.algo.corrections`. torch
is imported when weights are computed, so that a configuration can be checked without it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from agentrl.algo.statistics import bounded_exp, fraction, record_extremes, record_means, record_percentile, segment_mean, segment_sum
from agentrl.core.errors import BatchError
from agentrl.core.metrics import MetricSums

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CorrectionInputs:
    """Action tokens of whole rows, without gradient; all of the batch for a correction that states ``whole_batch``.

    Attributes:
        old: Log-probabilities under the learner's weights when the batch was taken. # [A]
        behaviour: Log-probabilities recorded when sampling. # [A]
        sequence: Row of each token, from 0. # [A] int64
        same_version: True for tokens that exactly the learner's weights sampled. # [A] bool
        advantages: Of each token. # [A]

    Raises:
        BatchError: If the lengths disagree.
    """

    old: Tensor
    behaviour: Tensor
    sequence: Tensor
    same_version: Tensor
    advantages: Tensor

    def __post_init__(self) -> None:
        tensors = {"behaviour": self.behaviour, "sequence": self.sequence, "same_version": self.same_version, "advantages": self.advantages}
        for name, tensor in tensors.items():
            if tensor.shape != self.old.shape:
                raise BatchError(f"{name} has shape {tuple(tensor.shape)}, old {tuple(self.old.shape)}: one entry per action token")

    @property
    def log_rho(self) -> Tensor:
        """Log-probability under the learner's weights minus that under the weights that sampled. # [A]."""
        return self.old - self.behaviour

    def ratio(self) -> Tensor:
        """Return rho, the importance ratio of each token, its logarithm clamped to +-20. # [A]."""
        return bounded_exp(self.log_rho)

    def sequence_product(self) -> Tensor:
        """Give every token the product of the ratios of its row, its logarithm clamped to +-20. # [A]."""
        return bounded_exp(segment_sum(self.log_rho, self.sequence, self._rows()))[self.sequence]

    def sequence_geometric_mean(self) -> Tensor:
        """Give every token the geometric mean of the ratios of its row, its logarithm clamped to +-20. # [A]."""
        return bounded_exp(segment_mean(self.log_rho, self.sequence, self._rows()))[self.sequence]

    def sequence_mean(self, per_token: Tensor) -> Tensor:
        """Give every token the mean over its row. # [A] -> [A]."""
        return segment_mean(per_token, self.sequence, self._rows())[self.sequence]

    def _rows(self) -> int:
        return int(self.sequence.max()) + 1 if self.sequence.numel() else 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenWeights:
    """Weights of the action tokens in the loss, with what is reported about them.

    Attributes:
        weights: Factors of the token losses. # [A]
        keep: Tokens that are trained; the others get weight 0, and still count in the denominator. Unset: those whose weight is not 0.
            # [A] bool
        bounded: Tokens whose weight a bound changed, for ``off_policy/bounded``; unset: none. # [A] bool
    """

    weights: Tensor
    keep: Tensor | None = None
    bounded: Tensor | None = None


OffPolicyCorrection: TypeAlias = "Callable[[CorrectionInputs, Any], Tensor | TokenWeights]"
"""From the inputs and the correction's own options to weights."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Correction:
    """Factors of each token's policy loss.

    Attributes:
        weights: Importance weights, 0 where `keep` is false; no gradient. # [A]
        keep: Tokens that are trained; the others still count in the denominator. # [A] bool
        stats: See `diagnostics`.
    """

    weights: Tensor
    keep: Tensor
    stats: MetricSums


def interpolate_old(new: Tensor, behaviour: Tensor, versions: Tensor, *, proximal: float, current: float) -> Tensor:
    """Estimate the log-probabilities of the proximal policy without a forward pass of their own (AReaL's log-linear approximation).

    Between the version that sampled a token and the present one its log-probability is taken to change at a constant rate:
    ``old = behaviour + alpha (new - behaviour)`` with ``alpha = (proximal - version) / (current - version)``, bounded to [0, 1].

    Args:
        new: Log-probabilities of the present policy, without gradient. # [A]
        behaviour: Log-probabilities recorded when sampling. # [A]
        versions: Policy version that sampled each token. # [A] int64
        proximal: Version of the weights that the batch was taken with.
        current: Version of the present weights, a fraction between two steps.

    Returns:
        One estimate per token; `behaviour` where a token is as new as the present policy. # [A]
    """
    age = (current - versions).to(new.dtype)
    share = ((proximal - versions).to(new.dtype) / age).where(age > 0, 0.0).clamp(0.0, 1.0)
    return behaviour + share * (new - behaviour)


def diagnostics(inputs: CorrectionInputs, weights: Tensor, keep: Tensor, bounded: Tensor) -> MetricSums:
    """Return the metrics of a correction, exact under merging over micro-batches and ranks.

    ``rho/mean``, ``rho/max``, ``rho/p99`` (to half a per cent); ``ess/rho`` of the raw ratios and ``ess/weights`` of what is applied, as
    shares of the tokens; ``mismatch/mean``, ``mismatch/max`` (absolute difference in log-probability) and ``mismatch/kl`` (k3 of rho)
    over tokens of the same version; ``staleness/kl`` (the same over older ones) and ``staleness/fraction``; ``off_policy/masked`` and
    ``off_policy/bounded`` (kept, at a weight that a bound changed), each also with ``_positive`` and ``_negative`` for the tokens whose
    advantage has that sign.

    Args:
        inputs: The action tokens.
        weights: Weights as they are applied. # [A]
        keep: Tokens that are trained. # [A] bool
        bounded: Tokens whose weight a bound changed. # [A] bool
    """
    stats = MetricSums()
    _record_ratios(stats, inputs.log_rho, weights, inputs.same_version)
    _record_fractions(stats, keep, bounded & keep, inputs.advantages)
    return stats


def _record_ratios(stats: MetricSums, log_rho: Tensor, weights: Tensor, same_version: Tensor) -> None:
    import torch

    # With expm1 below, because exp(d) - 1 in float32 loses every digit where engine and learner nearly agree.
    bounded_log = log_rho.clamp(-20.0, 20.0)
    rho, divergence, gap = bounded_log.exp(), bounded_log.expm1() - bounded_log, log_rho.abs()
    older, every = ~same_version, torch.ones_like(same_version)
    record_means(
        stats,
        {
            "rho/mean": (rho.sum(), every.sum()),
            "mismatch/mean": (gap[same_version].sum(), same_version.sum()),
            "mismatch/kl": (divergence[same_version].sum(), same_version.sum()),
            "staleness/kl": (divergence[older].sum(), older.sum()),
            "staleness/fraction": fraction(older, every),
        },
    )
    record_extremes(stats, highs={"rho/max": rho, "mismatch/max": gap[same_version]})
    record_percentile(stats, "rho/p99", bounded_log)
    for name, used in {"ess/rho": rho.double(), "ess/weights": weights.double()}.items():
        total, squares = torch.stack([used.sum(), used.square().sum()]).tolist()
        stats.effective(name, total, squares, float(len(used)))


def _record_fractions(stats: MetricSums, keep: Tensor, bounded: Tensor, advantages: Tensor) -> None:
    import torch

    signs = {"": torch.ones_like(keep), "_positive": advantages > 0, "_negative": advantages < 0}
    for name, within in signs.items():
        record_means(stats, {f"off_policy/masked{name}": fraction(~keep, within), f"off_policy/bounded{name}": fraction(bounded, within)})

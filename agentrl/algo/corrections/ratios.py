"""Weights from importance ratios: the ratio of a token or of a sequence, the consequence of one that leaves its range, and masks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from agentrl.algo.off_policy import CorrectionInputs, TokenWeights
from agentrl.core.errors import ConfigError
from agentrl.core.settings import NonNegative, Positive

if TYPE_CHECKING:
    from torch import Tensor
from typing import TYPE_CHECKING

from agentrl.algo.statistics import segment_count, segment_sum

if TYPE_CHECKING:
    from torch import Tensor

    from agentrl.algo.off_policy import CorrectionInputs


def opsm_keep(inputs: CorrectionInputs, delta: float) -> Tensor:
    """Off-policy sequence masking: which tokens stay (DeepSeek-V3.2, arXiv:2512.02556, section 3.1).

    Drops a sequence with a negative advantage whose mean ``behaviour - old`` exceeds `delta`: a failure that the
    present policy would hardly produce teaches it nothing and only adds noise.

    Args:
        inputs: The action tokens.
        delta: Bound of the drift, in nats per token.

    Returns:
        False for the negative tokens of such sequences. # [A] bool
    """
    # Against the policy that sampled: against the learner's own it would be 0 with one update per batch.
    drift = inputs.sequence_mean(inputs.behaviour - inputs.old)
    return ~((inputs.advantages < 0) & (drift > delta))


def m2po_keep(inputs: CorrectionInputs, tau: float) -> Tensor:
    """Return the tokens that are left when the largest ``|log rho|`` are dropped until the mean square is at most `tau`. # [A] bool."""
    # In float64: PyTorch would round the bound, a single number, to float32 to compare it with float32 numbers.
    return inputs.log_rho.abs().double() <= second_moment_threshold(inputs.log_rho, tau)


def second_moment_threshold(log_rho: Tensor, tau: float) -> Tensor:
    """Return the largest bound b for which tokens with ``|log rho| <= b`` have a mean squared log ratio of at most `tau`. # [A] -> [].

    M2PO (arXiv:2510.01161), for the log ratios of the whole batch. Found on a grid that is refined three times around the answer, to within
    1.2e-6; infinite if nothing needs to be masked.
    """
    import torch

    cells, size = 256, log_rho.abs().clamp(max=20.0).double()
    low, high = size.new_tensor(0.0), size.new_tensor(20.0)
    for _ in range(3):
        edges = low + (high - low) * torch.linspace(0.0, 1.0, cells + 1, dtype=size.dtype, device=size.device)
        cell = torch.bucketize(size, edges)
        counts, squares = segment_count(cell, cells + 2).double(), segment_sum(size.square(), cell, cells + 2)
        within = squares.cumsum(0) <= tau * counts.cumsum(0)
        if bool(within[:-1].all()):
            return torch.where(high == 20.0, size.new_tensor(float("inf")), high)
        first = int((~within[:-1]).nonzero()[0])
        low, high = edges[first - 1], edges[first]
    return low


Level = Literal["token", "seq", "geo"]
Mode = Literal["none", "truncate", "clip", "mask"]

GEO_TOKEN_CAP = 2.0
"""Bound of the weights of tokens whose sequence is kept by its geometric mean; a band about an average is too narrow for a token."""


@dataclass(frozen=True, kw_only=True)
class RatioOptions:
    """Options of a correction by importance ratios; the defaults are those of ``tis``.

    Raises:
        ConfigError: If the level or the mode is unknown, or the range is not two bounds in order.
    """

    off_policy_level: Level = "token"
    """Unit of an importance ratio: a token, or a sequence by product or geometric mean."""
    off_policy_mode: Mode = "truncate"
    """Treatment of ratios outside ``--off-policy-range``."""
    off_policy_range: tuple[float, float] = (0.0, 2.0)
    """Bounds of the importance ratio."""
    opsm_delta: NonNegative | None = None
    """Drop a sequence with a negative advantage whose log-probability fell by more than this on average."""
    m2po_tau: Positive | None = None
    """Drop the most extreme tokens until the mean squared log ratio is below this."""

    def __post_init__(self) -> None:
        if self.off_policy_level not in get_args(Level):
            raise ConfigError("--off-policy-level", self.off_policy_level, "is not a level", "Choose one of token, seq, geo")
        if self.off_policy_mode not in get_args(Mode):
            raise ConfigError("--off-policy-mode", self.off_policy_mode, "is not a mode", "Choose one of none, truncate, clip, mask")
        low, high = self.off_policy_range
        if not 0.0 <= low < high:
            raise ConfigError("--off-policy-range", (low, high), "must be two bounds with 0 <= low < high", "Use 0 2 for truncation")


def weigh(inputs: CorrectionInputs, options: RatioOptions) -> TokenWeights:
    """Return the weights of the tokens by level, mode and range, without the tokens that OPSM and M2PO drop if they are asked for.

    ``truncate`` bounds the ratio above, ``clip`` on both sides; ``mask`` removes tokens or sequences outside the range, and truncates the
    weights of the tokens of a sequence that stays: at the upper bound for ``seq``, at 2 for ``geo``; ``none`` gives every token weight 1.
    """
    weights, keep, bounded = _by_ratio(inputs, options)
    if options.opsm_delta is not None:
        keep = keep & opsm_keep(inputs, options.opsm_delta)
    if options.m2po_tau is not None:
        keep = keep & m2po_keep(inputs, options.m2po_tau)
    return TokenWeights(weights=weights, keep=keep, bounded=bounded)


def _by_ratio(inputs: CorrectionInputs, options: RatioOptions) -> tuple[Tensor, Tensor, Tensor]:
    """Weights before masking, what level and mode keep, and whose weight a bound changed. # [A], [A], [A]."""
    import torch

    rho, (low, high) = inputs.ratio(), options.off_policy_range
    everything = torch.ones_like(rho, dtype=torch.bool)
    if options.off_policy_mode == "none":
        return torch.ones_like(rho), everything, ~everything
    unit = {"token": inputs.ratio, "seq": inputs.sequence_product, "geo": inputs.sequence_geometric_mean}[options.off_policy_level]()
    above, below = unit > high, unit < low
    if options.off_policy_mode == "truncate":
        # Above only, because raising small weights adds bias and no stability.
        return unit.clamp(max=high), everything, above
    if options.off_policy_mode == "clip":
        return unit.clamp(low, high), everything, above | below
    if options.off_policy_level == "token":
        return rho, ~(above | below), ~everything
    # A sequence that stays may still have a token with an extreme ratio.
    cap = high if options.off_policy_level == "seq" else GEO_TOKEN_CAP
    return rho.clamp(max=cap), ~(above | below), rho > cap

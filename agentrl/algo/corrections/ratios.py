"""Weights from importance ratios: the ratio of a token or of a sequence, and the consequence of one that leaves its range."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from agentrl.algo.corrections.masks import m2po_keep, opsm_keep
from agentrl.algo.off_policy import CorrectionInputs, TokenWeights
from agentrl.core.errors import ConfigError
from agentrl.core.settings import NonNegative, Positive

if TYPE_CHECKING:
    from torch import Tensor

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

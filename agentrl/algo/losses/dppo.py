"""The policy gradient without the tokens whose probability has moved too far in the direction of the advantage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentrl.algo.facts import policy_loss
from agentrl.algo.token_losses import LossInputs, LossOptions, TokenLosses
from agentrl.core.settings import Positive

if TYPE_CHECKING:
    from torch import Tensor


RATIO_CAP = 20.0
"""Largest weight that `dppo_tv` and `dppo_kl` give a token; the paper advises a large one."""


@dataclass(frozen=True, kw_only=True)
class DppoTvOptions(LossOptions):
    """Options of `dppo_tv`."""

    eps_clip_low: Positive = 0.15
    """Amount by which the probability of a token with a negative advantage may fall."""
    eps_clip_high: Positive = 0.15
    """Amount by which the probability of a token with a positive advantage may rise."""


@dataclass(frozen=True, kw_only=True)
class DppoKlOptions(LossOptions):
    """Options of `dppo_kl`."""

    eps_clip_low: Positive = 0.05
    """KL divergence at which a token with a negative advantage, whose probability has fallen, is left out."""
    eps_clip_high: Positive = 0.05
    """KL divergence at which a token with a positive advantage, whose probability has risen, is left out."""


@policy_loss(options=DppoTvOptions)
def dppo_tv(inputs: LossInputs, options: DppoTvOptions) -> TokenLosses:
    """``-stop_gradient(min(r, 20)) A new``, and 0 for a token with ``p - q > high`` and A > 0, or ``p - q < -low`` and A <= 0.

    DPPO with the binary approximation of the total variation (arXiv:2602.04879).
    """
    moved = inputs.new.detach().exp() - inputs.old.exp()
    outside = (moved > options.eps_clip_high).where(inputs.advantages > 0, moved < -options.eps_clip_low)
    return _outside_dropped(inputs, outside)


@policy_loss(options=DppoKlOptions)
def dppo_kl(inputs: LossInputs, options: DppoKlOptions) -> TokenLosses:
    """As `dppo_tv`, with the KL divergence of "this token or another" as the distance, in whichever direction p moved.

    ``q log(q / p) + (1 - q) log((1 - q) / (1 - p))``, the binary approximation of the KL divergence (arXiv:2602.04879).
    """
    # A probability may be 1 in float32; the rest keeps the logarithm finite there.
    new, rest = inputs.new.detach(), 1e-8
    p, q = new.exp(), inputs.old.exp()
    divergence = q * (inputs.old - new) + (1.0 - q) * ((1.0 - q + rest) / (1.0 - p + rest)).log()
    above, below = (divergence > options.eps_clip_high) & (p > q), (divergence > options.eps_clip_low) & (p < q)
    return _outside_dropped(inputs, above.where(inputs.advantages > 0, below))


def _outside_dropped(inputs: LossInputs, outside: Tensor) -> TokenLosses:
    """The policy gradient weighed by the capped ratio, without the tokens that left the trust region."""
    weight = inputs.ratio().detach().clamp(max=RATIO_CAP)
    per_token = (-weight * inputs.advantages * inputs.new).where(~outside, 0.0)
    return TokenLosses(per_token=per_token, clipped=outside)

"""The loss of prime-rl: probabilities may move by a bounded amount, in either direction."""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.algo.facts import policy_loss
from agentrl.algo.token_losses import LossInputs, LossOptions, TokenLosses
from agentrl.core.settings import NonNegative, Positive


@dataclass(frozen=True, kw_only=True)
class IpoOptions(LossOptions):
    """Options of `ipo`."""

    eps_clip_low: Positive = 0.3
    """Amount by which the probability of a token may fall before it is left out."""
    eps_clip_high: Positive = 0.3
    """Amount by which the probability of a token may rise before it is left out."""
    ipo_kl_coef: NonNegative = 0.0
    """Weight of the squared log ratio in ``ipo``; prime-rl used 1e-3 in earlier versions."""


@policy_loss(options=IpoOptions)
def ipo(inputs: LossInputs, options: IpoOptions) -> TokenLosses:
    """``-r A`` where ``-low <= p - q <= high``, whatever the sign of A, plus ``ipo_kl_coef (new - old)^2`` for every token.

    The default of prime-rl, INTELLECT Policy Optimization; its squared term is that of Kimi K2.5 (arXiv:2602.02276).
    """
    moved = inputs.new.detach().exp() - inputs.old.exp()
    # Whatever the sign of the advantage: a disagreement in an asynchronous run says that the token's ratio cannot be trusted.
    outside = (moved > options.eps_clip_high) | (moved < -options.eps_clip_low)
    per_token = (-inputs.ratio() * inputs.advantages).where(~outside, 0.0)
    if options.ipo_kl_coef:
        per_token = per_token + options.ipo_kl_coef * (inputs.new - inputs.old).square()
    return TokenLosses(per_token=per_token, clipped=outside)

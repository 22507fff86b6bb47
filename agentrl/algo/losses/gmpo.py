"""PPO's loss on the geometric mean of a sequence's ratios."""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.algo.facts import policy_loss
from agentrl.algo.statistics import bounded_exp
from agentrl.algo.token_losses import LossInputs, LossOptions, TokenLosses
from agentrl.core.settings import Positive


@dataclass(frozen=True, kw_only=True)
class GmpoOptions(LossOptions):
    """Options of `gmpo`."""

    eps_clip_low: Positive = 0.4
    """The log ratio of a token with a negative advantage is clipped below at minus this."""
    eps_clip_high: Positive = 0.4
    """The log ratio of a token with a positive advantage is clipped above at this."""


@policy_loss(options=GmpoOptions)
def gmpo(inputs: LossInputs, options: GmpoOptions) -> TokenLosses:
    """``-A`` times the geometric mean over the sequence of r, each clipped on PPO's side to ``exp(-low)`` and ``exp(high)``.

    GMPO (arXiv:2507.20673), in its token form, as `gspo`. Meant for the aggregation ``seq-mean-token-mean``.
    """
    log_ratio = inputs.new - inputs.old
    clipped = log_ratio.clamp(max=options.eps_clip_high).where(inputs.advantages > 0, log_ratio.clamp(min=-options.eps_clip_low))
    ratio = bounded_exp(inputs.sequence_mean(clipped.detach()) + clipped - clipped.detach())
    return TokenLosses(per_token=-ratio * inputs.advantages, ratio=ratio, clipped=clipped.detach() != log_ratio.detach())

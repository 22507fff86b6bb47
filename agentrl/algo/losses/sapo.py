"""A loss whose gradient fades smoothly as the ratio leaves 1."""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.algo.facts import policy_loss
from agentrl.algo.token_losses import LossInputs, TokenLosses
from agentrl.core.settings import Positive


@dataclass(frozen=True, kw_only=True)
class SapoOptions:
    """Options of `sapo`."""

    sapo_tau_positive: Positive = 1.0
    """Speed at which the gradient of ``sapo`` fades as the ratio leaves 1, for a positive advantage."""
    # Larger, because the gradients of failures are noisier.
    sapo_tau_negative: Positive = 1.05
    """The same for a negative advantage."""


@policy_loss(options=SapoOptions)
def sapo(inputs: LossInputs, options: SapoOptions) -> TokenLosses:
    """``-4 / tau sigmoid(tau (r - 1)) A`` with a tau by the sign of A: a gradient that fades with the distance (arXiv:2511.20347)."""
    ratio, advantages = inputs.ratio(), inputs.advantages
    tau = ratio.new_tensor(options.sapo_tau_positive).where(advantages > 0, ratio.new_tensor(options.sapo_tau_negative))
    return TokenLosses(per_token=-4.0 / tau * (tau * (ratio - 1.0)).sigmoid() * advantages)

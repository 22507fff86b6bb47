"""The policy gradient with a bounded weight for every token."""

from __future__ import annotations

from agentrl.algo.facts import policy_loss
from agentrl.algo.token_losses import LossInputs, LossOptions, TokenLosses


@policy_loss
def cispo(inputs: LossInputs, options: LossOptions) -> TokenLosses:
    """``-stop_gradient(clip(r, 1 - low, 1 + high)) A new``: every token keeps a gradient (CISPO, arXiv:2506.13585)."""
    ratio = inputs.ratio().detach()
    weight = ratio.clamp(1.0 - options.eps_clip_low, 1.0 + options.eps_clip_high)
    return TokenLosses(per_token=-weight * inputs.advantages * inputs.new, clipped=weight != ratio)

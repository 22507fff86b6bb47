"""PPO's loss with one ratio per sequence."""

from __future__ import annotations

from agentrl.algo.facts import policy_loss
from agentrl.algo.losses.ppo import clipped_objective
from agentrl.algo.statistics import bounded_exp
from agentrl.algo.token_losses import LossInputs, LossOptions, TokenLosses


@policy_loss
def gspo(inputs: LossInputs, options: LossOptions) -> TokenLosses:
    """PPO's clipped objective on one ratio per sequence, ``exp(mean over the sequence of (new - old))``.

    GSPO (arXiv:2507.18071), in its token form: the value of the ratio is the sequence's, its gradient the token's own.
    The gradient is that of GSPO wherever a sequence's tokens share one advantage. Meant for the aggregation
    ``seq-mean-token-mean`` and for clip ranges around 3e-4.
    """
    mean = inputs.sequence_mean((inputs.new - inputs.old).detach())
    ratio = bounded_exp(mean + inputs.new - inputs.new.detach())
    per_token, clipped = clipped_objective(ratio, inputs.advantages, options)
    return TokenLosses(per_token=per_token, ratio=ratio, clipped=clipped)

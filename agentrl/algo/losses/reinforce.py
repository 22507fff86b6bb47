"""The policy gradient as it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentrl.algo.facts import policy_loss
from agentrl.algo.options import NoOptions
from agentrl.algo.token_losses import LossInputs

if TYPE_CHECKING:
    from torch import Tensor


@policy_loss(options=NoOptions, single_update=True)
def reinforce(inputs: LossInputs, options: NoOptions) -> Tensor:
    """``-A new``, without a ratio: for exactly on-policy batches (Williams, 1992)."""
    del options
    return -inputs.advantages * inputs.new

"""PPO's loss, and the clipped objective that others share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from annotated_types import Gt

from agentrl.algo.facts import policy_loss
from agentrl.algo.token_losses import LossInputs, LossOptions, TokenLosses
from agentrl.core.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class PpoOptions(LossOptions):
    """Options of `ppo`.

    Raises:
        ConfigError: If the dual clip is not larger than 1.
    """

    dual_clip: Annotated[float, Gt(1)] | None = None
    """For a negative advantage A, the objective of ``ppo`` is at least this times A; typically 3."""

    def __post_init__(self) -> None:
        if self.dual_clip is not None and self.dual_clip <= 1.0:
            raise ConfigError("--dual-clip", self.dual_clip, "must be larger than 1", "Use 3, or leave it out")


@policy_loss(options=PpoOptions)
def ppo(inputs: LossInputs, options: PpoOptions) -> TokenLosses:
    """``-min(r A, clip(r, 1 - low, 1 + high) A)``, for A < 0 and dual clip c ``-max(that min, c A)``.

    PPO (arXiv:1707.06347), clip-higher (DAPO, arXiv:2503.14476), dual clip (arXiv:1912.09729).
    """
    ratio, advantages = inputs.ratio(), inputs.advantages
    per_token, clipped = clipped_objective(ratio, advantages, options)
    if options.dual_clip is None:
        return TokenLosses(per_token=per_token, clipped=clipped)
    negative, floor = advantages < 0, -options.dual_clip * advantages
    metrics = {"dual_clip_fraction": (per_token > floor)[negative]}
    return TokenLosses(per_token=per_token.minimum(floor).where(negative, per_token), clipped=clipped, metrics=metrics)


def clipped_objective(ratio: Tensor, advantages: Tensor, options: LossOptions) -> tuple[Tensor, Tensor]:
    """Return PPO's clipped objective, to be minimised, and the tokens whose gradient it removes. # [A], [A] bool."""
    low, high = 1.0 - options.eps_clip_low, 1.0 + options.eps_clip_high
    clipped = ((ratio > high) & (advantages > 0)) | ((ratio < low) & (advantages < 0))
    return (-ratio * advantages).maximum(-ratio.clamp(low, high) * advantages), clipped

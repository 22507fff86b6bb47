"""Only tokens on whose probability engine and learner nearly agree."""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.algo.corrections.ratios import Mode, RatioOptions, weigh
from agentrl.algo.facts import off_policy_correction
from agentrl.algo.off_policy import CorrectionInputs, TokenWeights


@dataclass(frozen=True, kw_only=True)
class IcePopOptions(RatioOptions):
    """Options of `icepop`."""

    off_policy_mode: Mode = "mask"
    off_policy_range: tuple[float, float] = (0.5, 5.0)


@off_policy_correction(options=IcePopOptions)
def icepop(inputs: CorrectionInputs, options: IcePopOptions) -> TokenWeights:
    """``rho``, and 0 outside the range: IcePop (Ring-1T, arXiv:2510.18855)."""
    return weigh(inputs, options)

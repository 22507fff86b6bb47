"""No correction."""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.algo.corrections.ratios import Mode, RatioOptions, weigh
from agentrl.algo.facts import off_policy_correction
from agentrl.algo.off_policy import CorrectionInputs, TokenWeights


@dataclass(frozen=True, kw_only=True)
class UncorrectedOptions(RatioOptions):
    """Options of `none`."""

    off_policy_mode: Mode = "none"


@off_policy_correction(options=UncorrectedOptions)
def none(inputs: CorrectionInputs, options: UncorrectedOptions) -> TokenWeights:
    """1 for every token."""
    return weigh(inputs, options)

"""Importance weights with a bound so far up that they are nearly unbiased."""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.algo.corrections.ratios import RatioOptions, weigh
from agentrl.algo.facts import off_policy_correction
from agentrl.algo.off_policy import CorrectionInputs, TokenWeights


@dataclass(frozen=True, kw_only=True)
class DecoupledOptions(RatioOptions):
    """Options of `decoupled`."""

    off_policy_range: tuple[float, float] = (0.0, 10.0)


@off_policy_correction(options=DecoupledOptions)
def decoupled(inputs: CorrectionInputs, options: DecoupledOptions) -> TokenWeights:
    """``min(rho, 10)``: the importance weight of decoupled PPO (arXiv:2505.24298), truncated."""
    return weigh(inputs, options)

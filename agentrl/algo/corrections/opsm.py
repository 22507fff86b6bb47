"""Truncated weights, without failures that the policy has moved away from."""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.algo.corrections.ratios import RatioOptions, weigh
from agentrl.algo.facts import off_policy_correction
from agentrl.algo.off_policy import CorrectionInputs, TokenWeights
from agentrl.core.settings import NonNegative


@dataclass(frozen=True, kw_only=True)
class OpsmOptions(RatioOptions):
    """Options of `opsm`."""

    opsm_delta: NonNegative | None = 0.05


@off_policy_correction(options=OpsmOptions)
def opsm(inputs: CorrectionInputs, options: OpsmOptions) -> TokenWeights:
    """``min(rho, 2)``, and 0 for the tokens with A < 0 of a sequence with ``mean(behaviour - old) > opsm_delta``; see `opsm_keep`.

    Off-policy sequence masking (DeepSeek-V3.2, arXiv:2512.02556).
    """
    return weigh(inputs, options)

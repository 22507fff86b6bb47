"""Importance weights without a bound, and without the most extreme tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass

from agentrl.algo.corrections.ratios import RatioOptions, weigh
from agentrl.algo.facts import off_policy_correction
from agentrl.algo.off_policy import CorrectionInputs, TokenWeights
from agentrl.core.settings import Positive


@dataclass(frozen=True, kw_only=True)
class M2poOptions(RatioOptions):
    """Options of `m2po`."""

    off_policy_range: tuple[float, float] = (0.0, math.inf)
    m2po_tau: Positive | None = 0.04


@off_policy_correction(options=M2poOptions)
def m2po(inputs: CorrectionInputs, options: M2poOptions) -> TokenWeights:
    """``rho``, and 0 for the tokens with the largest ``|log rho|``, until the mean of its square is at most ``m2po_tau``; see `m2po_keep`.

    M2PO (arXiv:2510.01161).
    """
    return weigh(inputs, options)

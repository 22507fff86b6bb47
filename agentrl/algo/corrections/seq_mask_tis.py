"""Only sequences that have hardly drifted."""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.algo.corrections.ratios import Level, Mode, RatioOptions, weigh
from agentrl.algo.facts import off_policy_correction
from agentrl.algo.off_policy import CorrectionInputs, TokenWeights


@dataclass(frozen=True, kw_only=True)
class SeqMaskTisOptions(RatioOptions):
    """Options of `seq_mask_tis`."""

    off_policy_level: Level = "geo"
    off_policy_mode: Mode = "mask"
    off_policy_range: tuple[float, float] = (0.99, 1.01)


@off_policy_correction(options=SeqMaskTisOptions)
def seq_mask_tis(inputs: CorrectionInputs, options: SeqMaskTisOptions) -> TokenWeights:
    """``min(rho, 2)`` for the tokens of a sequence whose geometric mean of rho lies in the range, and 0 for those of the others."""
    return weigh(inputs, options)

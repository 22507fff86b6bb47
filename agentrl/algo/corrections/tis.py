"""Truncated importance weights, by token or by sequence."""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.algo.corrections.ratios import Level, RatioOptions, weigh
from agentrl.algo.facts import off_policy_correction
from agentrl.algo.off_policy import CorrectionInputs, TokenWeights


@off_policy_correction(options=RatioOptions)
def tis(inputs: CorrectionInputs, options: RatioOptions) -> TokenWeights:
    """``min(rho, 2)``: truncated importance sampling (IMPALA, arXiv:1802.01561)."""
    return weigh(inputs, options)


@dataclass(frozen=True, kw_only=True)
class SeqTisOptions(RatioOptions):
    """Options of `seq_tis`."""

    off_policy_level: Level = "seq"


@off_policy_correction(options=SeqTisOptions)
def seq_tis(inputs: CorrectionInputs, options: SeqTisOptions) -> TokenWeights:
    """``min(product over the sequence of rho, 2)`` for all tokens of a sequence."""
    return weigh(inputs, options)

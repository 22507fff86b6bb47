"""Off-policy corrections: weights for tokens that older weights sampled.

Each correction is a file: its options, its function with its facts above it, its formula and source; an example to copy for one's own.
Throughout, ``rho = exp(clamp(old - behaviour, +-20))``. The built-in ones are presets of `ratios.weigh`, whose options change any part of
them. Diagnostics are the same for all. torch is imported when weights are computed, so that a configuration can be checked without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentrl.algo import facts
from agentrl.algo.corrections.ratios import RatioOptions
from agentrl.algo.facts import CorrectionFacts
from agentrl.algo.off_policy import OffPolicyCorrection

CORRECTIONS: Mapping[str, OffPolicyCorrection] = facts.found_in(__name__, __path__, "tis", hyphens=True)
"""The built-in corrections by name."""


def find_correction(name: str) -> OffPolicyCorrection:
    """Return the correction that ``--off-policy`` names; a name or a file that cannot be used is a `ConfigError`."""
    return facts.find(facts.CORRECTION, name, CORRECTIONS)


def correction_facts(name: str) -> CorrectionFacts:
    """Return the facts of the correction that ``--off-policy`` names; see `find_correction`."""
    found: CorrectionFacts = facts.facts_of(find_correction(name))
    return found


def needs_whole_batch(correction: OffPolicyCorrection, options: Any) -> bool:
    """Return True if a correction with these options compares tokens of different rows, as M2PO does."""
    stated: CorrectionFacts = facts.facts_of(correction)
    return stated.whole_batch or (isinstance(options, RatioOptions) and options.m2po_tau is not None)

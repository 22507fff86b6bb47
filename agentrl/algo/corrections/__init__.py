"""Off-policy corrections: weights for tokens that older weights sampled.

Each correction is a file: its options, its function with its facts above it, its formula and source; an example to copy for one's own.
Throughout, ``rho = exp(clamp(old - behaviour, +-20))``. The built-in ones are presets of `ratios.weigh`, whose options change any part of
them. Diagnostics are the same for all. torch is imported when weights are computed, so that a configuration can be checked without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from agentrl.algo import facts
from agentrl.algo.corrections import decoupled, icepop, m2po, none, opsm, seq_mask_tis, tis
from agentrl.algo.corrections.ratios import RatioOptions
from agentrl.algo.facts import CorrectionFacts
from agentrl.algo.off_policy import Correction, CorrectionInputs, OffPolicyCorrection, TokenWeights, diagnostics

CORRECTIONS: Mapping[str, OffPolicyCorrection] = MappingProxyType(
    {
        "tis": tis.tis,
        "seq-tis": tis.seq_tis,
        "icepop": icepop.icepop,
        "seq-mask-tis": seq_mask_tis.seq_mask_tis,
        "decoupled": decoupled.decoupled,
        "opsm": opsm.opsm,
        "m2po": m2po.m2po,
        "none": none.none,
    }
)
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


def compute_correction(correction: str | OffPolicyCorrection, inputs: CorrectionInputs, options: Any) -> Correction:
    """Run a correction, given itself or by name, on whole rows.

    Args:
        correction: The correction.
        inputs: The action tokens; of the whole batch if `needs_whole_batch` says so.
        options: Of the class among the facts of the correction.

    Raises:
        ConfigError: If the name is unknown.
        PluginError: If a user's correction raised an exception, or returned something unusable.
    """
    import torch

    function = find_correction(correction) if isinstance(correction, str) else correction
    with torch.no_grad():
        with facts.calls(facts.CORRECTION, function):
            returned = function(inputs, options)
        result = returned if isinstance(returned, TokenWeights) else TokenWeights(weights=returned)
        _check_tokens(function, result, inputs)
        keep = result.weights != 0 if result.keep is None else result.keep
        weights = torch.where(keep, result.weights.to(inputs.old.dtype), 0.0)
        bounded = torch.zeros_like(keep) if result.bounded is None else result.bounded
        return Correction(weights=weights, keep=keep, stats=diagnostics(inputs, weights, keep, bounded))


def _check_tokens(function: OffPolicyCorrection, result: TokenWeights, inputs: CorrectionInputs) -> None:
    """Check that there is one finite weight per action token, and one truth value in each mask."""
    import torch

    shape = inputs.old.shape
    remedy = f"Return a tensor of {len(inputs.old)} finite numbers, one per action token."
    for name, value in (("weights", result.weights), ("keep", result.keep), ("bounded", result.bounded)):
        if value is None and name != "weights":
            continue
        if not isinstance(value, torch.Tensor) or value.shape != shape:
            what = f"of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"of type {type(value).__name__}"
            raise facts.unusable(facts.CORRECTION, function, f"returned {name} {what}", remedy)
        if name != "weights" and value.dtype != torch.bool:
            raise facts.unusable(facts.CORRECTION, function, f"returned {name} of {value.dtype}", "Return a tensor of truth values.")
    # Log-probabilities that are no numbers come from the model: the update is skipped, and the correction is not to blame.
    if not bool(result.weights.isfinite().all()) and bool(inputs.log_rho.isfinite().all()):
        raise facts.unusable(facts.CORRECTION, function, "returned weights that are not all finite", remedy)

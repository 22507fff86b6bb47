"""Several components of the reward, each compared within the group."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentrl.algo.advantages import AdvantageInputs, AdvantageOptions
from agentrl.algo.facts import advantage_estimator
from agentrl.algo.flat import all_same
from agentrl.algo.statistics import SAME
from agentrl.core.errors import BatchError, ConfigError
from agentrl.core.summaries import GroupSummary

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class GdpoOptions(AdvantageOptions):
    """Options of `gdpo`.

    Raises:
        ConfigError: If a weight is not of the form ``name=number``, or a name stands twice.
    """

    gdpo_weights: tuple[str, ...] = ()
    """Components of the reward that ``gdpo`` adds up, with their weights: ``correct=1 format=0.5``. Default: all, with weight 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.weights()

    def weights(self) -> Mapping[str, float]:
        """Return the weights by name."""
        weights: dict[str, float] = {}
        for text in self.gdpo_weights:
            name, _, number = text.rpartition("=")
            try:
                weight = float(number)
            except ValueError:
                weight = math.nan
            if not name or name in weights or not math.isfinite(weight):
                problem = "is not a name of its own with a number"
                raise ConfigError("--gdpo-weights", text, problem, "Write for example correct=1 format=0.5.")
            weights[name] = weight
        return weights


def _components_cancel(group: GroupSummary, options: GdpoOptions) -> bool:
    """Return True if the weighted sum of the normalised components is 0 for each episode, most often because each is the same in all."""
    names, (low, high) = {name for member in group.trainable for name in member.reward_parts}, options.bounds
    sums, largest = [0.0] * len(group.trainable), 0.0
    for name, weight in (options.weights() or dict.fromkeys(sorted(names), 1.0)).items():
        values = [min(max(member.reward_parts.get(name, 0.0), low), high) for member in group.trainable]
        if not all_same(values):
            mean, unit = statistics.fmean(values), statistics.stdev(values) + 1e-9 if options.advantage_std_norm else 1.0
            shares = [weight * (value - mean) / unit for value in values]
            sums, largest = [one + two for one, two in zip(sums, shares, strict=True)], max(largest, *map(abs, shares))
    return max(map(abs, sums)) <= SAME * largest


@advantage_estimator(options=GdpoOptions, compares_group=True, flat=_components_cancel, whitens=True, charges_kl=True)
def gdpo(inputs: AdvantageInputs, options: GdpoOptions) -> Tensor:
    """Components of the reward, each normalised within the group as in `group_norm`, weighted and added, whitened: GDPO (arXiv:2601.05242).

    Raises:
        BatchError: If the environment names no components, or not one that has a weight.
    """
    import torch

    weights = options.weights() or dict.fromkeys(inputs.parts, 1.0)
    if len(inputs.rewards) and (not weights or not weights.keys() <= inputs.parts.keys()):
        wanted = ", ".join(weights.keys() - inputs.parts.keys()) or "any"
        known = ", ".join(inputs.parts) or "none"
        raise BatchError(f"--advantage-estimator gdpo needs reward_parts: {wanted} missing, found {known}; return them with the reward")
    total, (low, high) = torch.zeros_like(inputs.rewards, dtype=torch.float64), options.bounds
    for name, weight in weights.items():
        if len(inputs.rewards):
            total = total + weight * inputs.group_normalised(inputs.parts[name].double().clamp(low, high), options)
    return inputs.over_tokens(total)

"""Amounts by which episodes raise the best of several attempts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from annotated_types import Ge

from agentrl.algo.advantages import AdvantageInputs, AdvantageOptions
from agentrl.algo.facts import advantage_estimator
from agentrl.algo.flat import all_same, clipped_rewards
from agentrl.algo.statistics import SAME
from agentrl.core.summaries import GroupSummary

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class PassAtKOptions(AdvantageOptions):
    """Options of `pass_at_k`."""

    pass_at_k: Annotated[int, Ge(2)] | None = None
    """Attempts of which the best one counts, for the estimator of that name. Default: all of the group."""


def _best_is_common(group: GroupSummary, options: PassAtKOptions) -> bool:
    """Return True if no set of k - 1 others is worse than another episode: nearly all sets hold one of the best."""
    ordered = sorted(clipped_rewards(group, options))
    k = min(options.pass_at_k or len(ordered), len(ordered))
    return all_same(ordered[max(k - 2, 0) :])


@advantage_estimator(options=PassAtKOptions, compares_group=True, flat=_best_is_common, charges_kl=True)
def pass_at_k(inputs: AdvantageInputs, options: PassAtKOptions) -> Tensor:
    """Amount by which an episode raises the best reward of ``k - 1`` others of its group, on average over all sets, by the deviation.

    For the best of k attempts (arXiv:2505.15201); with k the size of the group only the best member has an advantage, that over the second
    (arXiv:2503.19595). With the n rewards of a group in ascending order, numbered from 0,
    ``A[i] = sum over j < i of (r[i] - r[j]) C(j, k - 2) / C(n - 1, k - 1)``.
    """
    rewards, size = inputs.clipped_rewards(options), inputs.group_size()
    raised = rewards.new_zeros(len(rewards))
    for group in sorted(set(inputs.group.tolist())):
        members = (inputs.group == group).nonzero()[:, 0]
        n = len(members)
        k = min(options.pass_at_k or n, n)
        if n > 1:
            ordered, order = rewards[members].sort()
            weights = ordered.new_tensor([math.comb(j, k - 2) / math.comb(n - 1, k - 1) for j in range(n)])
            above = (ordered[:, None] - ordered[None, :]).clamp(min=0.0)
            raised[members[order]] = (above.tril(-1) * weights).sum(1)
    if options.advantage_std_norm:
        deviation = inputs.group_std(rewards)
        raised = (raised / (deviation + 1e-9)).where((deviation > SAME * inputs.group_mean(rewards.abs())) & (size > 1), 0.0)
    return inputs.over_tokens(raised)

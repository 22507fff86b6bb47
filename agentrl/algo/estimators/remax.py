"""The reward of an episode against that of a greedy one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentrl.algo.advantages import AdvantageInputs, AdvantageOptions
from agentrl.algo.facts import advantage_estimator
from agentrl.core.errors import BatchError

if TYPE_CHECKING:
    from torch import Tensor


@advantage_estimator(charges_kl=True, greedy_baseline=True)
def remax(inputs: AdvantageInputs, options: AdvantageOptions) -> Tensor:
    """``r[i]`` minus the reward of an episode of the same task that took the most likely token each time: ReMax (arXiv:2310.10505).

    Raises:
        BatchError: If a task has no such episode.
    """
    if inputs.baseline is None:
        raise BatchError("--advantage-estimator remax needs the reward of a greedy episode of each task")
    return inputs.over_tokens(inputs.clipped_rewards(options) - inputs.baseline.double().clamp(*options.reward_clip_range))

"""Advantages that come from a teacher alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentrl.algo.advantages import AdvantageInputs, AdvantageOptions
from agentrl.algo.facts import advantage_estimator

if TYPE_CHECKING:
    from torch import Tensor


@advantage_estimator(needs_teacher=True)
def distillation(inputs: AdvantageInputs, options: AdvantageOptions) -> Tensor:
    """0 for every token, whatever it earned: what the teacher adds is all that is learned from."""
    del options
    return inputs.token_rewards * 0.0

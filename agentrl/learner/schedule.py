"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math
from typing import Literal


def learning_rate(
    step: int, *, peak: float, schedule: Literal["constant", "linear", "cosine"], warmup_steps: int, num_steps: int, min_ratio: float
) -> float:
    """Learning rate of a step.

    Rises linearly from ``peak / warmup_steps`` in the first step to `peak`, then follows the schedule down to
    ``peak * min_ratio`` in the last step.

    Args:
        step: From 0.
        peak: Highest learning rate.
        schedule: Shape after warm-up.
        warmup_steps: Steps of the rise; 0 starts at the peak.
        num_steps: Steps of the whole run; later steps keep the last value.
        min_ratio: Share of the peak at the end of ``linear`` and ``cosine``.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if schedule == "constant":
        return peak
    progress = min(1.0, (step - warmup_steps) / max(1, num_steps - 1 - warmup_steps))
    remaining = 1.0 - progress if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return peak * (min_ratio + (1.0 - min_ratio) * remaining)

"""How long a group waits for its last episodes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """When a group is closed without the rest.

    Attributes:
        quorum: Share of the episodes that have to have ended well.
        factor: How many times their median the others may take.
        least: Episodes that have to have ended well in any case.
    """

    quorum: float
    factor: float
    least: int = 1

    def deadline_s(self, ended_s: Sequence[float], num_samples: int) -> float | None:
        """Seconds after the start of the group at which the rest is withheld; `None` while too few have ended well.

        Args:
            ended_s: What those that ended well took, seconds.
            num_samples: Episodes of the group.
        """
        if len(ended_s) < max(self.least, math.ceil(self.quorum * num_samples)):
            return None
        return self.factor * median(ended_s)

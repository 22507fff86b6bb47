"""The account of a run's recorded episodes, and the budget from which groups are recorded whole."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any


class RecordBudget:
    """Bytes that the records of a run may take, divided over its steps.

    A group is recorded whole as long as its step has bytes left of its own share and of those that the steps before it did not use, so
    that a large run has whole groups from its beginning to its end. Of every other group the first `least` episodes are recorded, which
    is counted and never refused.

    Args:
        samples: Episodes of a group.
        least: Episodes of each group that are recorded in any case.
        budget_bytes: Bytes of the whole run; 0 records whole groups never.
        num_steps: Steps that the budget is divided over.
        episode_bytes: Size that an episode is taken to have until one is recorded.

    Attributes:
        episodes: Episodes recorded so far.
        played: Episodes played so far, recorded or not.
        bytes: Bytes of the records so far.
    """

    def __init__(self, *, samples: int, least: int, budget_bytes: float = 0.0, num_steps: int = 1, episode_bytes: float = math.inf) -> None:
        self._samples, self._least, self._budget, self._num_steps = samples, least, budget_bytes, num_steps
        self._first_guess = episode_bytes
        self._promised: dict[int, int] = {}  # group id -> episodes of it that will be recorded, as long as it is in flight
        self._in_flight = 0  # their sum
        self.episodes = self.played = self.bytes = 0

    def restore(self, *, episodes: int, played: int, size: int) -> None:
        """Begin with what an earlier part of the run has recorded, in `size` bytes."""
        self.episodes, self.played, self.bytes = episodes, played, size

    def promise(self, group_id: int, step: int) -> int:
        """Return how many episodes of a group that begins now are recorded.

        Args:
            group_id: Number of the group, whose bytes are reserved until `settle`.
            step: The latest step that may train on it, from 1.
        """
        if not self._budget:
            return self._least
        count = self._samples if self._is_covered(step) else self._least
        self._promised[group_id] = count
        self._in_flight += count
        return count

    def _is_covered(self, step: int) -> bool:
        expected = self.bytes / self.episodes if self.episodes else self._first_guess
        share = self._budget * min(1.0, step / self._num_steps)
        return self.bytes + expected * (self._in_flight + self._samples) <= share

    def settle(self, group_id: int, *, episodes: int, played: int, size: int) -> None:
        """Count an attempt at a group, of which `episodes` were recorded in `size` bytes."""
        self.forget((group_id,))
        self.episodes, self.played, self.bytes = self.episodes + episodes, self.played + played, self.bytes + size

    def forget(self, group_ids: Iterable[int]) -> None:
        """Release what is reserved for groups that were given up."""
        for group_id in group_ids:
            self._in_flight -= self._promised.pop(group_id, 0)

    def to_json(self) -> dict[str, Any]:
        """Return the account in JSON's own types."""
        return {"episodes": self.episodes, "played": self.played, "bytes": self.bytes}

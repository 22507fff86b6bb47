"""Judgement of a teacher: log-probabilities of the tokens that a policy sampled, and of the teacher's own most likely ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from agentrl.core.errors import BatchError


@dataclass(frozen=True, slots=True, eq=False)
class TeacherScores:
    """Natural log-probabilities of a teacher at temperature 1, for T sampled tokens; where it gave fewer than K tokens, the rest is -inf.

    Raises:
        BatchError: If the arrays do not fit together.
    """

    logprobs: npt.NDArray[np.float32]  # [T] of the sampled tokens
    top_ids: npt.NDArray[np.int32]  # [T, K] its most likely tokens
    top_logprobs: npt.NDArray[np.float32]  # [T, K] of these

    def __post_init__(self) -> None:
        if self.top_ids.shape != self.top_logprobs.shape or len(self.top_ids) != len(self.logprobs):
            shapes = f"{self.logprobs.shape}, {self.top_ids.shape}, {self.top_logprobs.shape}"
            raise BatchError(f"scores of a teacher have the shapes {shapes}, and need [T], [T, K], [T, K]")

    def part(self, begin: int, end: int) -> TeacherScores:
        """Return the scores of some of the tokens."""
        return TeacherScores(self.logprobs[begin:end], self.top_ids[begin:end], self.top_logprobs[begin:end])

    def within(self, vocabulary: int) -> TeacherScores:
        """Return the scores without most likely tokens that the policy does not have: ids from `vocabulary` on."""
        foreign = self.top_ids >= vocabulary
        ids, logprobs = np.where(foreign, np.int32(0), self.top_ids), np.where(foreign, np.float32(-np.inf), self.top_logprobs)
        return TeacherScores(self.logprobs, ids, logprobs)


class Teacher(Protocol):
    """A model to learn from, behind whatever runs it."""

    async def start(self) -> None:
        """Load the model; on return it scores.

        Raises:
            ConfigError: If it cannot be used.
        """

    async def score(self, tokens: npt.NDArray[np.int32], places: npt.NDArray[np.int32], top_k: int) -> TeacherScores:
        """Score the tokens at some places of a row, none at its beginning, with the `top_k` most likely tokens there.

        Raises:
            RewardError: If the teacher does not answer, or answers with something else.
        """
        ...

    async def close(self) -> None:
        """Release memory and connections; safe to call twice."""

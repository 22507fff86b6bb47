"""A learner that only takes time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agentrl.core.protocols import TrainResult, WeightUpdate
from agentrl.core.summaries import GroupSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerModel:
    """Speed of the learner: a step takes ``(step_s + token_s * tokens / ranks) * noise + overhead_s``.

    Attributes:
        step_s: Seconds of a step that do not depend on its tokens.
        token_s: Seconds that one rank needs for a sampled token.
        ranks: Data-parallel ranks, which share a step's tokens.
        noise: A factor, 1 on average.
        overhead_s: Seconds around each step in which the learner is waited for and does not train.
        export_s: Seconds to make the weights available.
    """

    step_s: float = 0.0
    token_s: float = 0.0
    ranks: int = 1
    noise: Callable[[random.Random], float] = lambda rng: 1.0
    overhead_s: float = 0.0
    export_s: Callable[[random.Random], float] = lambda rng: 0.0

    def train_s(self, tokens: float) -> float:
        """Seconds that a step of so many tokens takes on average."""
        return self.step_s + self.token_s * tokens / self.ranks


class SimulatedLearner:
    """See `agentrl.core.protocols.Learner`; groups are summaries.

    Args:
        model: How fast it is.
        seed: Of what is drawn.
    """

    def __init__(self, model: LearnerModel, seed: int = 0) -> None:
        self._model, self._rng = model, random.Random(f"{seed} learner")

    async def start(self) -> None:
        """Nothing is to be loaded."""

    async def train(self, step: int, groups: Sequence[GroupSummary]) -> TrainResult:
        """Take the time of a step."""
        tokens = sum(member.num_tokens for group in groups for member in group.trainable)
        seconds = self._model.train_s(tokens) * self._model.noise(self._rng)
        await asyncio.sleep(seconds + self._model.overhead_s)
        return TrainResult(metrics={}, seconds=seconds)

    async def export_weights(self, version: int) -> WeightUpdate:
        """Take the time of an export."""
        await asyncio.sleep(self._model.export_s(self._rng))
        return WeightUpdate(version=version, transport="simulated")

    async def save_model(self, path: str) -> None:
        """There is none."""

    async def save_checkpoint(self, path: str, step: int) -> None:
        """There is nothing to save."""

    async def load_checkpoint(self, path: str) -> int:
        """Nothing was saved."""
        return 0

    async def close(self) -> None:
        """Nothing is held."""

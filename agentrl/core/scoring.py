"""Scores that trained models give to episodes: what is asked of them, what they answer, and the running moments of the scores."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from agentrl.core.types import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest:
    """One text to be scored: an episode as the policy read and wrote it, control tokens included."""

    text: str
    spans: tuple[tuple[int, int], ...] = ()  # [N] where each turn of the policy begins and ends in `text`, characters
    messages: tuple[Message, ...] | None = None  # the same as chat messages, where they are known
    images: tuple[bytes, ...] = ()  # files of the images whose placeholders are in it, in their order


@dataclass(frozen=True, slots=True)
class ScoreAnswer:
    """The scores of one text: one of a model that judges the whole, one per turn of a model that judges steps."""

    values: tuple[float, ...]
    was_cut: bool = False  # the text was longer than the model reads, and lost its beginning
    ends: tuple[int, ...] = ()  # of a model that judges steps: characters of each turn up to the end of its worst step


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerFacts:
    """Facts about a reward model."""

    per_step: bool = False  # it is a process reward model, and gives a score for each turn
    scale: tuple[float, float] | None = None  # mean and standard deviation of its scores on other data, where its files state them


class Scorer(Protocol):
    """A reward model behind whatever runs it."""

    async def start(self) -> None:
        """Load the model; on return it scores.

        Raises:
            ConfigError: If it cannot be used.
        """

    async def facts(self) -> ScorerFacts:
        """Return what the model is, once it is loaded."""
        ...

    async def score(self, request: ScoreRequest) -> ScoreAnswer:
        """Score one text; requests that overlap share batches.

        Raises:
            RewardError: If the model gave no finite score, or its process is gone.
        """
        ...

    async def close(self) -> None:
        """Release process and memory; safe to call twice."""


@dataclass(frozen=True, slots=True)
class Moments:
    """Number, mean and sum of squared deviations of the scores seen so far; see `added`."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def added(self, values: Iterable[float]) -> Moments:
        """Return the moments with more values, one after another in the given order (Welford, 1962), so equal orders give equal bits."""
        count, mean, squares = self.count, self.mean, self.squares
        for value in values:
            count += 1
            delta = value - mean
            mean += delta / count
            squares += delta * (value - mean)
        return Moments(count, mean, squares)

    @property
    def std(self) -> float:
        """Standard deviation of the values as a population; 0 without two different ones."""
        return math.sqrt(self.squares / self.count) if self.count else 0.0

    @property
    def scale(self) -> tuple[float, float]:
        """Mean and standard deviation, with which scores are normalised."""
        return self.mean, self.std


class ScoreMoments:
    """The moments of every reward model's scores, which grow with each training step and travel in checkpoints."""

    def __init__(self, state: Mapping[str, Sequence[float]] | None = None) -> None:
        self._moments = {name: Moments(int(count), mean, squares) for name, (count, mean, squares) in (state or {}).items()}

    def add(self, scores: Iterable[Mapping[str, Sequence[float]]]) -> None:
        """Take in the scores of episodes, by model, in the order of the episodes."""
        for by_model in scores:
            for name, values in by_model.items():
                self._moments[name] = self._moments.get(name, Moments()).added(values)

    def scales(self) -> dict[str, tuple[float, float]]:
        """Return mean and standard deviation by model; a model that has not scored two different values yet is left out."""
        return {name: moments.scale for name, moments in self._moments.items() if moments.std > 0.0}

    def state(self) -> dict[str, tuple[int, float, float]]:
        """Return what a new object is made of, in JSON's own types."""
        return {name: (moments.count, moments.mean, moments.squares) for name, moments in self._moments.items()}


def normalized(score: float, scale: tuple[float, float] | None) -> float:
    """Return ``(score - mean) / std``; without a scale, or with a deviation of 0, the score itself."""
    if scale is None or not scale[1] > 0.0:
        return score
    return (score - scale[0]) / scale[1]


def clipped(score: float, bound: float) -> float:
    """Return the score cut to -`bound` .. `bound`."""
    return min(max(score, -bound), bound)

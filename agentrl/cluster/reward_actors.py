"""Reward models in actors of their own, and the handle by which rollout workers ask them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

from agentrl.cluster.build import build_scorer
from agentrl.cluster.joining import Site
from agentrl.cluster.processes import ClusterPlan
from agentrl.cluster.ray_actors import unwrapped
from agentrl.core.errors import RewardError
from agentrl.core.scoring import ScoreAnswer, ScoreRequest, ScorerFacts

T = TypeVar("T")


class RewardActor:
    """Holds one reward model, which `start` loads; when Ray starts the process again, the next call loads it."""

    def __init__(self, plan: ClusterPlan, index: int, site: Site) -> None:
        self._scorer, self._loading = build_scorer(site.settled(plan), index), asyncio.Lock()
        self._is_loaded = False

    async def start(self) -> None:
        """Load the model, unless it is loaded."""
        async with self._loading:
            if not self._is_loaded:
                await self._scorer.start()
                self._is_loaded = True

    async def facts(self) -> ScorerFacts:
        """As `Scorer.facts`."""
        await self.start()
        return await self._scorer.facts()

    async def score(self, request: ScoreRequest) -> ScoreAnswer:
        """As `Scorer.score`."""
        await self.start()
        return await self._scorer.score(request)


class RayScorer:
    """A `Scorer` whose process is an actor; each rollout worker has its copy."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    async def start(self) -> None:
        """As `Scorer.start`."""
        await _scorer(self.actor.start.remote())

    async def facts(self) -> ScorerFacts:
        """As `Scorer.facts`."""
        return await _scorer(self.actor.facts.remote())

    async def score(self, request: ScoreRequest) -> ScoreAnswer:
        """As `Scorer.score`."""
        return await _scorer(self.actor.score.remote(request))

    async def close(self) -> None:
        """Do nothing: the runtime ends the actors."""


async def _scorer(ref: Awaitable[T]) -> T:
    return await unwrapped(ref, RewardError, "the process of a reward model")

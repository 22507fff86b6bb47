"""Handles of learner ranks: which of several errors tells what happened."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError

from agentrl.cluster import ray_actors
from agentrl.cluster.ray_actors import RayLearner
from agentrl.core.errors import LearnerDeadError, NonFiniteError


def rank(error: Exception | None, after_s: float = 0.0) -> Any:
    async def answer() -> str:
        await asyncio.sleep(after_s)
        if error is not None:
            raise error
        return "done"

    return SimpleNamespace(call=SimpleNamespace(remote=lambda method, *arguments: answer()))


def learner(*ranks: Any) -> RayLearner:
    return RayLearner(ranks, [f"10.0.0.{number}" for number in range(len(ranks))])


@pytest.mark.anyio
async def test_a_lost_rank_is_named_with_its_machine_although_another_rank_noticed_first() -> None:
    with pytest.raises(LearnerDeadError, match=r"learner-1 on 10\.0\.0\.1 is gone"):
        await learner(rank(RuntimeError("Connection closed by peer")), rank(RayActorError(), 0.05)).save_model("x")


@pytest.mark.anyio
async def test_an_error_of_training_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NonFiniteError):
        await learner(rank(NonFiniteError("too large")), rank(None, 3600.0)).save_model("x")
    monkeypatch.setattr(ray_actors, "LOSS_TIMEOUT_S", 0.05)
    with pytest.raises(RuntimeError, match="a bug"):
        await learner(rank(RuntimeError("a bug")), rank(None, 3600.0)).save_model("x")

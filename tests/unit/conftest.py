"""Fixtures that tests of several packages use: metrics and groups of a made-up run, and a clock that tests move."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from agentrl.core.summaries import GroupSummary, MemberSummary
from agentrl.core.types import Status


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def metrics() -> Callable[..., dict[str, float]]:
    def make(step: int, reward: float = 0.5, **changes: float) -> dict[str, float]:
        values = {
            "step": float(step),
            "time_s": 2.0 * step,
            "reward/mean": reward,
            "score/mean": reward / 2,
            "staleness/mean": 0.8,
            "staleness/max": 1.0,
            "mismatch/max": 3e-6,
            "tokens_per_s": 1000.0 + step,
            "idle/generator": 0.25,
            "idle/learner": 0.5,
            "tokens": 2000.0,
            "episode/count": 16.0,
            "time/train_s": 0.5,
            "publish/seconds": 0.1,
            "publish/export_s": 0.1,
            "ledger/submitted": 4.0 * step + 4,
            "ledger/trained": 4.0 * step,
            "ledger/filtered": 1.0,
            "ledger/dropped": 0.0,
            "ledger/in_flight": 3.0,
        }
        return {**values, **changes}

    return make


@pytest.fixture
def group() -> Callable[..., GroupSummary]:
    def make(*statuses: Status, error: str | None = None, records: tuple[dict[str, object], ...] = ()) -> GroupSummary:
        members = tuple(
            MemberSummary(
                status=status,
                reward=1.0 if status.trainable else None,
                score=None,
                num_tokens=3,
                num_prompt_tokens=2,
                num_turns=1,
                truncated=False,
                error=None if status.trainable else error,
            )
            for status in statuses or (Status.FINISHED,)
        )
        return GroupSummary(group_id=0, members=members, versions=(0, 0), seconds=0.1, records=records)

    return make

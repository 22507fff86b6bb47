"""Environments of the package SkyRL-gym run unchanged."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.core.errors import EnvLoadError
from agentrl.core.types import Status, Task
from agentrl.suites.load import load_agent
from tests.unit.suites.test_skyrl import play

pytestmark = [pytest.mark.anyio, pytest.mark.real_model]


def task_of(answer: str, **more: Any) -> Task:
    return Task("1+1?", metadata={"reward_spec": {"ground_truth": answer}, "extra_info": {}, **more})


async def test_environments_of_the_package() -> None:
    pytest.importorskip("skyrl_gym", reason="make test-real installs it")
    trajectory = await play("skyrl:gsm8k", "It is #### 2", task=task_of("2"))
    assert (trajectory.status, trajectory.reward) == (Status.FINISHED, 1.0)
    several = await play("skyrl:gsm8k_multi_turn?max_turns=2", "#### 3", "#### 2", task=task_of("2"))
    assert (several.status, len(several.turns)) == (Status.FINISHED, 2)
    assert several.reward == pytest.approx(1.1)
    assert several.metrics["steps"] == 2.0
    assert load_agent("skyrl:search?topk=5").load().env_config.topk == 5
    with pytest.raises(EnvLoadError, match="SkyRL-gym has no 'gsm'"):
        load_agent("skyrl:gsm")
    with pytest.raises(EnvLoadError, match="unexpected keyword argument 'top'"):
        load_agent("skyrl:search?top=5")

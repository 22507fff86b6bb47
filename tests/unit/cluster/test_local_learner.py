"""The learner in the process of its environments."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from agentrl.cluster.runtime import ThreadedLearner

pytestmark = pytest.mark.anyio


async def test_a_default_type_that_an_environment_changed_is_set_back_before_a_step_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[torch.dtype] = []
    rank: Any = SimpleNamespace(start=lambda *_: None, train=lambda *_: seen.append(torch.get_default_dtype()))
    learner = ThreadedLearner(rank, "envs/mine.py")
    await learner.start()
    try:
        for step in range(3):
            torch.set_default_dtype(torch.float64)
            await learner.train(step, [])
    finally:
        torch.set_default_dtype(torch.float32)
    assert seen == [torch.float32] * 3
    (record,) = caplog.records
    assert "envs/mine.py changed the default type of tensors to torch.float64" in record.getMessage()

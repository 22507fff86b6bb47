"""Publication of an adapter to the real engine, merged or native: engine and learner give the same log-probabilities each time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl.core.errors import WeightSyncError
from agentrl.core.protocols import WeightUpdate
from agentrl.core.types import Generation
from agentrl.engine.vllm_engine import VllmEngine
from agentrl.learner.learner import LearnerRank
from agentrl.learner.plan import LoraConfig
from agentrl.weights.plan import WeightsConfig
from agentrl.weights.sender import AdapterSender, SharedMemorySender
from tests.e2e.vllm_support import reference, request, settings
from tests.learner_support import make_groups, make_settings, write_model

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

LORA = LoraConfig(lora_rank=4, lora_alpha=32)
KEPT = 2
PROMPTS = [[2 + (7 * index + 3 * place) % 60 for place in range(70 + index)] for index in range(3)]


@asynccontextmanager
async def pair(folder: Path, publish: str) -> AsyncIterator[tuple[LearnerRank, VllmEngine]]:
    model = write_model(folder / "model", hidden_size=64, intermediate_size=128, head_dim=32)
    (folder / "shm").mkdir()
    sender = SharedMemorySender(folder / "shm")
    adapters = 0
    if publish == "adapter":
        sender, adapters = AdapterSender(rank=4, alpha=32, kept=KEPT + 2, root=folder / "shm"), KEPT
    engine = VllmEngine(settings(model, lora_rank=4, adapters=adapters))
    learner = LearnerRank(replace(make_settings(model), lora=LORA, weights=WeightsConfig(publish=publish)), sender)
    learner.start(0, 1, 0)
    try:
        await engine.start()
        yield learner, engine
    finally:
        await engine.close()
        learner.close()


async def answers(engine: VllmEngine) -> list[Generation]:
    return [await engine.generate(request(prompt, max_tokens=12, seed=index)) for index, prompt in enumerate(PROMPTS)]


def scores(learner: LearnerRank, generations: list[Generation]) -> list[Any]:
    policy = learner._started.policy
    return [reference(policy, prompt, generation) for prompt, generation in zip(PROMPTS, generations, strict=True)]


@pytest.mark.parametrize("publish", ["merged", "adapter"])
async def test_engine_and_learner_agree_after_each_of_20_publications(tmp_path: Path, publish: str) -> None:
    async with pair(tmp_path, publish) as (learner, engine):
        worst, smallest_change, before = 0.0, np.inf, await answers(engine)
        for version in range(1, 21):
            learner.train(version - 1, *make_groups(seed=version, version=version - 1))
            assert await engine.load_weights(learner.export_weights(version)) == version
            smallest_change = min(
                smallest_change, max(np.abs(a - b.logprobs).max() for a, b in zip(scores(learner, before), before, strict=True))
            )
            before = await answers(engine)
            worst = max(worst, *(np.abs(a - b.logprobs).max() for a, b in zip(scores(learner, before), before, strict=True)))
            assert {int(v) for generation in before for v in generation.versions} == {version}
        assert worst < 1e-4
        assert smallest_change > 1e-3  # an engine that kept the weights of the version before would be found
        print(f"{publish}: largest difference {worst:.1e}; to the version before at least {smallest_change:.1e}")
        if publish == "adapter":
            assert await engine._llm.list_loras() == {20 - place for place in range(KEPT)}


async def test_a_version_that_is_published_again_with_other_weights_is_taken(tmp_path: Path) -> None:
    """A learner that went back to its checkpoint numbers its versions as before."""
    async with pair(tmp_path, "adapter") as (learner, engine):
        for seed in (1, 2):
            learner.train(0, *make_groups(seed=seed))
            await engine.load_weights(learner.export_weights(1))
            found = await answers(engine)
            for expected, generation in zip(scores(learner, found), found, strict=True):
                np.testing.assert_allclose(generation.logprobs, expected, atol=1e-4)


async def test_a_request_under_way_keeps_its_adapter_and_says_so(tmp_path: Path) -> None:
    async with pair(tmp_path, "adapter") as (learner, engine):
        updates, weights = [], []
        for version in range(1, KEPT + 3):
            learner.train(version - 1, *make_groups(seed=version, version=version - 1))
            updates.append(learner.export_weights(version))
            weights.append({name: tensor.clone() for name, tensor in learner._started.policy.state_dict().items()})
        await engine.load_weights(updates[0])
        running = [asyncio.create_task(engine.generate(request(prompt[:20], max_tokens=100, seed=0))) for prompt in PROMPTS]
        await asyncio.sleep(0)
        for update in updates[1:]:
            await engine.load_weights(update)
        in_use = not any(task.done() for task in running)
        held = await engine._llm.list_loras()
        generations = await asyncio.gather(*running)
        assert not in_use or held == {1, KEPT + 2}  # the one in use was not unloaded, those after it were
        learner._started.policy.load_state_dict(weights[0])
        for prompt, generation in zip(PROMPTS, generations, strict=True):
            assert set(generation.versions.tolist()) == {1}
            np.testing.assert_allclose(generation.logprobs, reference(learner._started.policy, prompt[:20], generation), atol=1e-4)


async def test_an_adapter_that_cannot_be_read_fences_the_engine(tmp_path: Path) -> None:
    async with pair(tmp_path, "adapter") as (_, engine):
        with pytest.raises(WeightSyncError, match="version 1 did not load"):
            await engine.load_weights(WeightUpdate(version=1, transport="adapter", payload={"path": str(tmp_path / "none")}))

"""Families of models that read images: the log-probabilities of both engines are the learner's, in every turn and after a publication."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.utils import is_torchvision_available

from agentrl.core.protocols import Engine, WeightUpdate
from agentrl.engine.plan import EngineConfig
from agentrl.engine.settings import EngineSettings, prepare_environment
from agentrl.engine.transformers_engine import TransformersEngine
from agentrl.engine.vllm_engine import VllmEngine
from agentrl.rollout.plan import ModelConfig
from tests.image_support import Player, mismatch, reader_of
from tests.vision_families import FAMILIES, make_family

pytestmark = pytest.mark.anyio
CLOSE = 1e-4
"""Nats between engine and learner."""
BOTH_WAYS = "on a CPU vLLM does not compute attention in both directions, and images are refused by name"
NOT_IN_VLLM = {
    **dict.fromkeys(("gemma3", "gemma4"), BOTH_WAYS),
    "llava": "vLLM 0.32 does not know the names that transformers 5 gives the weights of CLIP",
}


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_family(request.param, tmp_path_factory.mktemp("family") / request.param))


async def plays(engine: Engine, model: str, name: str) -> Sequence[Any]:
    player = Player(engine, reader_of(model), name)
    return await asyncio.gather(*(player.play(episode) for episode in range(4)))


def loaded(path: str) -> Any:
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(path)


async def agrees(engine: Engine, family: str, folder: Path) -> None:
    """Compare an engine with the learner, before a publication and after it."""
    model = loaded(family)
    assert mismatch(await plays(engine, family, "before"), model) < CLOSE
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.05)
    model.save_pretrained(folder / "new")
    update = WeightUpdate(version=1, transport="shm", payload={"update": {"path": str(folder / "new" / "model.safetensors")}})
    assert await engine.load_weights(update) == 1
    assert mismatch(await plays(engine, family, "after"), model) < CLOSE


@asynccontextmanager
async def started(kind: Callable[[EngineSettings], Engine], family: str) -> AsyncIterator[Engine]:
    prepare_environment("cpu")
    limits = EngineConfig(kv_cache_gib=0.05, max_num_seqs=8, max_model_len=512)
    engine = kind(EngineSettings(model=ModelConfig(model=family), engine=limits, max_images=4))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


async def test_the_engine_of_transformers_agrees_with_the_learner(family: str, tmp_path: Path) -> None:
    async with started(TransformersEngine, family) as engine:
        await agrees(engine, family, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not is_torchvision_available(), reason="vLLM has no processor of these families without torchvision")
async def test_vllm_agrees_with_the_learner(family: str, tmp_path: Path) -> None:
    if why := next((why for kind, why in NOT_IN_VLLM.items() if family.endswith(kind)), ""):
        pytest.skip(why)
    async with started(VllmEngine, family) as engine:
        await agrees(engine, family, tmp_path)

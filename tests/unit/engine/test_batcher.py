"""The batcher with little memory: slots become longer and fewer while requests run, and each gets what it gets alone."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from agentrl.engine.plan import EngineConfig
from agentrl.engine.transformers_engine import TransformersEngine
from tests.e2e.vllm_support import equal, prompt, random_llama, request, saved, settings

pytestmark = pytest.mark.anyio

BYTES_PER_TOKEN = 512
"""Of the model: 2 layers of keys and values of one head of 32 float32."""


@pytest.mark.parametrize("tokens", [400, 1100])
async def test_a_long_prompt_among_short_ones_takes_slots_away(tokens: int, tmp_path: Path) -> None:
    """With 1,100 tokens of memory, 17 slots of 64 become one or two of 512."""
    memory = tokens * BYTES_PER_TOKEN / 2**30
    config = EngineConfig(max_num_seqs=64, kv_cache_gib=memory, max_model_len=512)
    engine = TransformersEngine(settings(saved(random_llama(), tmp_path), engine=config))
    await engine.start()
    try:

        async def generate(k: int) -> Any:
            return await engine.generate(request(prompt(k, 400 if k == 5 else 8 + k), max_tokens=24, seed=k))

        alone = [await generate(k) for k in range(7)]
        early = [asyncio.create_task(generate(k)) for k in range(7) if k != 5]
        await asyncio.sleep(0.01)  # most have slots by then; the result is the same if not
        long = await asyncio.wait_for(generate(5), 60)
        together = await asyncio.wait_for(asyncio.gather(*early), 60)
    finally:
        await engine.close()
    assert equal(alone[5], long)
    assert all(equal(alone[k], other) for k, other in zip((k for k in range(7) if k != 5), together, strict=True))

"""Random tiny models and reference log-probabilities for tests of the real engine."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentrl.core.errors import EngineDeadError, WeightSyncError
from agentrl.core.protocols import Engine, GenerationRequest, WeightUpdate
from agentrl.core.types import Generation, Sampling, ints
from agentrl.engine.plan import EngineConfig
from agentrl.engine.settings import EngineSettings
from agentrl.rollout.plan import ModelConfig

IN_PROCESS = EngineConfig(max_num_seqs=64, kv_cache_gib=0.06, engine_core="process")
END = 2
CONTEXT = 256
_ids = itertools.count()


def random_llama(*, seed: int = 0, tied: bool = True, intermediate: int = 128, end: int | None = None) -> Any:
    """A Llama of random weights, wide enough in its logits that every sample says something; never ends unless told how."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=intermediate,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=end,
        pad_token_id=0,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config).float().eval()


def saved(model: Any, path: Path) -> str:
    model.save_pretrained(path)
    return str(path)


def settings(model: str, **changes: Any) -> EngineSettings:
    """Of a model without a tokenizer, unless `stop_strings` is among the changes."""
    own = EngineSettings(model=ModelConfig(model=model), engine=EngineConfig(max_num_seqs=64, kv_cache_gib=0.06), stop_strings=False)
    return replace(own, **changes)


def request(prompt: Iterable[int], **sampling: Any) -> GenerationRequest:
    return GenerationRequest(request_id=f"r{next(_ids)}", prompt_ids=ints(list(prompt)), sampling=Sampling(**sampling))


def prompt(index: int, length: int | None = None) -> list[int]:
    generator = np.random.default_rng(index)
    return [int(token) for token in generator.integers(3, 256, length or int(generator.integers(3, 150)))]


@torch.no_grad()
def reference(model: Any, prompt_ids: Sequence[int], generation: Generation, temperature: float = 1.0) -> np.ndarray:
    """Log-probabilities of the sampled tokens under a transformers model. # [T]"""
    ids = torch.tensor([*prompt_ids, *generation.token_ids.tolist()])
    logits = model(ids[None]).logits[0, len(prompt_ids) - 1 : -1] / temperature
    return torch.log_softmax(logits, -1).gather(-1, ids[len(prompt_ids) :, None])[:, 0].numpy()


def equal(a: Generation, b: Generation) -> bool:
    """Whether two generations are the same, bit for bit."""
    return np.array_equal(a.token_ids, b.token_ids) and np.array_equal(a.logprobs, b.logprobs)


async def expect_fence(engine: Engine, update: WeightUpdate, why: str) -> None:
    """An engine that could not load an update fails what runs and what comes later."""
    running = asyncio.create_task(engine.generate(request(prompt(1, 20), max_tokens=230, seed=0)))
    await asyncio.sleep(0.02)
    with pytest.raises(WeightSyncError, match=f"version {update.version}.*{why}"):
        await engine.load_weights(update)
    with pytest.raises(EngineDeadError, match="did not load"):
        await asyncio.wait_for(running, 5)
    with pytest.raises(EngineDeadError, match="did not load"):
        await engine.generate(request([5]))
    with pytest.raises(EngineDeadError, match="did not load"):
        await engine.load_weights(update)

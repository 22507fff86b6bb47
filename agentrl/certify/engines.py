"""Tokens that an engine samples from a twin, and their log-probabilities by the model itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from agentrl.certify.compare import FAULTS, LOGPROB, row_scores, untried
from agentrl.certify.results import Comparison, Verdict
from agentrl.core.errors import AgentRLError
from agentrl.core.images import PlacedImage
from agentrl.core.protocols import Engine, GenerationRequest
from agentrl.core.types import Generation, Sampling, ints
from agentrl.engine.facts import ENGINES
from agentrl.engine.plan import EngineConfig
from agentrl.engine.settings import EngineSettings, prepare_environment
from agentrl.learner.batch import Batch
from agentrl.rollout.plan import ModelConfig

Images: TypeAlias = tuple[PlacedImage, ...]
TOKENS, CONTEXT, SEQUENCES, CACHE_GIB = 16, 128, 8, 0.05
DEADLINE_S = {name: facts.start_s for name, facts in ENGINES.items()}
"""Seconds that an engine has to load and to sample; importing vLLM on a busy machine takes the most of it."""


def compare_engine(twin: str, batch: Batch, model: Any, *, vllm: bool = False) -> Comparison:
    """Have an engine sample from several prompts at once, and compare its log-probabilities with those of the model."""
    name = "vllm" if vllm else "transformers"
    try:
        sampled = asyncio.run(asyncio.wait_for(_sample(twin, batch, _factory(vllm)), DEADLINE_S[name]))
    except TimeoutError:
        return untried("engine", name, f"it gave no answer within {DEADLINE_S[name]:g} s")
    except (*FAULTS, AgentRLError) as error:
        return untried("engine", name, error)
    differences: list[Tensor] = []
    for prompt, placed, generation in sampled:
        tokens = [*prompt, *generation.token_ids.tolist()]
        with torch.no_grad():
            expected = row_scores(model, tokens, torch.arange(len(prompt), len(tokens)), placed)
        differences.append(torch.tensor(generation.logprobs.tolist()) - expected)
    worst = float(torch.cat(differences).abs().max())
    if worst <= LOGPROB:
        return Comparison(part="engine", name=name, verdict=Verdict.EXACT, logprob=worst)
    reason = "log-probabilities of sampled tokens are not those of the model"
    return Comparison(part="engine", name=name, verdict=Verdict.WRONG, logprob=worst, reason=reason)


def _factory(vllm: bool) -> Callable[[EngineSettings], Any]:
    if vllm:
        prepare_environment("cpu")
        from agentrl.engine.vllm_engine import VllmEngine

        return VllmEngine
    from agentrl.engine.transformers_engine import TransformersEngine

    return TransformersEngine


async def _sample(twin: str, batch: Batch, factory: Callable[[EngineSettings], Any]) -> list[tuple[list[int], Images, Generation]]:
    config = EngineConfig(max_model_len=CONTEXT, max_num_seqs=SEQUENCES, kv_cache_gib=CACHE_GIB)
    engine: Engine = factory(EngineSettings(model=ModelConfig(model=twin), engine=config, stop_strings=False))
    prompts = {tuple(row.turns[0].prompt_ids.tolist()): row.turns[0].images for row in batch.rows}
    prompts |= {tuple(row.tokens.tolist()): row.images for row in batch.rows[-1:]}
    try:
        await engine.start()
        requests = [
            GenerationRequest(
                request_id=str(number), prompt_ids=ints(list(prompt)), sampling=Sampling(max_tokens=TOKENS, seed=number), placed=placed
            )
            for number, (prompt, placed) in enumerate(prompts.items())
        ]
        answers = await asyncio.gather(*(engine.generate(request) for request in requests))
    finally:
        await engine.close()
    return [(list(prompt), placed, answer) for (prompt, placed), answer in zip(prompts.items(), answers, strict=True)]

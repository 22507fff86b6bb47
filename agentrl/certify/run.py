"""One certification from a model's configuration to its certificate: learner and engines on rows that are prefix trees."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from agentrl.certify.compare import FAULTS, LOGPROB, compare_adapter, compare_kernel, reference_model, reference_scores, row_scores, untried
from agentrl.certify.results import Certificate, Comparison, Verdict
from agentrl.core.errors import AgentRLError
from agentrl.core.images import ImageInput, PlacedImage
from agentrl.core.model_shape import placeholder_ids
from agentrl.core.protocols import Engine, GenerationRequest
from agentrl.core.tokenizers import quiet_transformers
from agentrl.core.types import Generation, Sampling, ints
from agentrl.engine.facts import ENGINES
from agentrl.engine.plan import EngineConfig
from agentrl.engine.settings import EngineSettings, prepare_environment
from agentrl.learner.attention import KERNELS
from agentrl.learner.batch import Batch
from agentrl.learner.probes import batch_of, branching
from agentrl.rollout.plan import ModelConfig
from agentrl.weights.twin import build_twin, parameters_of, twin_config
from agentrl.weights.twin_images import drawn_images
from agentrl.weights.twin_sizes import VLLM_HEAD, VOCABULARY

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


LENGTHS = ((9, (4, 30, 12)), (37, (9, 41, 20)))
"""Tokens of the prompt of each group, and of the answers of its members."""


def trial_batch(seed: int = 0, images: Sequence[ImageInput] = ()) -> Batch:
    """Return a batch of random tokens, the same for the same seed; answers of a group begin alike. `images` are as in `batch_of`."""
    rng = np.random.default_rng(seed)

    def draw(count: int) -> np.ndarray:
        return rng.integers(3, VOCABULARY - 8, count)

    return batch_of([(draw(prompt), branching([draw(answer) for answer in answers])) for prompt, answers in LENGTHS], images)


SEEDS = (0, 1)
"""Seeds of weights and rows. A comparison that fails with the first is made with the second: equal scores of two experts, which rounding
decides, do not come twice."""


def certify(model: str, config: Any, *, vllm: bool = False, only: Sequence[str] = ()) -> Certificate:
    """Compare learner, adapter and engines with the model on its twin.

    Args:
        model: Name of the model, for the certificate.
        config: Its configuration, or that of its text part, which is certified alone then.
        vllm: Try vLLM too.
        only: Kernels of the learner to try, and nothing else; empty for everything.

    Raises:
        ConfigError: If there is no twin of this model.
    """
    start = time.monotonic()
    twin = twin_config(config, head=VLLM_HEAD if vllm else 0)
    first, parameters, layers = _compared(twin, SEEDS[0], only, vllm=vllm)
    if any(comparison.verdict is Verdict.WRONG for comparison in first):
        second, _, _ = _compared(twin, SEEDS[1], only, vllm=vllm)
        first = [_confirmed(comparison, second) for comparison in first]
    return Certificate(
        model=model,
        model_type=str(config.model_type),
        layers=layers,
        parameters=parameters,
        comparisons=tuple(with_remedies(first, all_tried=not only)),
        seconds=time.monotonic() - start,
    )


def with_remedies(comparisons: Sequence[Comparison], *, all_tried: bool) -> list[Comparison]:
    """Return comparisons in which each wrong one of a kernel, or of an engine, names one that is exact, if there is one."""
    wrong = {(each.part, _kernel(each)) for each in comparisons if each.verdict is Verdict.WRONG and "prefix trees" not in each.name}
    exact = {(each.part, _kernel(each)): None for each in comparisons if each.verdict is Verdict.EXACT}
    flags = {"learner": "--attn-implementation", "engine": "--engine"}

    def remedy(each: Comparison) -> str:
        others = [name for part, name in exact if part == each.part and (part, name) not in wrong]
        if each.remedy or each.part not in flags:
            return each.remedy
        if others:
            return f"Use {flags[each.part]} {others[0]}, which is exact."
        return "None of those that were tried is exact." if all_tried else "`agentrl certify` with this model tries the other kernels."

    return [replace(each, remedy=remedy(each)) if each.verdict is Verdict.WRONG else each for each in comparisons]


def _kernel(comparison: Comparison) -> str:
    return comparison.name.partition(",")[0]


def _compared(twin: Any, seed: int, only: Sequence[str], *, vllm: bool) -> tuple[list[Comparison], int, int]:
    model = build_twin(twin, seed=seed)
    with tempfile.TemporaryDirectory(prefix="agentrl-certify-") as folder, quiet_transformers():
        model.save_pretrained(folder)
        return list(_comparisons(folder, seed, only, vllm=vllm)), parameters_of(model), int(twin.get_text_config().num_hidden_layers)


def _comparisons(folder: str, seed: int, only: Sequence[str], *, vllm: bool) -> Iterator[Comparison]:
    reference = reference_model(folder)
    batch = trial_batch(seed, drawn_images(reference) if placeholder_ids(reference.config) else ())
    expected = reference_scores(reference, batch)
    for kernel in only or KERNELS:
        yield from compare_kernel(folder, kernel, batch, expected)
    if only:
        return
    yield compare_adapter(folder, batch)
    yield compare_engine(folder, batch, reference)
    if vllm:
        yield compare_engine(folder, batch, reference, vllm=True)


def _confirmed(comparison: Comparison, others: Sequence[Comparison]) -> Comparison:
    """Return a comparison that failed as it came out with other weights, if those say that it is exact."""
    if comparison.verdict is not Verdict.WRONG:
        return comparison
    found = next((each for each in others if (each.part, each.name) == (comparison.part, comparison.name)), comparison)
    return replace(found, reason="exact with the second of two seeds") if found.verdict is Verdict.EXACT else comparison

"""`--kv-on-publish keep` against `recompute`: tokens per second with long requests and frequent publications, and mismatch.

    python -m tests.benchmarks.kv_on_publish [--engine vllm|transformers] [--pairs N]

Both engines run one after the other in this process, alternately, on the same requests. Each publication moves every weight by a share
of its tensor's standard deviation. The mismatch is the absolute difference between the engine's log-probability of a token and that of
the weights of its version on the whole sequence, for tokens sampled after a publication that their request lived through.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import copy
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from agentrl.assets import tiny_model_path
from agentrl.core.protocols import Engine, GenerationRequest
from agentrl.core.types import Generation, Sampling, ints
from agentrl.engine.plan import EngineConfig
from agentrl.engine.settings import EngineSettings
from agentrl.rollout.plan import ModelConfig
from agentrl.weights.plan import WeightsConfig
from agentrl.weights.sender import SharedMemorySender

CONTEXT = 4096
VOCABULARY = 512


@dataclass(frozen=True)
class Result:
    """One engine's run."""

    tokens_per_s: float
    publications: int
    mismatch_mean: float
    mismatch_max: float


def build_model() -> Any:
    """A model of random weights with the sizes of the bundled one, and a longer context."""
    torch.manual_seed(0)
    own = {"max_position_embeddings": CONTEXT, "eos_token_id": None, "initializer_range": 0.1}
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tiny_model_path(), **own)).float().eval()


@torch.no_grad()
def moved(model: Any, share: float, seed: int) -> Any:
    """The model after a step of random direction: every weight moves by `share` of its tensor's standard deviation."""
    after, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    for parameter in after.parameters():
        spread = parameter.std() if parameter.numel() > 1 else parameter.abs()
        parameter.add_(torch.randn(parameter.shape, generator=generator) * share * spread)
    return after


def build_engine(kind: str, path: Path, kv_on_publish: Any, requests: int) -> Engine:
    """An engine that holds all requests at once."""
    config = EngineConfig(max_num_seqs=requests, kv_cache_gib=1.0, max_model_len=CONTEXT)
    settings = EngineSettings(
        model=ModelConfig(model=str(path)), engine=config, weights=WeightsConfig(kv_on_publish=kv_on_publish), stop_strings=False
    )
    if kind == "vllm":
        from agentrl.engine.vllm_engine import VllmEngine

        return VllmEngine(settings)
    from agentrl.engine.transformers_engine import TransformersEngine

    return TransformersEngine(settings)


@torch.no_grad()
def mismatch(models: list[Any], prompt: list[int], generation: Generation) -> np.ndarray:
    """Differences of tokens sampled by later weights than those at the start of the request. # [T']"""
    ids = torch.tensor([[*prompt, *generation.token_ids.tolist()]])
    later = generation.versions > generation.versions[0]
    gaps = np.zeros(len(later))
    for version in set(generation.versions[later].tolist()):
        logits = models[version](ids).logits[0, len(prompt) - 1 : -1]
        of_version = torch.log_softmax(logits, -1).gather(-1, ids[0, len(prompt) :, None])[:, 0].numpy()
        chosen = generation.versions == version
        gaps[chosen] = np.abs(of_version - generation.logprobs)[chosen]
    return gaps[later]


def request(name: str, prompt: list[int], tokens: int) -> GenerationRequest:
    """A request for that many tokens."""
    return GenerationRequest(request_id=name, prompt_ids=ints(prompt), sampling=Sampling(max_tokens=tokens))


async def run(engine: Engine, models: list[Any], arguments: argparse.Namespace) -> Result:
    """Sample all requests while weights arrive every `--interval` seconds."""
    generator = np.random.default_rng(0)
    prompts = [generator.integers(3, VOCABULARY, arguments.prompt).tolist() for _ in range(arguments.requests)]
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(SharedMemorySender(Path(folder))) as sender:
        await engine.start()
        await engine.generate(request("warm-up", prompts[0], 2))
        start, published = time.perf_counter(), 0
        asked = [asyncio.ensure_future(engine.generate(request(f"r{i}", prompt, arguments.tokens))) for i, prompt in enumerate(prompts)]
        while not all(task.done() for task in asked) and published + 1 < len(models):
            await asyncio.sleep(arguments.interval)
            published += 1
            await engine.load_weights(sender.send(models[published].named_parameters(), published))
        generations = await asyncio.gather(*asked)
        seconds = time.perf_counter() - start
        await engine.close()
    gaps = np.concatenate([mismatch(models, prompts[i], generations[i]) for i in range(min(4, len(prompts)))])
    tokens = sum(len(generation.token_ids) for generation in generations)
    return Result(tokens / seconds, published, float(gaps.mean()), float(gaps.max()))


def main() -> None:
    """Print a line per run and the ratio of the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["vllm", "transformers"], default="vllm")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=1500, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=400, help="tokens sampled per request")
    parser.add_argument("--interval", type=float, default=2.0, help="seconds between publications")
    parser.add_argument("--share", type=float, default=1e-3, help="step of a weight per publication, in standard deviations of its tensor")
    arguments = parser.parse_args()
    models = [build_model()]
    for seed in range(60):
        models.append(moved(models[-1], arguments.share, seed))
    found: dict[str, list[Result]] = {"recompute": [], "keep": []}
    with tempfile.TemporaryDirectory() as folder:
        models[0].save_pretrained(folder)
        for _ in range(arguments.pairs):
            for choice, results in found.items():
                engine = build_engine(arguments.engine, Path(folder), choice, arguments.requests)
                results.append(asyncio.run(run(engine, models, arguments)))
                said = results[-1]
                print(
                    f"{choice:9} tokens_per_s={said.tokens_per_s:.0f} publications={said.publications} "
                    f"mismatch_mean={said.mismatch_mean:.1e} mismatch_max={said.mismatch_max:.1e}",
                    flush=True,
                )
    speeds = {choice: statistics.median(result.tokens_per_s for result in results) for choice, results in found.items()}
    print(f"keep_over_recompute={speeds['keep'] / speeds['recompute']:.2f}")


if __name__ == "__main__":
    main()

"""Tokens per second through the rollout path, as a share of those of a bare `AsyncLLM` that is given the same requests.

    python -m tests.benchmarks.driver_overhead [--episodes N] [--repetitions N] [--layouts thread process] [--only "1 turn of 8"]

The rollout path is worker, groups, episodes, chat template, environment, checks, records of turns. Its requests are recorded
once and then given to vLLM directly: the same token ids, sampling, seeds and names, as many at once, those of an episode one
after another. Both take turns, each on an engine of its own with the same settings. It is measured with each ``--engine-core``: with
vLLM's core on a thread, where agentrl runs it on a CPU, and in a process of its own, as vLLM starts it by itself and agentrl on a GPU.
Every repetition begins with an empty prefix cache, and the tokens of both must be the same. Of two engines the one that was started
first may be slower, so all is done twice, with each of both first.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from agentrl.assets import tiny_model_path
from agentrl.config.sections import changed
from agentrl.core.protocols import GenerationRequest
from agentrl.core.types import GroupRequest, Sampling
from agentrl.engine.plan import EngineConfig
from agentrl.engine.settings import EngineSettings, prepare_environment
from agentrl.engine.vllm_engine import VllmEngine
from agentrl.env.agent_spec import AgentSpec
from agentrl.rollout.episode_plan import EpisodePlan
from agentrl.rollout.observers import SampleEvent, WatchedEngine
from agentrl.rollout.plan import ModelConfig
from agentrl.rollout.worker import EpisodeWorker
from agentrl.suites.load import load_class

GROUP = 8
Layout: TypeAlias = Literal["thread", "process"]
LAYOUTS: tuple[Layout, ...] = ("thread", "process")
MODULE = "tests.benchmarks._environments"


@dataclass(frozen=True)
class Workload:
    """What is generated.

    Attributes:
        name: For the table.
        agent: Class of the environment.
        sampling: Random weights next to never write an end token, so answers have `max_tokens`.
    """

    name: str
    agent: str
    sampling: Sampling


WORKLOADS = (
    Workload("1 turn of 128 tokens", "OneTurn", Sampling(max_tokens=128)),
    Workload("4 turns of 32 tokens", "Talk", Sampling(max_tokens=32)),
    Workload("1 turn of 8 tokens", "OneTurn", Sampling(max_tokens=8)),
    Workload("4 turns of 8 tokens", "Talk", Sampling(max_tokens=8)),
)

Tokens = dict[str, list[int]]
"""SampleEvent tokens by the request's name."""


class Bare:
    """Replays requests on the `AsyncLLM` of an engine, which must be given no others."""

    def __init__(self, engine: VllmEngine) -> None:
        self._engine, self.llm = engine, engine._llm

    async def replay(self, requests: Sequence[GenerationRequest]) -> Callable[[], Awaitable[Tokens]]:
        """Prepare everything but the requests themselves; what is returned sends them."""
        sessions: dict[str, list[tuple[Any, Any, str]]] = defaultdict(list)
        for request in requests:
            prompt = {"type": "token", "prompt_token_ids": request.prompt_ids.tolist()}
            sessions[request.session].append((prompt, params_of(self._engine, request.sampling), request.request_id))
        tokens: Tokens = {}

        async def play(session: list[tuple[Any, Any, str]]) -> None:
            for prompt, params, name in session:
                async for output in self.llm.generate(prompt, params, name):
                    final = output
                tokens[name] = list(final.outputs[0].token_ids)

        async def send() -> Tokens:
            await asyncio.gather(*map(play, sessions.values()))
            return tokens

        return send


async def forget(engine: VllmEngine) -> None:
    """Empty the prefix cache."""
    await engine._llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=True)
    await engine._llm.engine_core.resume_scheduler_async()


def params_of(engine: VllmEngine, sampling: Sampling) -> Any:
    """Return the sampling parameters that the engine makes of ours, with outputs of the kind that costs `AsyncLLM` least."""
    from vllm.sampling_params import RequestOutputKind

    params = engine._make_params(sampling, max_tokens=sampling.max_tokens, end_ids=engine.end_token_ids, seed=sampling.seed)
    params.output_kind, params.flat_logprobs = RequestOutputKind.FINAL_ONLY, True
    return params


@dataclass(frozen=True)
class Result:
    """Tokens per second of one workload, one entry per repetition."""

    ours: list[float]
    bare: list[float]
    tokens: int


async def compare(engine: VllmEngine, other: VllmEngine, workload: Workload, *, episodes: int, repetitions: int) -> Result:
    """Record the requests, then measure in turns."""
    requests: list[GenerationRequest] = []

    async def at_once(request: GenerationRequest) -> None:
        return

    def record(event: Any) -> None:
        if isinstance(event, SampleEvent):
            requests.append(event.request)

    agent = AgentSpec(f"{MODULE}:{workload.agent}", "", workload.agent, __file__, load_class)
    settings = changed(EpisodePlan(), model=str(tiny_model_path()), max_new_tokens=workload.sampling.max_tokens)
    tasks = agent.load().tasks()  # type: ignore[union-attr]
    group_requests = [GroupRequest(group_id=i, task=tasks[i], n_samples_per_prompt=GROUP, version=0) for i in range(episodes // GROUP)]
    watched, worker = EpisodeWorker(WatchedEngine(engine, record, at_once), agent, settings), EpisodeWorker(engine, agent, settings)
    await watched.start()
    await worker.start()

    async def ours() -> Tokens:
        groups = await asyncio.gather(*map(worker.run_group, group_requests))
        episodes = [trajectory for _, group in groups for trajectory in group.trajectories]
        return {f"{t.trajectory_id}-{n}": turn.token_ids.tolist() for t in episodes for n, turn in enumerate(t.turns)}

    await asyncio.gather(*map(watched.run_group, group_requests))
    bare = Bare(other)
    result, expected = Result([], [], 0), None
    for _ in range(repetitions):
        for speeds, is_bare in ((result.ours, False), (result.bare, True)):
            send = await bare.replay(requests) if is_bare else ours
            await forget(other if is_bare else engine)
            begin = time.perf_counter()
            tokens = await send()
            seconds = time.perf_counter() - begin
            expected = expected or tokens
            if tokens != expected:
                raise RuntimeError("the engine did not sample the same tokens")
            speeds.append(sum(map(len, tokens.values())) / seconds)
    return Result(result.ours, result.bare, sum(map(len, (expected or {}).values())))


def random_model(folder: Path) -> str:
    """The bundled model with random weights, which talks as long as it may."""
    prepare_environment("cpu")
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    shutil.copytree(tiny_model_path(), folder, dirs_exist_ok=True)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    return str(folder)


async def measure(model: str, layout: Layout, options: argparse.Namespace) -> None:
    """Start two engines twice, each first once, and print the lines of the table."""
    settings = EngineSettings(model=ModelConfig(model=model), engine=EngineConfig(engine_core=layout))
    workloads = [workload for workload in WORKLOADS if options.only in workload.name]
    results: list[list[Result]] = [[] for _ in workloads]
    for is_ours_first in (True, False):
        engines = VllmEngine(settings), VllmEngine(settings)
        for engine in engines:
            await engine.start()
        ours, bare = engines if is_ours_first else engines[::-1]
        for workload, found in zip(workloads, results, strict=True):
            found.append(await compare(ours, bare, workload, episodes=options.episodes, repetitions=options.repetitions))
        for engine in engines:
            await engine.close()
    for workload, (first, second) in zip(workloads, results, strict=True):
        print(row(workload, layout, Result(first.ours + second.ours, first.bare + second.bare, first.tokens)), flush=True)


def row(workload: Workload, layout: str, result: Result) -> str:
    """One line of the table: medians; shares are medians over repetitions, with their range."""
    shares = sorted(ours / bare for ours, bare in zip(result.ours, result.bare, strict=True))
    speeds = [f"{statistics.median(speeds):,.0f}" for speeds in (result.ours, result.bare)]
    return f"| {' | '.join([layout, workload.name, f'{result.tokens:,}', *speeds, _spread(shares)])} |"


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=256, help="all at once, in groups of 8")
    parser.add_argument("--repetitions", type=int, default=5, help="with each engine first")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=LAYOUTS)
    parser.add_argument("--only", default="", help="part of the name of a workload: only those")
    options = parser.parse_args()
    print(f"{options.episodes} episodes at once, twice {options.repetitions} repetitions; load {os.getloadavg()[0]:.1f}")
    print("| core of vLLM | workload | tokens | rollout path, tokens/s | bare, tokens/s | share |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for layout in options.layouts:
            asyncio.run(measure(random_model(Path(folder)), layout, options))
    print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()

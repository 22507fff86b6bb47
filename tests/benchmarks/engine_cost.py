"""CPU time of a step's episodes with each engine, for the bundled model: what the choice of ``--engine auto`` rests on.

    python -m tests.benchmarks.engine_cost [--repetitions N]

A rollout worker with one engine plays 16 groups of 8 episodes, again and again; the engines take turns. Before every repetition each
loads weights as it does between two steps, so no key or value of the last one is found. CPU time of the process is what is compared,
because other programs on the machine change it little; there is one thread for arithmetic.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agentrl.assets import tiny_model_path
from agentrl.config.sections import changed
from agentrl.core.protocols import Engine, WeightUpdate
from agentrl.core.types import GroupRequest
from agentrl.engine.plan import EngineConfig
from agentrl.engine.settings import EngineSettings, prepare_environment
from agentrl.rollout.episode_plan import EpisodePlan
from agentrl.rollout.plan import ModelConfig
from agentrl.rollout.worker import EpisodeWorker
from agentrl.suites.load import load_agent
from tests.e2e.runs import ENVS

GROUPS, SAMPLES = 16, 8


@dataclass(frozen=True)
class Workload:
    """What is played: a name for the table, the environment, and the most tokens of an answer."""

    name: str
    agent: str
    new_tokens: int


RULES, TALK = Path(__file__).with_name("_rules.py"), Path(__file__).with_name("_environments.py")
WORKLOADS = (
    Workload("one turn, 11 tokens of prompt", str(ENVS / "arithmetic.py"), 8),
    Workload("one turn, 176 tokens of prompt", f"{RULES}:WithRules", 8),
    Workload("two turns with a tool", str(ENVS / "calculator.py"), 32),
    Workload("four turns", f"{TALK}:Talk", 16),
    Workload("sixteen turns of a game", str(ENVS / "frozen_lake.py"), 8),
)


async def engines() -> dict[str, Engine]:
    """Start one of each kind."""
    from agentrl.engine.transformers_engine import TransformersEngine
    from agentrl.engine.vllm_engine import VllmEngine

    started: dict[str, Engine] = {}
    for kind in (VllmEngine, TransformersEngine):
        engine = kind(EngineSettings(model=ModelConfig(model=str(tiny_model_path())), engine=EngineConfig()))
        await engine.start()
        started[kind.__name__] = engine
    return started


async def measure(
    workload: Workload, started: dict[str, Engine], versions: itertools.count[int], repetitions: int
) -> dict[str, list[float]]:
    """Return CPU seconds of each repetition by engine, the first one left out."""
    agent = load_agent(workload.agent)
    settings = changed(EpisodePlan(), model=str(tiny_model_path()), max_new_tokens=workload.new_tokens, max_turns=16)
    tasks = list(itertools.islice(itertools.cycle(agent.load().tasks()), GROUPS))  # type: ignore[union-attr]
    requests = [GroupRequest(group_id=i, task=task, n_samples_per_prompt=SAMPLES, version=0) for i, task in enumerate(tasks)]
    workers = {name: EpisodeWorker(engine, agent, settings) for name, engine in started.items()}
    found: dict[str, list[float]] = {name: [] for name in workers}
    for worker in workers.values():
        await worker.start()
    for repetition in range(repetitions + 1):
        for name, worker in workers.items():
            await worker.load_weights(weights(next(versions)))
            begin = time.process_time()
            await asyncio.gather(*map(worker.run_group, requests))
            if repetition:
                found[name].append(time.process_time() - begin)
    return found


def weights(version: int) -> WeightUpdate:
    """The weights that the engines have, as another version."""
    return WeightUpdate(version=version, transport="shm", payload={"update": {"path": str(tiny_model_path() / "model.safetensors")}})


def row(workload: Workload, found: dict[str, list[float]]) -> str:
    """One line of the table: medians, and the ratio of each repetition's pair, with its range."""
    ours, theirs = found["TransformersEngine"], found["VllmEngine"]
    ratios = sorted(a / b for a, b in zip(theirs, ours, strict=True))
    cells = [f"{statistics.median(each) * 1e3:.0f}" for each in (theirs, ours)]
    return f"| {workload.name} | {' | '.join(cells)} | {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) |"


async def compare(repetitions: int, workloads: Sequence[Workload] = WORKLOADS) -> None:
    """Print the table."""
    started, versions = await engines(), itertools.count(1)
    print("| workload | vLLM, ms | transformers, ms | vLLM over transformers |")
    print("|---|---|---|---|")
    for workload in workloads:
        print(row(workload, await measure(workload, started, versions, repetitions)), flush=True)
    for engine in started.values():
        await engine.close()


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=7)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    prepare_environment("cpu")
    print(f"CPU time of {GROUPS * SAMPLES} episodes, {options.repetitions} repetitions; load {os.getloadavg()[0]:.1f}")
    asyncio.run(compare(options.repetitions))


if __name__ == "__main__":
    main()

"""A long run on a scripted engine, in a process of its own: prints what it holds, step by step.

Everything of the driver and of the rollout worker is the real thing: task source, environment, chat codec, episodes, pool and
supervision, slots, queue, ledger, records, metrics, TensorBoard, checkpoints. Only the sampling and the gradient are not.

    python -m tests.faults.long_run DIRECTORY STEPS
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import threading
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from agentrl.config.mapping import to_json
from agentrl.core.callbacks import Event, StepEnd
from agentrl.core.manifest import FileEntry, flush_files
from agentrl.core.protocols import TrainResult, WeightUpdate
from agentrl.core.types import Group
from agentrl.flow.driver import train
from agentrl.flow.pool import RolloutPool
from agentrl.flow.saving import Checkpoints
from agentrl.flow.worker_slots import Supervision
from agentrl.resolve.commands import load_config
from agentrl.resolve.parts import episode_plan, flow_plan, track_plan
from agentrl.rollout.tasks import open_tasks
from agentrl.rollout.worker import EpisodeWorker
from agentrl.suites.load import load_agent
from agentrl.track.tracker import RunTracker, open_tracker
from tests.scripted_engine import ScriptedEngine
from tests.unit.rollout.templates import tokenizer

ENGINES, ENV_THREADS, LOOP_THREADS = 2, 4, 2
SIZES = ("--groups-per-step", "2", "--n-samples-per-prompt", "2", "--max-turns", "2", "--max-new-tokens", "12")
SIZES += ("--record", "all", "--save-every", "20", "--env-threads", str(ENV_THREADS))
POOLS = {"agentrl-env": ENGINES * ENV_THREADS, "asyncio": LOOP_THREADS}
"""The pools of threads by name, with all the threads they may have: a pool starts one when it finds the others busy, however late."""

ENV = """
from agentrl import AgentInstance, StepResult, Task

class Two(AgentInstance):
    @classmethod
    def tasks(cls):
        return [Task(f"Say {i}.", label=i) for i in range(100)]

    def step(self, state):
        if state.label % 10 == 3:
            raise ValueError("this one always fails")
        return StepResult(float(len(state.action_text) % 3), f"You said {state.action_text}.", terminated=state.turn == 1)
"""


class Learner:
    """Looks at every group, and keeps nothing."""

    async def train(self, step: int, groups: Sequence[Group]) -> TrainResult:
        await asyncio.sleep(0)
        tokens = sum(len(turn.token_ids) for group in groups for trajectory in group.trajectories for turn in trajectory.turns)
        return TrainResult(metrics={"loss/policy": 1.0 / (1 + tokens), "mismatch/max": 0.0}, seconds=0.001)

    async def export_weights(self, version: int) -> WeightUpdate:
        return WeightUpdate(version=version, transport="scripted")

    async def save_checkpoint(self, path: str, step: int) -> None:
        await asyncio.to_thread(Path(path, "state").write_bytes, bytes(10_000))

    async def flush_checkpoint(self, path: str) -> dict[str, FileEntry]:
        return await asyncio.to_thread(flush_files, Path(path), ["state"])


class Watch:
    """Passes everything on to the tracker, and looks at this process after each step."""

    def __init__(self, tracker: RunTracker) -> None:
        self.on_stage = tracker.on_stage
        self._tracker, self._process = tracker, psutil.Process()
        self.rows: list[tuple[int, int, int, int]] = []
        self.pools: Counter[str] = Counter()

    async def notify(self, event: Event) -> None:
        await self._tracker.notify(event)
        if not isinstance(event, StepEnd):
            return
        tasks, pools = len(asyncio.all_tasks()), pooled()
        self.pools |= pools
        threads = self._process.num_threads() - pools.total()  # also those that Python knows nothing of
        self.rows.append((self._process.memory_info().rss, self._process.num_fds(), tasks, threads))


def pooled() -> Counter[str]:
    """How many threads each of the pools has."""
    names = (thread.name.partition("_")[0] for thread in threading.enumerate())
    return Counter(name for name in names if name in POOLS)


async def main(folder: Path, steps: int) -> None:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(LOOP_THREADS, thread_name_prefix="asyncio"))
    tokenizer("chatml").save_pretrained(folder / "model")
    (folder / "model" / "config.json").write_text('{"model_type": "llama", "max_position_embeddings": 512}')
    (folder / "env.py").write_text(ENV)
    words = ["--agent", str(folder / "env.py"), "--run-dir", str(folder / "run"), "--num-steps", str(steps), "--async"]
    config = load_config([*words, *SIZES, "--model", str(folder / "model")])
    agent = load_agent(config.run.agent)

    async def worker() -> EpisodeWorker:
        engine = ScriptedEngine(requests=deque(maxlen=10), updates=deque(maxlen=10))  # type: ignore[arg-type]
        made = EpisodeWorker(engine, agent, episode_plan(config).with_model(config.model.model))
        await made.start()
        return made

    async def respawn(name: str) -> EpisodeWorker:
        return await worker()

    learner = Learner()
    tracker = open_tracker(track_plan(config), folder / "run", title="long")
    watch = Watch(tracker)
    pool = RolloutPool({f"engine-{i}": await worker() for i in range(ENGINES)}, Supervision(respawn=respawn, check_every_s=0.2))
    result = await train(
        settings=flow_plan(config),
        pool=pool,
        learner=learner,  # type: ignore[arg-type]
        tasks=open_tasks(config.data, agent, seed=config.run.seed),
        observer=watch,  # type: ignore[arg-type]
        keep=flow_plan(config).group_filter(),
        checkpoints=Checkpoints(folder / "run", learner, every=20, num_steps=steps, keep=2, config=to_json(config)),  # type: ignore[arg-type]
    )
    await pool.close()
    await tracker.finish(ledger=result.counts.metrics())
    gc.collect()
    seen = {"rows": watch.rows, "pools": {name: (watch.pools[name], most) for name, most in POOLS.items()}}
    print(json.dumps({"steps": result.steps, "seconds": result.seconds, "ledger": result.counts.metrics(), **seen}))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))

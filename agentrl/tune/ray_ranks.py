"""The ranks of a run as actors of a Ray cluster: each runs what a process that torchrun had started would run."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

from agentrl.cluster.joining import FLAG, all_have
from agentrl.cluster.plan import RunConfig
from agentrl.cluster.ray_cluster import RayCluster
from agentrl.core.settings import listed
from agentrl.resolve.ranks import LAUNCHER
from agentrl.resolve.tune import TunePlan
from agentrl.tune.follow import Stop
from agentrl.tune.launch import rank_environment

Work: TypeAlias = Callable[[TunePlan, Stop | None], Any]

POLL_S = 0.2
"""Seconds between two looks at what the first rank said."""


class ClusterRank:
    """One rank, in a process of the cluster on the machine with the address `host`.

    Args:
        work: Trains as a plan says, until it is done or asked to stop.
        plan: The run.
        words: The command.
        folder: Folder that its relative paths begin in.
    """

    def __init__(self, work: Work, plan: TunePlan, words: Sequence[str], folder: str, host: str) -> None:
        del host
        self._work, self._plan, self._words, self._folder = work, plan, words, folder
        self._stop, self._said = Stop(), io.StringIO()

    def start(self, rank: int, world_size: int, port: int, host: str, place: tuple[int, int]) -> None:
        """Be this rank of so many, which meet at a port of rank 0; `place` is that among the ranks of this machine."""
        os.chdir(self._folder)
        sys.argv[:] = self._words
        # The driver holds the directory of the run, and is no parent of this process.
        os.environ.update({**rank_environment(rank, world_size, place, (host, port)), LAUNCHER: ""})
        sys.stdout = sys.stderr = self._said  # all ranks write the same lines; the driver takes those of the first

    def run(self) -> None:
        """Train; on return everything is saved."""
        self._work(self._plan, self._stop)

    def ask_stop(self) -> None:
        """Ask for an early end."""
        self._stop.asked = True

    def said(self) -> str:
        """Return what the rank wrote since the last call."""
        text = self._said.getvalue()
        self._said.truncate(self._said.seek(0))
        return text


def run_on_cluster(work: Work, plan: TunePlan, stop: Stop | None) -> None:
    """Run `work` of a plan on its ranks as actors; a signal to this process, or `stop`, asks all of them for an early end.

    Raises:
        AgentRLError: If the cluster cannot be had, or a rank failed.
    """
    # A thread of its own, because a notebook runs an event loop on this one, where signals arrive.
    with (stop or Stop()).on_signals() as asked, ThreadPoolExecutor(1) as thread:
        thread.submit(asyncio.run, _run(work, plan, asked)).result()


async def _run(work: Work, plan: TunePlan, stop: Stop) -> None:
    own, size, device = plan.settings.run, plan.ranks.num_ranks, plan.ranks.device
    cluster = RayCluster(RunConfig(device=device, ray_address=own.ray_address, debug=own.debug), environment(plan))
    gpus, bundles = float(device == "cuda"), range(size)
    learner: Any = None
    try:
        await cluster.connect(size)
        await cluster.reserve(bundles, [{"CPU": 1.0, **({"GPU": gpus} if gpus else {})}] * size)
        learner = cluster.ranks(bundles, gpus, ClusterRank, lambda rank: (work, plan, sys.argv, os.getcwd()))
        if not cluster.private:
            ranks = {f"learner-{rank}": actor for rank, actor in enumerate(learner.actors)}
            for name, place, path in shared_paths(plan):
                await all_have(ranks, name, place, path, "Name a path that all machines share.")
        await learner.start()
        await _followed(learner, stop)
    finally:
        if await cluster.connected():
            await asyncio.to_thread(cluster.stop, learner.actors if learner else ())


async def _followed(learner: Any, stop: Stop) -> None:
    """Wait for the ranks, say what the first one says, and pass a request to stop on to all."""
    running, is_asked = asyncio.ensure_future(learner.every("run")), False
    while not running.done():
        await asyncio.wait([running], timeout=POLL_S)
        with contextlib.suppress(Exception):  # it is gone, which `running` tells
            sys.stdout.write(await learner.actors[0].call_beside.remote("said"))
            sys.stdout.flush()
        if stop.asked and not is_asked:
            is_asked = True
            for actor in learner.actors:
                actor.call_beside.remote("ask_stop")
    await running


def shared_paths(plan: TunePlan) -> list[tuple[str, str, str]]:
    """Return the paths that every rank reads or writes, each behind its flag and the value of that."""
    data, inputs = plan.settings.data, plan.inputs
    named = [("--run-dir", str(plan.run_dir)), (FLAG, os.getcwd()), *inputs.models.items(), ("--chat-template", inputs.chat_template)]
    named += [("--data", place) for place in (*listed(data.data), *listed(data.eval_data))]
    found = [(name, place, Path(place).expanduser().absolute()) for name, place in named if place]
    return [(name, place, str(path)) for name, place, path in found if path.exists()]


def environment(plan: TunePlan) -> dict[str, str]:
    """Return the environment variables of the ranks; a rank has as many threads as a process that `agentrl.tune.launch` starts."""
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if plan.ranks.device == "cpu" else {}
    threads = os.environ.get("OMP_NUM_THREADS", "1" if plan.ranks.num_ranks > 1 else str(os.cpu_count() or 1))
    return {"DS_ACCELERATOR": plan.ranks.device, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": threads, **hidden}

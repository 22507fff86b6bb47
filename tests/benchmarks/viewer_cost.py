"""Cost of looking: what the learner's figures of recorded tokens take of a training step, and what an open page takes of a core.

    python -m tests.benchmarks.viewer_cost [annotations] [page] [training] [--steps N] [--pairs N] [--record sample|all]

``annotations``: one learner trains the bundled model, whose steps are as short as any, with and without annotations in turns, on the same
groups; CPU time is compared, because other programs on the machine do not count in it. ``page``: a run of which a step is written every
second is shown by ``agentrl view`` and asked for as an open page does; what the server takes of a core bounds what training can lose.
``training``: pairs of equal training runs, one without annotations and page, one with both, in alternating order; the time of a step by the
clock is compared, so that the machine should be idle. A pair of runs of 40 steps takes about 40 s on two cores.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import psutil

from agentrl.assets import tiny_model_path
from agentrl.core.types import FinishReason, Group, Status, Task, Trajectory, Turn, floats, ints
from agentrl.learner.learner import LearnerRank
from tests.benchmarks._viewer_training import training_cost
from tests.forks import end_all
from tests.learner_support import CollectingSender, make_settings
from tests.run_files import MadeRun

GROUPS, MEMBERS, TURNS, TOKENS, PROMPT = 8, 8, 2, 64, 48
SECONDS = 30.0


def some_groups(seed: int, record: int) -> tuple[Group, ...]:
    """64 episodes of 128 sampled tokens."""
    rng = np.random.default_rng(seed)

    def turn(number: int) -> Turn:
        return Turn(
            prompt_ids=ints(rng.integers(5, 200, PROMPT).tolist()),
            token_ids=ints(rng.integers(5, 200, TOKENS).tolist()),
            logprobs=floats((-rng.random(TOKENS) * 5).tolist()),
            versions=ints([0] * TOKENS),
            finish_reason=FinishReason.STOP,
            number=number,
        )

    def trajectory(group: int, member: int) -> Trajectory:
        name, turns = f"{group}-{member}", tuple(map(turn, range(TURNS)))
        reward = float(rng.random())
        return Trajectory(trajectory_id=name, episode_id=name, group_id=group, turns=turns, status=Status.FINISHED, reward=reward)

    return tuple(
        Group(group_id=group, task=Task("x"), trajectories=tuple(trajectory(group, member) for member in range(MEMBERS)), record=record)
        for group in range(GROUPS)
    )


def annotation_cost(steps: int, recorded: int, folder: Path) -> tuple[float, float]:
    """Share of a step's CPU time that annotations add, by pairs of steps and by the phase's own clock."""
    settings = make_settings(str(tiny_model_path()), learner={"micro_batch_tokens": 4096})
    off, on = settings, replace(settings, annotations=folder / "annotations.jsonl")
    learner = LearnerRank(settings, CollectingSender())
    learner.start(0, 1, 0)
    ratios, phases = [], []
    for step in range(steps):
        groups, seconds = some_groups(step, recorded), {}
        for kind in (off, on) if step % 2 else (on, off):
            learner._started.settings = kind
            begin, wall = time.process_time(), time.perf_counter()
            metrics = learner.train(step, *groups).metrics
            seconds[kind is on] = time.process_time() - begin
            if kind is on:
                phases.append(metrics["time/annotate_s"] / (time.perf_counter() - wall))
        if step:  # the first step also allocates the optimizer
            ratios.append(seconds[True] / seconds[False] - 1.0)
    learner.close()
    return statistics.median(ratios), statistics.median(phases)


def page_cost(folder: Path) -> tuple[float, float]:
    """Share of a core that the server takes while a page follows a run, and the longest time until a new step was seen, in seconds."""
    made = MadeRun(folder / "run", num_steps=1000)
    for step in range(1, 20):
        made.step(step, [made.group(step, members=MEMBERS, turns=TURNS, tokens=TOKENS) for _ in range(4)], annotated=False)
    words = [sys.executable, "-m", "agentrl", "view", str(folder), "--no-browser"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        client = httpx.Client(base_url=server.stdout.readline().strip(), timeout=30)
        for path in ("api/runs", "api/run/run", "api/run/run/metrics", "api/run/run/episodes"):
            client.get(path)
        process, step, late = psutil.Process(server.pid), 20, 0.0
        before, begin = process.cpu_times(), time.monotonic()
        while time.monotonic() - begin < SECONDS:
            made.step(step, [made.group(step, members=MEMBERS, turns=TURNS, tokens=TOKENS) for _ in range(4)], annotated=False)
            written = time.monotonic()
            while client.get("api/run/run/changes").json()["steps"] < step:
                time.sleep(0.1)
            late = max(late, time.monotonic() - written)
            for path in ("api/run/run", "api/run/run/metrics?points=1000"):  # as the page does when a run has grown
                client.get(path)
            step += 1
            time.sleep(max(0.0, 1.0 - (time.monotonic() - written)))
        after = process.cpu_times()
        server.terminate()
    return (after.user + after.system - before.user - before.system) / (time.monotonic() - begin), late


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["annotations", "page"], choices=["annotations", "page", "training"])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--record", choices=["sample", "all"], default="sample", help="of the training runs")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for recorded, name in ((1, "--record sample"), (MEMBERS, "--record all")) if "annotations" in args.parts else ():
            pairs, phase = annotation_cost(args.steps, recorded, Path(folder))
            print(f"annotations, {name}: {100 * pairs:+.2f}% of a step's CPU time; {100 * phase:.2f}% of it by the phase's clock")
        if "page" in args.parts:
            share, late = page_cost(Path(folder))
            print(f"an open page on a run with a step each second: {100 * share:.1f}% of a core; new steps seen within {late:.2f} s")
        if "training" in args.parts:
            ratios = sorted(training_cost(args.pairs, args.steps, args.record, Path(folder) / "training"))
            found = f"{statistics.median(ratios):.4f} ({ratios[0]:.4f} to {ratios[-1]:.4f} in {len(ratios)} pairs)"
            print(f"time of a training step with --record {args.record}, annotations and a live page, to that without: {found}")


if __name__ == "__main__":
    try:
        main()
    finally:
        end_all()

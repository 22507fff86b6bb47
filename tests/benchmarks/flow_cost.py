"""What the flow itself costs: driver CPU per group, with workers and a learner that only wait, on virtual time.

python -m tests.benchmarks.flow_cost
"""

from __future__ import annotations

import random
import time

from agentrl.core.types import MemberSummary, Ticket
from agentrl.flow import FlowSettings
from tests.unit.flow.fakes import Scene, ScriptedLearner, ScriptedWorker, member


def cost(*, num_workers: int, groups_per_step: int, num_samples: int = 8, staleness: int = 1) -> float:
    """Microseconds of CPU per submitted group, the scripted parts and the event loop included."""
    rng = random.Random(0)
    members: tuple[MemberSummary, ...] = tuple(
        member(float(i % 2), metrics={"guesses": 2.0}, timings={"env_s": 0.1, "generate_s": 0.2, "total_s": 0.3})
        for i in range(num_samples)
    )

    def duration(ticket: Ticket) -> float:
        return rng.lognormvariate(0.0, 1.0)

    num_steps = max(4, 5000 // groups_per_step)
    settings = FlowSettings(num_steps=num_steps, groups_per_step=groups_per_step, num_samples=num_samples, max_staleness=staleness)
    scene = Scene(
        settings,
        workers=[ScriptedWorker(duration=duration, outcome=lambda ticket: members, load_s=0.01) for _ in range(num_workers)],
        learner=ScriptedLearner(train_s=lambda step: 0.5),
    )
    begin = time.process_time()
    counts = scene.run().counts
    return (time.process_time() - begin) / counts.submitted * 1e6


def main() -> None:
    """Print one line per size."""
    for num_workers, groups_per_step in [(1, 16), (2, 64), (16, 512), (64, 1024), (1024, 6250)]:
        episodes = 2 * groups_per_step * 8
        micros = cost(num_workers=num_workers, groups_per_step=groups_per_step)
        size = f"{num_workers:5d} engines, {groups_per_step:5d} groups a step, {episodes:6d} live episodes"
        print(f"{size}: {micros:4.0f} us of driver CPU per group")


if __name__ == "__main__":
    main()

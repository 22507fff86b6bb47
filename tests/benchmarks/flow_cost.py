"""What the flow itself costs: driver CPU per group, with workers and a learner that only wait, on virtual time; and a run of
1,024 engines with 100,000 episodes at once, whose staleness and accounts are checked.

python -m tests.benchmarks.flow_cost
"""

from __future__ import annotations

import random
import time

from agentrl.core.process import collect_rarely
from agentrl.core.summaries import MemberSummary
from agentrl.core.types import Ticket
from agentrl.profile.simulated_engine import EngineModel
from agentrl.profile.simulation import LearnerModel, Plan, constant, episodes_of, lognormal, simulate
from tests.unit.flow.fakes import Scene, ScriptedLearner, ScriptedWorker, flow_of, member


def cost(*, num_workers: int, groups_per_step: int, n_samples_per_prompt: int = 8, staleness: int = 1, num_groups: int = 5000) -> float:
    """Microseconds of CPU per submitted group, the scripted parts and the event loop included."""
    collect_rarely()  # as the driver of a run does
    rng = random.Random(0)
    members: tuple[MemberSummary, ...] = tuple(
        member(float(i % 2), metrics={"guesses": 2.0}, timings={"env_s": 0.1, "generate_s": 0.2, "total_s": 0.3})
        for i in range(n_samples_per_prompt)
    )

    def duration(ticket: Ticket) -> float:
        return rng.lognormvariate(0.0, 1.0)

    num_steps = max(4, num_groups // groups_per_step)
    settings = flow_of(
        num_steps=num_steps, groups_per_step=groups_per_step, n_samples_per_prompt=n_samples_per_prompt, max_staleness=staleness
    )
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
    print(crowd())


def crowd(*, num_engines: int = 1024, groups_per_step: int = 6250) -> str:
    """A simulated run, engines that slow down with their sequences included; the flow raises if a group is too old or lost."""
    settings = flow_of(num_steps=4, groups_per_step=groups_per_step, n_samples_per_prompt=8, max_staleness=1, stall_timeout_s=1e9)
    plan = Plan(
        settings=settings,
        num_engines=num_engines,
        engine=EngineModel(token_s=0.01, token_s_per_sequence=0.0001, pause_s=constant(0.5)),
        learner=LearnerModel(step_s=5.0),
        episodes=episodes_of(tokens=lognormal(100, 0.7), env_s=lognormal(0.3, 1.0), turns=2),
        pass_rate=0.9,
    )
    begin = time.process_time()
    run = simulate(plan)
    seconds, counts = time.process_time() - begin, run.result.counts
    filtered = sum(counts.filtered.values())
    assert run.max_staleness <= settings.max_staleness
    assert counts.submitted == counts.trained + filtered == counts.submitted - counts.in_flight
    return (
        f"{num_engines} engines, {run.peak_episodes} episodes at once, {run.result.seconds:.0f} s simulated in {seconds:.0f} s of CPU: "
        f"staleness at most {run.max_staleness:.0f}; {counts.submitted} groups submitted = {counts.trained} trained + {filtered} filtered "
        f"+ {counts.in_flight} in flight"
    )


if __name__ == "__main__":
    main()

"""What the flow itself costs: driver CPU per group, with workers and a learner that only wait, on virtual time; and a run of
1,024 engines with 100,000 episodes at once, whose staleness and accounts are checked.

python -m tests.benchmarks.flow_cost [sizes]

With ``sizes`` it simulates runs of 1 to 4,096 engines with prompts, caches that fill up, and publications that grow with the engines.
"""

from __future__ import annotations

import pickle
import random
import sys
import time

from agentrl.core.process import collect_rarely
from agentrl.core.summaries import GroupSummary, MemberSummary
from agentrl.core.types import GroupRequest
from tests.simulated_engine import EngineModel
from tests.simulation import LearnerModel, Plan, Simulated, constant, episodes_of, lognormal, simulate
from tests.unit.flow.fakes import Scene, ScriptedLearner, ScriptedWorker, flow_of, member


def cost(*, num_workers: int, groups_per_step: int, n_samples_per_prompt: int = 8, staleness: int = 1, num_groups: int = 5000) -> float:
    """Microseconds of CPU per submitted group, the scripted parts and the event loop included."""
    collect_rarely()  # as the driver of a run does
    rng = random.Random(0)
    members: tuple[MemberSummary, ...] = tuple(
        member(float(i % 2), metrics={"guesses": 2.0}, timings={"env_s": 0.1, "generate_s": 0.2, "total_s": 0.3})
        for i in range(n_samples_per_prompt)
    )

    def duration(group_request: GroupRequest) -> float:
        return rng.lognormvariate(0.0, 1.0)

    num_steps = max(4, num_groups // groups_per_step)
    settings = flow_of(
        num_steps=num_steps, groups_per_step=groups_per_step, n_samples_per_prompt=n_samples_per_prompt, max_staleness=staleness
    )
    scene = Scene(
        settings,
        workers=[ScriptedWorker(duration=duration, outcome=lambda group_request: members, load_s=0.01) for _ in range(num_workers)],
        learner=ScriptedLearner(train_s=lambda step: 0.5),
    )
    begin = time.process_time()
    counts = scene.run().counts
    return (time.process_time() - begin) / counts.submitted * 1e6


BOUND_US = 200.0
"""Microseconds per group that the driver may take, on a machine on which `plain_python_us` is `REFERENCE_US`."""

REFERENCE_US = 3400.0
"""Microseconds of `plain_python_us` on the idle 2-core CPU of docs/profile.md."""


def plain_python_us() -> float:
    """Processor time of a fixed piece of plain Python, the least of five, in microseconds: the speed of this machine at this moment."""

    def once() -> float:
        begin = time.process_time()
        if sum({i % 97: str(i)}[i % 97].isdigit() for i in range(20_000)) != 20_000:
            raise AssertionError("20,000 texts of digits")
        return time.process_time() - begin

    return 1e6 * min(once() for _ in range(5))


def cheapest(*, num_workers: int, groups_per_step: int, num_groups: int = 5000, repetitions: int = 3) -> float:
    """Return the least `cost` of some repetitions, in microseconds of the machine with `REFERENCE_US`."""
    return min(
        cost(num_workers=num_workers, groups_per_step=groups_per_step, num_groups=num_groups) * REFERENCE_US / plain_python_us()
        for _ in range(repetitions)
    )


def unpickling_us(n_samples_per_prompt: int = 8, repetitions: int = 2000) -> float:
    """Microseconds in which the driver unpickles the summary of one group, the least of five measurements; not part of `cost`."""
    members = tuple(
        member(float(i % 2), episode_id=f"{i}", metrics={"guesses": 2.0}, timings={"env_s": i / 7, "generate_s": i / 3, "total_s": i / 2})
        for i in range(n_samples_per_prompt)
    )
    summary = pickle.dumps(GroupSummary(group_id=0, members=members, versions=(0, 0), seconds=1.0), protocol=5)

    def once() -> float:
        begin = time.process_time()
        for _ in range(repetitions):
            pickle.loads(summary)
        return (time.process_time() - begin) / repetitions

    return 1e6 * min(once() for _ in range(5))


SIZES = (1, 16, 256, 1024, 4096)
PAUSE_S, PAUSE_S_PER_ENGINE = 0.5, 0.002
"""Seconds of a publication, and those that every engine adds where the driver speaks to one after the other; both assumed."""


def sized(num_engines: int, *, per_engine_s: float = PAUSE_S_PER_ENGINE, num_steps: int = 4) -> tuple[Simulated, float]:
    """Return a simulated run of so many engines, with 4 groups of 8 in a step for each, and the seconds of CPU that it took.

    Prompts of about 500 tokens are computed at 20,000 tokens/s, and a cache of 24,000 tokens holds a part of an engine's episodes.
    """
    settings = flow_of(num_steps=num_steps, groups_per_step=4 * num_engines, n_samples_per_prompt=8, max_staleness=1, stall_timeout_s=1e9)
    engine = EngineModel(
        token_s=0.01,
        token_s_per_sequence=0.0001,
        prefill_token_s=5e-5,
        kv_tokens=24_000,
        pause_s=constant(PAUSE_S),
        pause_s_per_engine=per_engine_s,
    )
    episodes = episodes_of(tokens=lognormal(150, 0.7), env_s=lognormal(0.3, 1.0), turns=2, prompt=lognormal(500, 0.3))
    plan = Plan(settings=settings, num_engines=num_engines, engine=engine, learner=LearnerModel(step_s=5.0), episodes=episodes)
    begin = time.process_time()
    return simulate(plan), time.process_time() - begin


def sizes() -> None:
    """Print a row of a table for each number of engines."""
    print("| engines | live episodes | step, s | episodes/s | engines idle or paused | learner idle | CPU of the simulation, s |")
    print("|---|---|---|---|---|---|---|")
    for num_engines in SIZES:
        run, cpu_s = sized(num_engines)
        idle, waits = run.mean("idle/generator"), run.mean("idle/learner")
        speed = f"{run.step_s:.1f} | {run.episodes_per_s:,.0f} | {idle:.0%} | {waits:.0%}"
        print(f"| {num_engines:,} | {run.peak_episodes:,} | {speed} | {cpu_s:.0f} |", flush=True)


def main() -> None:
    """Print one line per size, and whether the largest keeps its bound."""
    if sys.argv[1:] == ["sizes"]:
        sizes()
        return
    for num_workers, groups_per_step in [(1, 16), (2, 64), (16, 512), (64, 1024), (1024, 6250)]:
        episodes = 2 * groups_per_step * 8
        micros = cost(num_workers=num_workers, groups_per_step=groups_per_step)
        size = f"{num_workers:5d} engines, {groups_per_step:5d} groups a step, {episodes:6d} live episodes"
        print(f"{size}: {micros:4.0f} us of driver CPU per group")
    scaled = micros * REFERENCE_US / plain_python_us()
    verdict = "within" if scaled <= BOUND_US else "above"
    print(f"the last is {scaled:.0f} us at the speed of the reference, {verdict} the bound of {BOUND_US:.0f} us")
    print(f"the summary of a group is unpickled in {unpickling_us():.0f} us, which is not included")
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

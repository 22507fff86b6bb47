"""Predictions for other sizes of a recorded run: its bound, the costs that keep it below, and the best split of devices."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from agentrl.config.sections import changed
from agentrl.profile.recorded import Recorded
from agentrl.profile.simulated_engine import DrawGroup, EpisodeShape
from agentrl.profile.simulation import LearnerModel, Plan, Simulated, none, simulate

STALENESS = (0, 1, 2, 4, 8)
MIN_GAIN = 0.1
"""Throughput that each further step of staleness must bring, as a share, to be recommended: staleness costs reward."""
MAX_SPLITS = 12
SIMULATED_GROUPS = 1200


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A simulated variant of the run."""

    num_engines: int
    num_learners: int
    max_staleness: int  # staleness bound, which is the depth of the queue in steps
    groups_per_step: int
    oversampled_groups: int  # groups started beyond those of a step
    step_s: float
    episodes_per_s: float  # episodes trained on per second
    staleness_mean: float  # staleness of a group's oldest token when it is trained on, in steps
    staleness_max: float  # its maximum
    idle_generator: float  # share of the time in which an engine has nothing to do, or is paused
    idle_learner: float  # share of the time in which the learner does not train


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """Upper bound of the gain from overlap, for the run's own sizes."""

    generate_s: float  # seconds to generate a step's groups when nothing else happens, until the slowest ends
    train_s: float  # seconds to train on them, handing over included
    publish_s: float  # seconds to export and publish
    pipelined_s: float  # seconds per step of engines that never wait for the learner, so that slow groups overlap with later ones

    @property
    def synchronous_s(self) -> float:
        """Seconds per step, one after the other."""
        return self.generate_s + self.train_s + self.publish_s

    @property
    def ideal_s(self) -> float:
        """Seconds per step with generation and training side by side, at best."""
        return max(self.generate_s, self.train_s)

    @property
    def speedup(self) -> float:
        """Upper bound of the gain from overlap: (generation + training) / the longer of the two."""
        return (self.generate_s + self.train_s) / self.ideal_s


@dataclass(frozen=True, slots=True)
class TimeCost:
    """A cause that costs time."""

    name: str  # text for people
    step_s: float  # seconds per step without it
    gain: float  # how much faster steps would follow each other, as a share


def predict(
    recorded: Recorded,
    *,
    num_engines: int | None = None,
    num_learners: int | None = None,
    max_staleness: int | None = None,
    groups_per_step: int | None = None,
    oversample: float | None = None,
    seed: int = 0,
) -> Prediction:
    """Simulate the run with other sizes; what is `None` stays as it was.

    Training is taken to divide evenly over learner ranks, and engines are taken to be alike.
    """
    sizes = {"max_staleness": max_staleness, "groups_per_step": groups_per_step, "oversample": oversample}
    plan = replace(
        recorded.plan,
        settings=changed(recorded.plan.settings, **{name: value for name, value in sizes.items() if value is not None}),
        num_engines=num_engines or recorded.plan.num_engines,
        learner=replace(recorded.plan.learner, ranks=num_learners or recorded.plan.learner.ranks),
        seed=seed,
    )
    simulated = _simulated(plan)
    return Prediction(
        num_engines=plan.num_engines,
        num_learners=plan.learner.ranks,
        max_staleness=plan.settings.max_staleness,
        groups_per_step=plan.settings.flow.groups_per_step,
        oversampled_groups=plan.settings.oversampled_groups,
        step_s=simulated.step_s,
        episodes_per_s=simulated.episodes_per_s,
        staleness_mean=simulated.mean("staleness/mean"),
        staleness_max=simulated.max_staleness,
        idle_generator=simulated.mean("idle/generator"),
        idle_learner=simulated.mean("idle/learner"),
    )


def bound_of(recorded: Recorded) -> Bound:
    """The bound for the run's own sizes, from simulations of its parts."""
    plan = recorded.plan
    alone = _simulated(replace(plan, settings=changed(plan.settings, max_staleness=0)))
    train_s = alone.mean("time/train_s") + plan.learner.overhead_s
    publish_s = alone.mean("publish/seconds") + alone.mean("publish/export_s")
    ahead = changed(plan.settings, max_staleness=max(4, plan.settings.max_staleness))
    # With a learner that takes no time, and a deep queue, engines never wait.
    pipelined_s = _simulated(replace(plan, settings=ahead, learner=LearnerModel(ranks=plan.learner.ranks))).step_s
    generate_s = max(0.0, alone.step_s - train_s - publish_s)
    return Bound(generate_s=generate_s, train_s=train_s, publish_s=publish_s, pipelined_s=pipelined_s)


def time_costs(recorded: Recorded) -> list[TimeCost]:
    """Return the costs of the run, each found by a simulation without it; the largest first. Gains do not add up."""
    plan = recorded.plan
    base_s = _simulated(plan).step_s
    instant = replace(plan.engine, pause_s=none, load_s=none)
    variants: dict[str, Plan] = {
        "episodes of different length (stragglers)": replace(plan, episodes=_levelled(plan.episodes, plan.settings.n_samples_per_prompt)),
        "time outside the engine (environment)": replace(plan, episodes=_without_env(plan.episodes)),
        "training": replace(plan, learner=replace(plan.learner, step_s=0.0, token_s=0.0, overhead_s=0.0)),
        "publication": replace(plan, engine=instant, learner=replace(plan.learner, export_s=none)),
    }
    if plan.learner.overhead_s > 0.0:
        variants["handing groups to the learner"] = replace(plan, learner=replace(plan.learner, overhead_s=0.0))
    if not plan.settings.max_staleness:
        variants["taking turns (synchronous)"] = replace(plan, settings=changed(plan.settings, max_staleness=1))
    if plan.pass_rate < 1.0:
        variants["filtered groups"] = replace(plan, pass_rate=1.0)
    times = {name: _simulated(variant).step_s for name, variant in variants.items()}
    return sorted((TimeCost(name, step_s, base_s / step_s - 1.0) for name, step_s in times.items()), key=lambda cost: -cost.gain)


def staleness_predictions(recorded: Recorded, *, num_engines: int | None = None, num_learners: int | None = None) -> list[Prediction]:
    """The run with several staleness bounds, its own among them."""
    bounds = sorted({*STALENESS, recorded.plan.settings.max_staleness})
    return [predict(recorded, num_engines=num_engines, num_learners=num_learners, max_staleness=bound) for bound in bounds]


def recommended(predictions: Sequence[Prediction]) -> Prediction:
    """The one with the lowest staleness bound beyond which a deeper queue does not pay."""
    chosen, *deeper = sorted(predictions, key=lambda prediction: prediction.max_staleness)
    for prediction in deeper:
        steps = prediction.max_staleness - chosen.max_staleness
        if prediction.episodes_per_s >= chosen.episodes_per_s * (1.0 + MIN_GAIN * steps):
            chosen = prediction
    return chosen


def splits_of(recorded: Recorded, devices: int, *, devices_per_engine: int = 1, max_staleness: int | None = None) -> list[Prediction]:
    """The run with its devices divided otherwise between engines and learner ranks, the fastest first.

    Args:
        recorded: The run.
        devices: To be divided.
        devices_per_engine: What an engine needs; a learner rank needs one.
        max_staleness: Staleness bound to compare at; that of the run by default.

    Returns:
        Every split if there are few, else a selection that is finer around the best; none if there are too few devices.
    """
    most = (devices - 1) // devices_per_engine

    def split(engines: int) -> Prediction:
        learners = devices - engines * devices_per_engine
        return predict(recorded, num_engines=engines, num_learners=learners, max_staleness=max_staleness)

    splits = {engines: split(engines) for engines in _spread(1, most, MAX_SPLITS)}
    # Each split is a whole simulation, so only those around the best are filled in.
    while splits:
        best = max(splits, key=lambda engines: splits[engines].episodes_per_s)
        below = max((engines for engines in splits if engines < best), default=best)
        above = min((engines for engines in splits if engines > best), default=best)
        wanted = {(below + best) // 2, (best + above) // 2} - splits.keys()
        if not wanted or len(splits) > 2 * MAX_SPLITS:
            break
        splits |= {engines: split(engines) for engines in wanted}
    return sorted(splits.values(), key=lambda prediction: -prediction.episodes_per_s)


def driver_us_per_group(recorded: Recorded) -> float:
    """Microseconds of CPU that the flow takes for a group on this machine; the simulated engines are an upper part of it."""
    # Time on the CPU, so that other programs of the machine do not count.
    begin = time.process_time()
    simulated = _simulated(recorded.plan)
    return (time.process_time() - begin) / simulated.result.counts.submitted * 1e6


def _simulated(plan: Plan) -> Simulated:
    settings = plan.settings
    # A deeper queue takes more steps to fill, and those are left out of the figures.
    steps = max(4 * (settings.max_staleness + 2), min(40, SIMULATED_GROUPS // settings.flow.groups_per_step))
    return simulate(replace(plan, settings=changed(settings, num_steps=steps)))


def _spread(first: int, last: int, count: int) -> list[int]:
    """At most so many integers from `first` to `last`, evenly."""
    if last - first < count:
        return list(range(first, last + 1))
    return sorted({round(first + (last - first) * i / (count - 1)) for i in range(count)})


def _without_env(draw: DrawGroup) -> DrawGroup:
    return lambda rng, size: [EpisodeShape(0.0, tuple((tokens, 0.0) for tokens, _ in shape.turns)) for shape in draw(rng, size)]


def _levelled(draw: DrawGroup, size: int, groups: int = 200) -> DrawGroup:
    """All episodes like the average one."""
    source = random.Random(0)
    shapes = [shape for _ in range(groups) for shape in draw(source, size)]
    turns = max(1, round(statistics.fmean(len(shape.turns) for shape in shapes)))
    tokens = statistics.fmean(sum(tokens for tokens, _ in shape.turns) for shape in shapes) / turns
    env_s = statistics.fmean(sum(seconds for _, seconds in shape.turns) for shape in shapes) / turns
    average = EpisodeShape(statistics.fmean(shape.reset_s for shape in shapes), ((tokens, env_s),) * turns)
    return lambda rng, size: [average] * size

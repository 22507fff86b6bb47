"""The resources that a run asks a cluster for: pure arithmetic, declared before anything starts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from agentrl.cluster.plan import FEWER_GPUS
from agentrl.cluster.processes import ClusterPlan
from agentrl.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Resource bundles, and which actor sits in which."""

    bundles: tuple[Mapping[str, float], ...]  # resources of each bundle, in Ray's form
    engine_bundles: tuple[int, ...]  # bundle index of each engine, those of ``--eval-engines`` last
    learner_bundles: tuple[int, ...]  # bundle index of each learner rank
    gpus_per_engine: float  # GPUs (or the share of one) an engine asks for
    gpus_per_rank: float  # GPUs (or the share of one) a learner rank asks for
    scorer_bundles: tuple[int, ...] = ()  # bundle index of each process of a reward model, one model after the other
    gpus_per_scorer: float = 0.0  # GPUs (or the share of one) such a process asks for

    def parts(self) -> list[list[int]]:
        """Return the bundles that are held together: those of the ranks, which talk to one another at every step, then the others."""
        ranks = [bundle for bundle in self.learner_bundles if bundle not in self.engine_bundles]
        return [part for part in (ranks, [bundle for bundle in range(len(self.bundles)) if bundle not in ranks]) if part]

    def by_node(self, nodes: Mapping[int, str]) -> Placement:
        """Return the same with engines and ranks in the order of the machines that their bundles are on; pairs on one bundle stay pairs."""
        order = list(dict.fromkeys(nodes[bundle] for bundle in self.learner_bundles))

        def of(bundle: int) -> int:
            return order.index(nodes[bundle]) if nodes[bundle] in order else len(order)

        return replace(
            self, engine_bundles=tuple(sorted(self.engine_bundles, key=of)), learner_bundles=tuple(sorted(self.learner_bundles, key=of))
        )


def place(plan: ClusterPlan, *, gpus: int) -> Placement:
    """Place engines, learner ranks and reward models on a cluster with `gpus` GPUs; without any, everything runs on CPUs.

    Engines and ranks are apart, each with GPUs of its own. With ``--colocate`` every GPU of an engine is that of a learner rank, which
    holds it; the engine holds none and is told which they are. A process of a reward model has what ``--reward-model-gpus`` says, wherever
    there is room.

    Raises:
        ConfigError: If there are some GPUs, but too few.
    """
    engines, ranks, parallel = plan.num_engines, plan.num_ranks, plan.engine.engine.gpus_per_engine
    shared = gpus > 0 and ranks > 0 and plan.weights.colocate
    if gpus == 0:
        bundles, per_engine, per_rank = ({"CPU": 1.0},) * (engines + ranks), 0.0, 0.0
    elif shared:
        _require(plan, gpus)
        bundles, per_engine, per_rank = ({"CPU": 1.0 + parallel, "GPU": float(parallel)},) * engines, 0.0, 1.0
    else:
        _require(plan, gpus)
        # All GPUs of an engine are one bundle, which Ray places on one machine.
        bundles = ({"CPU": 1.0, "GPU": float(parallel)},) * engines + ({"CPU": 1.0, "GPU": 1.0},) * ranks
        per_engine, per_rank = float(parallel), 1.0
    per_scorer = plan.episodes.reward.reward_model_gpus if gpus else 0.0
    scorers = ({"CPU": 1.0, "GPU": per_scorer} if per_scorer else {"CPU": 1.0},) * len(plan.judges)
    return Placement(
        bundles=(*bundles, *scorers),
        engine_bundles=tuple(range(engines)),
        learner_bundles=tuple(rank // parallel if shared else engines + rank for rank in range(ranks)),
        gpus_per_engine=per_engine,
        gpus_per_rank=per_rank,
        scorer_bundles=tuple(range(len(bundles), len(bundles) + len(scorers))),
        gpus_per_scorer=per_scorer,
    )


def _require(plan: ClusterPlan, gpus: int) -> None:
    needed, judges, engine = plan.needed_gpus, plan.gpus_for_judges, plan.engine.engine
    if needed > gpus:
        engines = f"{plan.num_engines} engines x {engine.gpus_per_engine} GPUs"
        others = f"{plan.num_ranks} learner ranks" + (f" and reward models with {judges:g} GPUs" if judges else "")
        raise ConfigError("--num-engines", engine.num_engines, f"{engines} and {others} need {needed:g} GPUs, there are {gpus}", FEWER_GPUS)


def shortage(wanted: Sequence[Mapping[str, float]], machines: Sequence[Mapping[str, float]], free: Sequence[Mapping[str, float]]) -> str:
    """Return why bundles that are `wanted` have no room on machines with these resources, of which so many are `free`, in words."""
    for name in ("GPU", "CPU"):
        sizes, rooms, unused = ([each.get(name, 0.0) for each in several] or [0.0] for several in (wanted, machines, free))
        if max(sizes) > max(rooms):
            return f"one process needs {max(sizes):g} {name}s on one machine, and the largest machine has {max(rooms):g}"
        if sum(sizes) > sum(unused):
            return f"{sum(sizes):g} more {name}s are needed, and of {sum(rooms):g} in the cluster {sum(unused):g} are free"
    return "what is free has another shape (`ray status` shows it)"


def free_places(bundle: Mapping[str, float], machines: Iterable[Mapping[str, float]]) -> int:
    """Return how many bundles have room on machines of which these resources are free."""
    return sum(int(min(machine.get(name, 0.0) // size for name, size in bundle.items() if size)) for machine in machines)

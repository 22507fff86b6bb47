"""Number of processes and their resources; pure arithmetic, declared before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from agentrl.config.evaluate import PlayConfig
from agentrl.config.schema import TrainConfig
from agentrl.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Resource bundles, and which actor sits in which.

    Attributes:
        bundles: Resources of each bundle, in Ray's form.
        engine_bundles: Bundle index of each engine.
        learner_bundles: Bundle index of each learner rank.
        cpus_per_actor: CPU share an actor asks for.
        gpus_per_engine: GPUs (or the share of one) an engine asks for.
        gpus_per_rank: GPUs (or the share of one) a learner rank asks for.
    """

    bundles: tuple[Mapping[str, float], ...]
    engine_bundles: tuple[int, ...]
    learner_bundles: tuple[int, ...]
    cpus_per_actor: float
    gpus_per_engine: float
    gpus_per_rank: float


def num_ranks(config: PlayConfig) -> int:
    """Return the number of learner ranks; 0 if nothing is trained."""
    return config.learner.num_learners if isinstance(config, TrainConfig) else 0


def plan(config: PlayConfig, *, gpus: int) -> Placement:
    """Place engines and learner ranks on a cluster with `gpus` GPUs; without any, everything runs on CPUs.

    Args:
        config: The resolved configuration.
        gpus: GPUs of the whole cluster.

    Returns:
        Engines and ranks apart, each with GPUs of its own; with ``--colocate`` rank i shares the GPU of engine i.

    Raises:
        ConfigError: If there are some GPUs, but too few.
    """
    engines, ranks, parallel = config.engine.num_engines, num_ranks(config), config.engine.tensor_parallel_size
    if gpus == 0:
        apart = ({"CPU": 1.0},) * (engines + ranks)
        return Placement(
            bundles=apart,
            engine_bundles=tuple(range(engines)),
            learner_bundles=tuple(range(engines, engines + ranks)),
            cpus_per_actor=1.0,
            gpus_per_engine=0.0,
            gpus_per_rank=0.0,
        )
    if config.engine.colocate:
        _require(config, engines, gpus)
        return Placement(
            bundles=({"CPU": 2.0, "GPU": 1.0},) * engines,
            engine_bundles=tuple(range(engines)),
            learner_bundles=tuple(range(ranks)),
            cpus_per_actor=1.0,
            gpus_per_engine=0.5,
            gpus_per_rank=0.5,
        )
    _require(config, engines * parallel + ranks, gpus)
    return Placement(
        bundles=({"CPU": 1.0, "GPU": float(parallel)},) * engines + ({"CPU": 1.0, "GPU": 1.0},) * ranks,
        engine_bundles=tuple(range(engines)),
        learner_bundles=tuple(range(engines, engines + ranks)),
        cpus_per_actor=1.0,
        gpus_per_engine=float(parallel),
        gpus_per_rank=1.0,
    )


def _require(config: PlayConfig, needed: int, gpus: int) -> None:
    if needed > gpus:
        engines = f"{config.engine.num_engines} engines x {config.engine.tensor_parallel_size} GPUs"
        raise ConfigError(
            "--num-engines",
            config.engine.num_engines,
            f"{engines} and {num_ranks(config)} learner ranks need {needed} GPUs, there are {gpus}",
            "Lower --num-engines, --tensor-parallel-size or --num-learners, or share GPUs with --colocate.",
        )

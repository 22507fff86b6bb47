"""Placement is arithmetic: who gets which resources, and what is refused."""

import dataclasses

import pytest

from agentrl.cluster import ray_actors
from agentrl.cluster.placement import free_places, place, shortage
from agentrl.cluster.ray_runtime import RayRuntime
from agentrl.cluster.runtime import evaluators_of, pool_of
from agentrl.config.schema import TrainConfig
from agentrl.config.sections import changed
from agentrl.core.errors import ConfigError
from agentrl.core.protocols import WeightUpdate
from agentrl.engine.plan import EngineConfig
from agentrl.learner.plan import LearnerConfig
from agentrl.resolve.parts import cluster_plan
from agentrl.weights.plan import WeightsConfig


def config(*, engines: int = 2, parallel: int = 1, ranks: int = 2, colocate: bool = False) -> TrainConfig:
    return dataclasses.replace(
        TrainConfig(),
        engine=EngineConfig(num_engines=engines, tensor_parallel_size=parallel),
        weights=WeightsConfig(colocate=colocate),
        learner=LearnerConfig(num_learners=ranks),
    )


def test_without_gpus_nothing_asks_for_one() -> None:
    placement = place(cluster_plan(config()), gpus=0)
    assert all("GPU" not in bundle for bundle in placement.bundles)
    assert (placement.engine_bundles, placement.learner_bundles) == ((0, 1), (2, 3))
    assert placement.gpus_per_engine == placement.gpus_per_rank == 0


def test_engines_and_ranks_apart() -> None:
    placement = place(cluster_plan(config(parallel=2)), gpus=6)
    assert sum(bundle["GPU"] for bundle in placement.bundles) == 6
    assert placement.gpus_per_engine == 2


def test_engines_for_evaluations_have_places_of_their_own() -> None:
    apart = changed(config(parallel=2), eval_engines=1)
    placement = place(cluster_plan(apart), gpus=8)
    assert (placement.engine_bundles, placement.learner_bundles) == ((0, 1, 2), (3, 4))
    assert sum(bundle["GPU"] for bundle in placement.bundles) == 8
    with pytest.raises(ConfigError, match=r"3 engines x 2 GPUs and 2 learner ranks need 8 GPUs, there are 7.*--eval-engines"):
        place(cluster_plan(apart), gpus=7)
    assert place(cluster_plan(apart), gpus=0).engine_bundles == (0, 1, 2)


def test_handles_of_engines_for_evaluations_are_apart() -> None:
    runtime = RayRuntime(cluster_plan(changed(config(), eval_engines=2)), lambda stage: None)
    runtime._workers = {index: f"worker {index}" for index in range(5)}  # the last has joined
    assert list(runtime.workers) == ["worker 0", "worker 1", "worker 4"]
    assert list(runtime.evaluators) == ["worker 2", "worker 3"]
    runtime._workers.pop(4)
    trained = pool_of(runtime)
    apart = evaluators_of(runtime, trained)
    assert apart is not None
    assert (list(trained.load), list(apart.load)) == (["engine-0", "engine-1"], ["engine-2", "engine-3"])
    assert next(trained._names) == "engine-4"
    assert evaluators_of(RayRuntime(cluster_plan(config()), lambda stage: None), trained) is None


def test_colocated_pairs_share_a_gpu() -> None:
    placement = place(cluster_plan(config(colocate=True)), gpus=2)
    assert placement.engine_bundles == placement.learner_bundles == (0, 1)
    assert (placement.gpus_per_engine, placement.gpus_per_rank) == (0, 1)


def test_a_wide_engine_shares_the_gpus_of_as_many_ranks() -> None:
    wide = config(engines=2, parallel=2, ranks=4, colocate=True)
    placement = place(cluster_plan(wide), gpus=4)
    assert (placement.engine_bundles, placement.learner_bundles) == ((0, 1), (0, 0, 1, 1))
    assert [bundle["GPU"] for bundle in placement.bundles] == [2.0, 2.0]
    apart = placement.by_node({0: "b", 1: "a"})
    assert (apart.engine_bundles, apart.learner_bundles) == ((0, 1), (0, 0, 1, 1))
    with pytest.raises(ConfigError, match="need 4 GPUs, there are 3"):
        place(cluster_plan(wide), gpus=3)


def test_too_few_gpus_name_the_flags() -> None:
    with pytest.raises(ConfigError, match=r"need 6 GPUs, there are 4.*--colocate"):
        place(cluster_plan(config(parallel=2)), gpus=4)


def test_an_engine_is_one_bundle_and_so_on_one_machine() -> None:
    placement = place(cluster_plan(config(parallel=4)), gpus=10)
    assert [placement.bundles[bundle]["GPU"] for bundle in placement.engine_bundles] == [4.0, 4.0]


def test_ranks_of_one_machine_follow_one_another_and_pairs_stay_pairs() -> None:
    placement = place(cluster_plan(config(engines=1, ranks=4)), gpus=0)
    nodes = {0: "c", 1: "a", 2: "b", 3: "a", 4: "b"}
    assert placement.by_node(nodes).learner_bundles == (1, 3, 2, 4)
    assert placement.by_node(nodes).engine_bundles == (0,)
    shared = place(cluster_plan(config(engines=4, ranks=4, colocate=True)), gpus=4).by_node({0: "a", 1: "b", 2: "a", 3: "b"})
    assert shared.engine_bundles == shared.learner_bundles == (0, 2, 1, 3)


def test_the_ranks_are_placed_together_before_the_engines() -> None:
    assert place(cluster_plan(config(engines=2, ranks=3)), gpus=5).parts() == [[2, 3, 4], [0, 1]]
    assert place(cluster_plan(config(engines=2, ranks=2, colocate=True)), gpus=2).parts() == [[0, 1]]


def test_an_update_is_stored_once_for_all_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    stored: list[WeightUpdate] = []

    def put(update: WeightUpdate) -> str:
        stored.append(update)
        return f"reference {len(stored)}"

    monkeypatch.setattr(ray_actors.ray, "put", put)
    first, second = WeightUpdate(version=1, transport="shm"), WeightUpdate(version=2, transport="shm")
    assert [ray_actors.stored(update) for update in (first, first, second, second)] == ["reference 1"] * 2 + ["reference 2"] * 2
    assert stored == [first, second]


@pytest.mark.parametrize(
    ("wanted", "machines", "free", "said"),
    [
        (
            [{"CPU": 1, "GPU": 16}],
            [{"CPU": 64, "GPU": 8}] * 4,
            [{"CPU": 64, "GPU": 8}] * 4,
            "needs 16 GPUs on one machine, and the largest machine has 8",
        ),
        (
            [{"CPU": 1, "GPU": 8}] * 3,
            [{"CPU": 64, "GPU": 8}] * 2,
            [{"CPU": 64, "GPU": 8}] * 2,
            "24 more GPUs are needed, and of 16 in the cluster 16 are free",
        ),
        ([{"CPU": 1}] * 3, [{"CPU": 4}], [{"CPU": 2}], "3 more CPUs are needed, and of 4 in the cluster 2 are free"),
        ([{"CPU": 1, "GPU": 2}] * 2, [{"CPU": 8, "GPU": 2}] * 4, [{"CPU": 8, "GPU": 1}] * 4, "has another shape"),
        ([{"CPU": 1}], [], [], "needs 1 CPUs on one machine"),
    ],
)
def test_why_there_is_no_room_is_said_in_words(
    wanted: list[dict[str, float]], machines: list[dict[str, float]], free: list[dict[str, float]], said: str
) -> None:
    assert said in shortage(wanted, machines, free)


def test_a_bundle_has_room_where_all_of_it_fits() -> None:
    free = [{"CPU": 8.0, "GPU": 4.0}, {"CPU": 1.0, "GPU": 8.0}, {"CPU": 16.0}]
    assert free_places({"CPU": 1.0, "GPU": 2.0}, free) == 3
    assert free_places({"CPU": 1.0}, free) == 25

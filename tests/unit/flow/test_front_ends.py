"""Rollout workers for each engine, chosen from the episodes under way at once and the cores there are."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.cluster.ray_runtime import RayRuntime
from agentrl.config.schema import PlaySettings, TrainConfig
from agentrl.resolve.commands import load_config, load_eval
from agentrl.resolve.parts import cluster_plan, flow_plan
from agentrl.resolve.plan import with_front_ends

LARGE = ("--groups-per-step", "128", "--n-samples-per-prompt", "16")  # 2,048 episodes under way at once


def train(*words: str) -> TrainConfig:
    return load_config(["--agent", "envs/arithmetic.py", *words])


def chosen(config: PlaySettings, cores: int) -> int:
    return with_front_ends(config, cores).rollout.num_front_ends


@pytest.mark.parametrize(
    ("words", "live"),
    [
        (LARGE, 2048),
        ((*LARGE, "--async"), 4096),
        ((*LARGE, "--oversample", "0.5"), 3072),
        ((*LARGE, "--num-engines", "3"), 683),
        ((*LARGE, "--max-concurrent-episodes", "512"), 512),
        ((*LARGE, "--max-concurrent-episodes", "5000"), 2048),
    ],
)
def test_episodes_under_way_at_once_follow_from_the_slots(words: tuple[str, ...], live: int) -> None:
    assert flow_plan(train(*words)).live_episodes == live


def test_every_1000_live_episodes_get_a_worker_as_far_as_there_are_cores() -> None:
    config = train(*LARGE)
    assert [chosen(config, cores) for cores in (64, 5, 4, 3, 2, 1)] == [3, 3, 2, 1, 1, 1]  # the engine and a rank have one each
    assert chosen(train(*LARGE, "--async", "--num-engines", "2", "--num-learners", "4"), 11) == 2  # 2,048 beside each engine; 5 cores left
    assert chosen(train(), 64) == 1  # 128 episodes
    thousand = ("--groups-per-step", "125", "--n-samples-per-prompt", "8")
    assert (chosen(train(*thousand), 64), chosen(train(*thousand, "--max-staleness", "1"), 64)) == (1, 2)


def test_a_number_that_was_asked_for_is_kept() -> None:
    assert chosen(train(*LARGE, "--rollout-workers-per-engine", "2"), 64) == 2
    assert chosen(train(*LARGE, "--rollout-workers-per-engine", "4"), 1) == 4


def test_runs_that_cannot_share_an_engine_have_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.core.process.cuda_device_count", lambda: 1)
    for words in (("--runtime", "local"), ("--colocate",)):
        assert chosen(train(*LARGE, *words), 64) == 1
    assert chosen(load_eval(["--agent", "envs/arithmetic.py", "--runtime", "ray", "--max-concurrent-episodes", "5000"]), 64) == 1


def test_the_cores_of_a_cluster_count_once_it_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    stages: list[str] = []
    runtime = RayRuntime(cluster_plan(train(*LARGE, "--ray-address", "auto")), stages.append)
    cluster: Any = SimpleNamespace(cluster_resources=lambda: {"CPU": 4.0, "GPU": 1.0})
    monkeypatch.setitem(sys.modules, "ray", cluster)
    runtime._choose_front_ends()
    assert runtime._plan.num_front_ends == 2
    assert stages == ["2 rollout workers for each engine"]
    cluster.cluster_resources = dict
    alone = RayRuntime(cluster_plan(train(*LARGE, "--ray-address", "auto")), stages.append)
    alone._choose_front_ends()
    assert (alone._plan.num_front_ends, len(stages)) == (1, 1)

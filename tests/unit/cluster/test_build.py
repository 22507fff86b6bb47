"""From the configuration to settings and senders, with and without GPUs."""

import dataclasses
from pathlib import Path

import pytest
import torch

from agentrl.cluster import build
from agentrl.cluster.plan import RunConfig
from agentrl.config.schema import TrainConfig
from agentrl.config.sections import changed
from agentrl.core.errors import ConfigError
from agentrl.engine.plan import EngineConfig
from agentrl.engine.settings import weight_transport
from agentrl.resolve.parts import engine_plan, environment, sender_plan
from agentrl.rollout.plan import ModelConfig, RolloutConfig
from agentrl.weights.cuda import GroupSender
from agentrl.weights.sender import SharedMemorySender, WeightSender

CONFIG = TrainConfig(
    run=RunConfig(agent="envs/arithmetic.py", seed=3), rollout=RolloutConfig(stop=("x",)), engine=EngineConfig(num_engines=2)
)


def sender(config: TrainConfig, rank: int = 0, host: str = "127.0.0.1") -> WeightSender:
    """The sender of a learner rank on this machine's kind of device."""
    return build._sender(sender_plan(config, engine_plan(config, build.device())), rank, host)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.core.process.cuda_device_count", lambda: 4)


def test_without_a_gpu_weights_go_through_shared_memory() -> None:
    assert (build.device(), weight_transport(CONFIG.engine, CONFIG.weights, build.device())) == ("cpu", "shm")
    assert isinstance(sender(CONFIG), SharedMemorySender)


@pytest.mark.usefixtures("gpus")
def test_weights_go_through_a_shared_folder_if_asked(tmp_path: Path) -> None:
    config = changed(CONFIG, run_dir=tmp_path, weight_transport="disk")
    assert weight_transport(config.engine, config.weights, build.device()) == "shm"
    made = sender(config)
    assert isinstance(made, SharedMemorySender)
    update = made.send([("a", torch.ones(2))], 1)
    assert Path(update.payload["update"]["path"]).is_relative_to(tmp_path / "weights")
    made.close()
    assert not list((tmp_path / "weights").iterdir())


@pytest.mark.vllm
@pytest.mark.usefixtures("gpus")
def test_with_gpus_nccl_unless_colocated() -> None:
    apart = sender(CONFIG)
    assert isinstance(apart, GroupSender)
    assert apart._kind == "nccl"
    shared = changed(CONFIG, colocate=True)
    assert weight_transport(shared.engine, shared.weights, build.device()) == "ipc"
    paired = sender(shared, 1, "10.0.0.1")
    assert isinstance(paired, GroupSender)
    assert (paired._kind, paired._host) == ("ipc", "127.0.0.1")  # processes on one GPU need nobody else's network


def test_engine_settings_follow_the_configuration() -> None:
    settings = engine_plan(CONFIG, "cpu").at(1)
    assert (settings.index, settings.seed, settings.stop_strings, settings.device) == (1, 3, True, "cpu")
    assert settings.model.model.endswith("tiny-chat")
    named = dataclasses.replace(CONFIG, model=ModelConfig(model="org/name"))
    assert engine_plan(named, "cpu").model.model == "org/name"


def test_processes_start_with_one_thread_and_the_right_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    environment = build.worker_environment(engine_plan(CONFIG, "cpu"))
    assert (environment["OMP_NUM_THREADS"], environment["DS_ACCELERATOR"]) == ("1", "cpu")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert build.worker_environment(engine_plan(CONFIG, "cpu"))["OMP_NUM_THREADS"] == "2"


FORKED = """
from agentrl import AgentInstance, StepResult, Task

class Env(AgentInstance):
    @classmethod
    def tasks(cls):
        return [Task("a")]

    def step(self, state):
        return StepResult(terminated=True)
"""
METHODS = """
    def snapshot(self):
        return 1

    def restore(self, snapshot):
        pass
"""


def test_forks_need_an_environment_whose_state_can_be_handed_on(tmp_path: Path) -> None:
    path = tmp_path / "env.py"
    path.write_text(FORKED)
    config = changed(CONFIG, agent=str(path), branch_at=1)
    with pytest.raises(ConfigError, match=r"--branch-at = 1: Env has no methods snapshot and restore. Write them as docs"):
        environment(config)
    other = tmp_path / "other.py"
    other.write_text(FORKED + METHODS)
    environment(changed(config, agent=str(other)))
    environment(changed(config, agent=str(path), branch_at="never"))
    environment(changed(config, agent="gym:FrozenLake-v1"))
    with pytest.raises(ConfigError, match="has no methods snapshot and restore"):
        environment(changed(config, agent="gym:FrozenLake-v1?num_envs=4"))

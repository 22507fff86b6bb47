"""Two processes with real DeepSpeed compute what one does."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

from tests.learner_support import CollectingSender, gradients, largest_difference, make_groups, make_settings, write_model

GROUPS = make_groups(5, 3, seed=1)
STAGES = (0, 1, 2, 3)
RUNS: dict[str, dict[str, dict[str, Any]]] = {
    "reward-kl": {"learner": {"zero_stage": 3}, "algo": {"init_kl_coef": 0.1, "advantage_estimator": "reinforce", "off_policy": "m2po"}},
    "critic": {
        "learner": {"zero_stage": 2, "critic_warmup_steps": 1},
        "algo": {"advantage_estimator": "gae", "ppo_epochs": 2, "mini_batches": 2, "off_policy": "none"},
    },
    "average": {"learner": {"zero_stage": 3, "ema_decay": 0.5}, "algo": {"init_kl_coef": 0.1, "use_kl_loss": True, "ref_reset_every": 1}},
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def train(name: str, model: str, out: Path, *, rank: int = 0, world_size: int = 1, port: int = 0) -> None:
    """Two steps; metrics, published weights and the saved model go to `out`."""
    from agentrl.learner.learner import LearnerRank

    sender = CollectingSender()
    learner = LearnerRank(make_settings(model, **RUNS[name]), sender)
    learner.start(rank, world_size, port)
    metrics: dict[str, float] = {}
    for step in range(2):
        metrics = dict(learner.train(step, *make_groups(5, 3, seed=step, version=step)).metrics)
    learner.export_weights(2)
    learner.save_model(str(out / name))
    learner.close()
    if rank == 0:
        torch.save((metrics, sender.weights), out / f"{name}.pt")


def everything(rank: int, ports: list[int], model: str, out: Path) -> None:
    """What a rank of two does; starting one costs more than all of this."""
    for stage in STAGES:
        settings = make_settings(model, learner={"zero_stage": stage, "micro_batch_tokens": 60})
        torch.save(gradients(settings, GROUPS, rank=rank, world_size=2, port=ports.pop()), out / f"{stage}-{rank}.pt")
    for name in RUNS:
        train(name, model, out, rank=rank, world_size=2, port=ports.pop())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def two_ranks(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("two")
    mp.spawn(everything, args=([free_port() for _ in range(len(STAGES) + len(RUNS))], model, out), nprocs=2)
    return out


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_do_not_depend_on_the_number_of_ranks(model: str, two_ranks: Path, stage: int) -> None:
    alone = gradients(make_settings(model), GROUPS)
    for rank in (0, 1):
        assert largest_difference(alone, torch.load(two_ranks / f"{stage}-{rank}.pt")) < 1e-5


@pytest.mark.parametrize("name", RUNS)
def test_two_ranks_train_report_and_save_what_one_does(model: str, two_ranks: Path, tmp_path: Path, name: str) -> None:
    from transformers import AutoModelForCausalLM

    train(name, model, tmp_path)
    metrics, weights = torch.load(two_ranks / f"{name}.pt")
    expected, alone = torch.load(tmp_path / f"{name}.pt")
    # Adam divides tiny gradients by their own size, so rounding shows up enlarged in a few weights.
    assert largest_difference(alone, weights) < 1e-3
    saved = dict(AutoModelForCausalLM.from_pretrained(two_ranks / name).named_parameters())
    assert all(torch.equal(saved[key], weights[key]) for key in weights)
    same = [key for key in expected if not key.startswith("time/") and key not in ("padding", "micro_batches")]
    # One token at the edge of a clip range more or less changes a fraction by more than rounding.
    assert {key: metrics[key] for key in same} == pytest.approx({key: expected[key] for key in same}, rel=2e-3, abs=1e-2)
    if name == "average":
        averages = [dict(AutoModelForCausalLM.from_pretrained(out / "average-ema").named_parameters()) for out in (two_ranks, tmp_path)]
        assert largest_difference(*averages) < 1e-3

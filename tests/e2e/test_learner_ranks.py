"""Two processes with real DeepSpeed compute what one does."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

from tests.learner_support import CollectingSender, gradients, largest_difference, make_groups, make_settings, write_model

GROUPS = make_groups(5, 3, seed=1)
STAGES = (0, 1, 2, 3)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def on_two_ranks(work: Callable[..., None], *arguments: Any) -> None:
    mp.spawn(work, args=(free_port(), *arguments), nprocs=2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("model"))


def all_stages(rank: int, port: int, model: str, out: str) -> None:
    for stage in STAGES:
        settings = make_settings(model, learner={"zero_stage": stage, "micro_batch_tokens": 60})
        found = gradients(settings, GROUPS, rank=rank, world_size=2, port=port + stage)
        torch.save(found, f"{out}/{stage}-{rank}.pt")


def test_gradients_do_not_depend_on_the_number_of_ranks(model: str, tmp_path: Path) -> None:
    on_two_ranks(all_stages, model, str(tmp_path))
    alone = gradients(make_settings(model), GROUPS)
    for stage in STAGES:
        for rank in (0, 1):
            assert largest_difference(alone, torch.load(tmp_path / f"{stage}-{rank}.pt")) < 1e-5, (stage, rank)


def trained(
    rank: int, world_size: int, port: int, model: str, learner: dict[str, Any], algo: dict[str, Any], save: str = ""
) -> tuple[dict[str, float], dict[str, Any]]:
    from agentrl.learner.learner import LearnerRank

    sender = CollectingSender()
    learner_rank = LearnerRank(make_settings(model, learner=learner, algo=algo), sender)
    learner_rank.start(rank, world_size, port)
    metrics: dict[str, float] = {}
    for step in range(2):
        metrics = dict(learner_rank.train(step, *make_groups(5, 3, seed=step, version=step)).metrics)
    learner_rank.export_weights(2)
    if save:
        learner_rank.save_model(save)
    learner_rank.close()
    return metrics, sender.weights


ALGO = {"init_kl_coef": 0.1, "advantage_estimator": "reinforce", "off_policy": "m2po"}


def train_and_save(rank: int, port: int, model: str, out: str) -> None:
    result = trained(rank, 2, port, model, {"zero_stage": 3}, ALGO, save=f"{out}/model")
    if rank == 0:
        torch.save(result, f"{out}/result.pt")


def test_two_ranks_train_report_and_save_what_one_does(model: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    on_two_ranks(train_and_save, model, str(tmp_path))
    metrics, weights = torch.load(tmp_path / "result.pt")
    expected, alone = trained(0, 1, 0, model, {}, ALGO)
    assert largest_difference(alone, weights) < 1e-3
    saved = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "model").named_parameters())
    assert all(torch.equal(saved[name], weights[name]) for name in weights)
    same = [name for name in expected if not name.startswith("time/") and name not in ("padding", "micro_batches")]
    assert {name: metrics[name] for name in same} == pytest.approx({name: expected[name] for name in same}, rel=1e-3, abs=1e-4)

"""Ranks that run every micro-batch together compute the gradients and report the metrics of one rank alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

from agentrl.core.errors import ConfigError
from tests.learner_support import (
    CollectingSender,
    gradients,
    largest_difference,
    make_groups,
    make_settings,
    make_trees,
    write_experts,
    write_model,
)
from tests.ports import free_ports

GROUPS = (*make_groups(3, 4, seed=1), *make_trees(2, seed=1))
CRITIC = {"advantage_estimator": "gae", "init_kl_coef": 0.1, "entropy_coef": 0.1}
TAUGHT = {"teacher": "-teacher", "teacher_loss": "forward", "teacher_top_k": 5}
BALANCED = {"aux_loss_coef": 0.5}
LONG = {"gradient_checkpointing": True, "tiled_mlp": True}
pytestmark = pytest.mark.timeout(600)
CASES: dict[str, dict[str, Any]] = {
    "stage 0": {"learner": {"zero_stage": 0}},
    "stage 1, one row at a time": {"learner": {"zero_stage": 1, "micro_batch_tokens": 1}},
    "stage 2, sequence ratios": {"learner": {"zero_stage": 2, "micro_batch_tokens": 60}, "algo": {"policy_loss": "gspo"}},
    "stage 3, critic and reference": {"learner": {"zero_stage": 3, "micro_batch_tokens": 60}, "algo": CRITIC},
    "stage 3, long rows": {"learner": {"zero_stage": 3, "share_prompts": False, **LONG}},
    "stage 2, the likeliest tokens of a teacher": {"learner": {"zero_stage": 2, "micro_batch_tokens": 60}, "algo": TAUGHT},
    "stage 3, balanced experts": {"model": "-experts", "learner": {"zero_stage": 3, "micro_batch_tokens": 60}, "algo": BALANCED},
}


def settings(model: str, name: str, **learner: Any) -> Any:
    """Settings of a case; the models beside the first one have names that begin with its name."""
    case = CASES[name]
    algo = {key: f"{model}{value}" if key == "teacher" else value for key, value in case.get("algo", {}).items()}
    return make_settings(model + case.get("model", ""), learner=case["learner"] | learner, algo=algo)


def everything(rank: int, ports: list[int], model: str, out: Path, world: int, size: int) -> None:
    """Gradients of all cases, and the metrics of a step."""
    for name in CASES:
        found = gradients(settings(model, name, sequence_parallel=size), GROUPS, rank=rank, world_size=world, port=ports.pop())
        torch.save(found, out / f"{name}-{rank}.pt")
    metrics = step_metrics(model, ports.pop(), rank=rank, world_size=world, sequence_parallel=size)
    torch.save(metrics, out / f"metrics-{rank}.pt")


def step_metrics(model: str, port: int = 0, *, rank: int = 0, world_size: int = 1, **learner: Any) -> dict[str, float]:
    from agentrl.learner.learner import LearnerRank

    learner_rank = LearnerRank(settings(model, "stage 3, critic and reference", **learner), CollectingSender())
    learner_rank.start(rank, world_size, port)
    metrics = dict(learner_rank.train(0, *GROUPS).metrics)
    learner_rank.close()
    return metrics


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    folder = tmp_path_factory.mktemp("models")
    write_model(folder / "model-teacher", seed=3, **heads)
    write_experts(folder / "model-experts", norm_topk_prob=True, **heads)
    return write_model(folder / "model", **heads)


@pytest.mark.parametrize(("world", "size"), [(2, 2), (4, 4), (4, 2)])
@pytest.mark.slow
def test_ranks_together_compute_what_one_does(model: str, tmp_path: Path, world: int, size: int) -> None:
    ports = free_ports(len(CASES) + 1)
    mp.spawn(everything, args=(ports, model, tmp_path, world, size), nprocs=world)
    for name in CASES:
        alone = gradients(settings(model, name, attn_implementation="sdpa"), GROUPS)
        assert max(float(part.abs().max()) for part in alone.values()) > 1e-3
        for rank in range(world):
            assert largest_difference(alone, torch.load(tmp_path / f"{name}-{rank}.pt")) < 1e-5, name
    expected = step_metrics(model, attn_implementation="varlen")
    different = ("time/", "padding", "micro_batches", "shared_prompts", "tokens/saved")
    same = [key for key in expected if not key.startswith(different)]
    for rank in range(world):
        found = torch.load(tmp_path / f"metrics-{rank}.pt")
        assert {key: found[key] for key in same} == pytest.approx({key: expected[key] for key in same}, rel=2e-3, abs=1e-4)


def refused(rank: int, port: int, model: str, out: Path) -> None:
    try:
        gradients(make_settings(model, learner={"sequence_parallel": 2}), GROUPS, rank=rank, world_size=2, port=port)
    except ConfigError as error:
        (out / str(rank)).write_text(str(error), encoding="utf-8")


@pytest.mark.slow
def test_layers_that_need_all_tokens_are_refused(tmp_path: Path) -> None:
    from tests.unit.learner.test_attention import hybrid

    path = write_model(tmp_path / "model")
    hybrid("Qwen3_5").save_pretrained(path)
    mp.spawn(refused, args=(free_ports(1)[0], path, tmp_path), nprocs=2)
    for rank in range(2):
        assert "--sequence-parallel" in (tmp_path / str(rank)).read_text(encoding="utf-8")

"""A mixture of experts through whole runs, and on two learner ranks."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from deepspeed.utils import get_z3_leaf_modules
from safetensors.torch import load_file

from agentrl.assets import tiny_model_path
from tests.e2e.runs import ENVS, SMALL, succeeded, train
from tests.learner_support import CollectingSender, gradients, largest_difference, make_groups, make_settings, with_experts, write_experts
from tests.ports import free_ports

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

GROUPS = with_experts(make_groups(5, 4, seed=1), layers=2, experts=4)
CASES: dict[str, dict[str, Any]] = {
    "own experts": {"learner": {"zero_stage": 3, "micro_batch_tokens": 60}},
    "checkpointed": {"learner": {"zero_stage": 3, "micro_batch_tokens": 60, "gradient_checkpointing": True}},
    "replayed": {"learner": {"zero_stage": 3, "micro_batch_tokens": 1}, "algo": {"router_replay": True}},
    "replayed in parts": {"learner": {"zero_stage": 2, "sequence_parallel": 2}, "algo": {"router_replay": True}},
    "replayed in parts, checkpointed": {
        "learner": {"zero_stage": 3, "sequence_parallel": 2, "gradient_checkpointing": True, "micro_batch_tokens": 60},
        "algo": {"router_replay": True},
    },
}


def everything(rank: int, ports: list[int], model: str, out: Path) -> None:
    for name, case in CASES.items():
        found = gradients(make_settings(model, **case), GROUPS, rank=rank, world_size=2, port=ports.pop())
        torch.save(found, out / f"{name}-{rank}.pt")


def test_two_ranks_compute_what_one_does(tmp_path: Path) -> None:
    model = write_experts(tmp_path / "model", num_key_value_heads=2)
    mp.spawn(everything, args=(free_ports(len(CASES)), model, tmp_path), nprocs=2)
    for name, case in CASES.items():
        alone = gradients(make_settings(model, learner={"zero_stage": 0}, algo=case.get("algo")), GROUPS)
        for rank in range(2):
            assert largest_difference(alone, torch.load(tmp_path / f"{name}-{rank}.pt")) < 1e-5, name


FAMILIES: dict[str, dict[str, Any]] = {
    "Olmoe": {},
    "DeepseekV3": {"n_routed_experts": 4, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}
    | {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16},
}
PARTS = {"zero_stage": 3, "micro_batch_tokens": 60, "gradient_checkpointing": True}


def gathered_and_published(rank: int, ports: list[int], folder: Path) -> None:
    """Gradients with ZeRO-3, and what is published, with the number of parameters that are whole beside each."""
    from agentrl.learner.deepspeed import options
    from agentrl.learner.learner import LearnerRank

    config = options.zero_config  # parameters as small as these would never be in parts
    options.zero_config = lambda *args, **named: config(*args, **named) | {"stage3_param_persistence_threshold": 0}
    for name in FAMILIES:
        model = str(folder / name)
        found = gradients(make_settings(model, learner=PARTS), GROUPS, rank=rank, world_size=2, port=ports.pop())
        learner = LearnerRank(make_settings(model, learner=PARTS), CollectingSender())
        learner.start(rank, 2, ports.pop())
        policy = learner._started.policy
        published, whole = {}, 0
        for key, tensor in learner._started.named_weights():
            published[key] = tensor.detach().clone()
            whole = max(whole, sum(parameter.ds_status.name == "AVAILABLE" for parameter in policy.parameters()))
        leaves = len(get_z3_leaf_modules(policy))
        learner.close()
        torch.save((found, published, whole, leaves), folder / f"{name}-{rank}.pt")


def test_ranks_with_different_experts_gather_one_tensor_at_a_time(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    for name, sizes in FAMILIES.items():
        write_experts(tmp_path / name, name, **{"num_key_value_heads": 2} | sizes)
    mp.spawn(gathered_and_published, args=(free_ports(2 * len(FAMILIES)), tmp_path), nprocs=2)
    for name in FAMILIES:
        model = str(tmp_path / name)
        alone = gradients(make_settings(model, learner={"zero_stage": 0}), GROUPS)
        saved = {key: tensor for key, tensor in load_file(f"{model}/model.safetensors").items() if not key.endswith("correction_bias")}
        layers = sum("experts" in dict(block.named_children()) for block in AutoModelForCausalLM.from_pretrained(model).modules())
        for rank in range(2):
            found, published, whole, leaves = torch.load(tmp_path / f"{name}-{rank}.pt")
            assert largest_difference(alone, found) < 1e-5, name
            assert saved.keys() <= published.keys()
            assert all(torch.equal(published[key], tensor) for key, tensor in saved.items())
            assert whole == 1
            assert leaves == layers > 0


def test_a_run_replays_every_token_of_every_turn(tmp_path: Path) -> None:
    """Two turns, asynchronously: weights change between turns and within them."""
    model = Path(write_experts(tmp_path / "model", vocab_size=512, max_position_embeddings=1024))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(tiny_model_path() / name, model)
    words = ("--model", str(model), "--engine", "transformers", "--router-replay", "--async", "--num-steps", "3", *SMALL)
    run = succeeded(train(tmp_path / "run", *words, agent=ENVS / "calculator.py"))
    for row in run.metrics:
        assert row["router_replay/share"] == 1.0
        assert 0.9 < row["router_replay/agreement"] <= 1.0
    assert run.metrics[0]["mismatch/max"] <= 1e-3

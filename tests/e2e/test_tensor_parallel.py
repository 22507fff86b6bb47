"""Ranks that hold each a part of every layer compute the gradients, weights and metrics of one rank alone, and go on where they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor

from agentrl.core.errors import CheckpointError, ConfigError
from tests.learner_support import CollectingSender, gradients, largest_difference, make_groups, make_settings, write_model
from tests.ports import free_ports
from tests.unit.learner.test_attention import tiny

GROUPS = make_groups(5, 4, seed=1)
CRITIC = {"advantage_estimator": "gae", "init_kl_coef": 0.1, "entropy_coef": 0.1}
TAUGHT = {"teacher": "-teacher", "teacher_loss": "forward", "teacher_top_k": 5}
pytestmark = pytest.mark.timeout(600)
CASES: dict[str, dict[str, Any]] = {
    "stage 0": {"learner": {"zero_stage": 0}},
    "stage 1, packed": {"learner": {"zero_stage": 1, "micro_batch_tokens": 60, "attn_implementation": "varlen"}},
    "stage 2, checkpointing": {"learner": {"zero_stage": 2, "micro_batch_tokens": 60, "gradient_checkpointing": True}},
    "stage 2, critic and reference": {"learner": {"zero_stage": 2, "micro_batch_tokens": 60}, "algo": CRITIC},
    "stage 3, critic and reference": {"learner": {"zero_stage": 3, "gradient_checkpointing": True}, "algo": CRITIC},
    "stage 2, the likeliest tokens of a teacher": {"learner": {"zero_stage": 2, "micro_batch_tokens": 60}, "algo": TAUGHT},
}
TRAINED = ("stage 0", "stage 2, critic and reference", "stage 3, critic and reference")


def settings(model: str, name: str, size: int) -> Any:
    case = CASES[name]
    algo = {key: f"{model}{value}" if key == "teacher" else value for key, value in case.get("algo", {}).items()}
    return make_settings(model, learner={"learner_tensor_parallel": size} | case["learner"], algo=algo)


def train(model: str, name: str, out: Path, *, size: int, rank: int = 0, world_size: int = 1, ports: list[int] | None = None) -> None:
    """Three steps, with a checkpoint after the second, and the third again from there."""
    from agentrl.learner.learner import LearnerRank

    metrics, weights = list[Any](), list[Any]()
    for resumed in (False, True):
        sender = CollectingSender()
        learner = LearnerRank(settings(model, name, size), sender)
        learner.start(rank, world_size, ports.pop() if ports else 0)
        if resumed:
            assert learner.load_checkpoint(str(out / f"{name} saved")) == 2
        for step in range(2 if resumed else 0, 3):
            metrics.append(dict(learner.train(step, *make_groups(5, 4, seed=step, version=step)).metrics))
            if step == 1:
                (out / f"{name} saved").mkdir(exist_ok=True)
                learner.save_checkpoint(str(out / f"{name} saved"), 2)
        learner.export_weights(3)
        weights.append(sender.weights)
        learner.save_model(str(out / name))
        learner.close()
    if rank == 0:
        torch.save((metrics, weights), out / f"{name}.pt")


def everything(rank: int, ports: list[int], model: str, out: Path, world: int, size: int) -> None:
    for name in CASES:
        found = gradients(settings(model, name, size), GROUPS, rank=rank, world_size=world, port=ports.pop())
        torch.save(found, out / f"{name}-{rank}.pt")
        if name in TRAINED:
            train(model, name, out, size=size, rank=rank, world_size=world, ports=ports)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models")
    write_model(folder / "model-teacher", seed=3, num_attention_heads=4, num_key_value_heads=2)
    return write_model(folder / "model", num_attention_heads=4, num_key_value_heads=2)


def joined(parts: list[Tensor], shape: torch.Size) -> Tensor:
    """The whole of a gradient, from the parts of consecutive ranks or from ranks that have all of it."""
    if parts[0].shape == shape:
        assert all(torch.allclose(parts[0], part, atol=1e-6) for part in parts)
        return parts[0]
    (dim,) = (number for number, (part, whole) in enumerate(zip(parts[0].shape, shape, strict=True)) if part != whole)
    return torch.cat(parts, dim)


@pytest.mark.parametrize(("world", "size"), [(2, 2), (4, 2)])
@pytest.mark.slow
def test_parts_of_layers_compute_what_whole_layers_do(model: str, tmp_path: Path, world: int, size: int) -> None:
    from safetensors.torch import load_file

    (tmp_path / "alone").mkdir()
    mp.spawn(everything, args=(free_ports(3 * len(CASES)), model, tmp_path, world, size), nprocs=world)
    for name in CASES:
        alone = gradients(settings(model, name, 1), GROUPS)
        found = [torch.load(tmp_path / f"{name}-{rank}.pt") for rank in range(world)]
        for first in range(0, world, size):
            parts = {key: joined([rank[key] for rank in found[first : first + size]], alone[key].shape) for key in alone}
            assert largest_difference(alone, parts) < 1e-5, name
    for name in TRAINED:
        train(model, name, tmp_path / "alone", size=1)
        (metrics, weights), (expected, plain) = torch.load(tmp_path / f"{name}.pt"), torch.load(tmp_path / "alone" / f"{name}.pt")
        assert largest_difference(plain[0], weights[0]) < 1e-3  # Adam divides tiny gradients by their own size
        assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])  # resumed
        same = [
            key
            for key in expected[0]
            if not key.startswith("time/") and key not in ("padding", "micro_batches", "shared_prompts", "tokens/saved")
        ]
        assert {key: metrics[0][key] for key in same} == pytest.approx({key: expected[0][key] for key in same}, rel=2e-3, abs=1e-3)
        saved = load_file(tmp_path / name / "model.safetensors")
        assert all(torch.equal(saved[key], weights[1][key]) for key in weights[1])


def of_other_models(rank: int, ports: list[int], models: list[str], out: Path) -> None:
    for number, path in enumerate(models):
        found = gradients(settings(path, "stage 3, critic and reference", 2), GROUPS, rank=rank, world_size=2, port=ports.pop())
        torch.save(found, out / f"{number}-{rank}.pt")


@pytest.mark.slow
def test_biases_and_norms_of_heads_are_divided_too(tmp_path: Path) -> None:
    models = []
    for name in ("Qwen2", "Qwen3", "Gemma3"):
        model = tiny(name, num_attention_heads=4, num_key_value_heads=2, **({} if name == "Qwen2" else {"head_dim": 8}))
        for parameter in model.parameters():
            if parameter.dim() == 1:
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
        models.append(write_model(tmp_path / name))  # for its tokenizer
        model.save_pretrained(models[-1])
    mp.spawn(of_other_models, args=(free_ports(len(models)), models, tmp_path), nprocs=2)
    for number, path in enumerate(models):
        alone = gradients(settings(path, "stage 3, critic and reference", 1), GROUPS)
        found = [torch.load(tmp_path / f"{number}-{rank}.pt") for rank in range(2)]
        assert largest_difference(alone, {key: joined([rank[key] for rank in found], alone[key].shape) for key in alone}) < 1e-5, path


def test_layers_that_cannot_be_divided_are_refused(model: str, tmp_path: Path) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    mixture = write_model(tmp_path / "mixture")
    tiny("Qwen3Moe", num_attention_heads=4, num_key_value_heads=2, head_dim=8, **experts).save_pretrained(mixture)
    for path, size, message in ((model, 4, "4 attention heads and 2 key heads"), (mixture, 2, "no plan for the layers of qwen3_moe")):
        with pytest.raises(ConfigError, match=message) as error:
            gradients(settings(path, "stage 0", size), GROUPS)
        assert error.value.field == "--learner-tensor-parallel"


def only_training(rank: int, ports: list[int], model: str, name: str, out: Path) -> None:
    train(model, name, out, size=2, rank=rank, world_size=2, ports=ports)


@pytest.mark.slow
def test_a_checkpoint_in_parts_is_read_by_ranks_with_the_same_parts_alone(model: str, tmp_path: Path) -> None:
    from agentrl.learner.export import export_checkpoint
    from agentrl.learner.learner import LearnerRank

    name = "stage 2, checkpointing"
    mp.spawn(only_training, args=(free_ports(2), model, name, tmp_path), nprocs=2)
    learner = LearnerRank(settings(model, name, 1), CollectingSender())
    learner.start(0, 1, 0)
    with pytest.raises(CheckpointError, match="--learner-tensor-parallel 2"):
        learner.load_checkpoint(str(tmp_path / f"{name} saved"))
    learner.close()
    with pytest.raises(CheckpointError, match="--learner-tensor-parallel 2"):
        export_checkpoint(tmp_path / f"{name} saved", settings(model, name, 1), tmp_path / "exported")

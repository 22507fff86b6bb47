"""The optimizers beside AdamW: which parameters each updates, by which formula, and how a learner with them goes on after a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from agentrl.core.errors import CheckpointError
from agentrl.learner.optimizers import HIDDEN, build_optimizer, hidden_matrices, parameter_groups
from agentrl.learner.plan import LearnerConfig, LoraConfig
from tests.learner_support import write_model
from tests.unit.learner.test_checkpoint import started, steps

EIGHT = ("adamw_8bit",)
CASES = [("muon", 0), ("adafactor", 0), ("adamw_8bit", 0), ("adamw_8bit", 2), ("adamw_8bit", 3)]


def settings(optimizer: Any = "muon", **changes: Any) -> LearnerConfig:
    return LearnerConfig(**{"optimizer": optimizer, "zero_stage": 0, "learning_rate": 0.01, "weight_decay": 0.1} | changes)


class Layered(nn.Module):
    """Embeddings, a numbered layer with a matrix, a bias, positions and stacked experts, and an output layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(5, 4)
        self.layers = nn.ModuleList([nn.ModuleDict({"up": nn.Linear(4, 6), "positions": nn.Embedding(3, 4)})])
        self.layers[0].register_parameter("experts", nn.Parameter(torch.randn(2, 4, 4)))
        self.head = nn.Linear(6, 5, bias=False)


def with_gradients(module: nn.Module, seed: int = 1) -> None:
    torch.manual_seed(seed)
    for parameter in module.parameters():
        parameter.grad = torch.randn(parameter.shape)


def test_matrices_within_the_layers_are_hidden_and_no_others() -> None:
    module = Layered()
    names = {parameter: name for name, parameter in module.named_parameters()}
    assert {names[parameter] for parameter in hidden_matrices(module)} == {"layers.0.up.weight"}
    module.layers[0]["up"].weight.requires_grad_(False)
    assert hidden_matrices(module) == set()


def test_each_parameter_is_in_one_group_and_vectors_do_not_decay() -> None:
    module = Layered()
    names = {parameter: name for name, parameter in module.named_parameters()}
    groups = [
        (group[HIDDEN], group["weight_decay"], sorted(names[each] for each in group["params"]))
        for group in parameter_groups(module, settings())
    ]
    others = ["embed.weight", "head.weight", "layers.0.experts", "layers.0.positions.weight"]
    assert groups == [(True, 0.1, ["layers.0.up.weight"]), (False, 0.1, others), (False, 0.0, ["layers.0.up.bias"])]
    one = parameter_groups(module, settings("adafactor", weight_decay=0.0))
    assert [(len(group["params"]), group["weight_decay"]) for group in one] == [(6, 0.0)]


def orthogonalised(matrix: Tensor) -> Tensor:
    """Five steps of the odd polynomial of Jordan et al. on the singular values of a matrix, from their sum of squares on."""
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = values / values.square().sum().sqrt()
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return (left * values) @ right


def test_muon_takes_the_steps_of_its_formula_and_adamw_those_of_the_others() -> None:
    module, alone = Layered(), Layered()
    optimizer = build_optimizer(module, settings(adam_betas=(0.9, 0.9)))
    plain = torch.optim.AdamW(
        [{"params": [alone.layers[0]["up"].bias], "weight_decay": 0.0}, {"params": [alone.embed.weight, alone.head.weight]}],
        lr=0.01, betas=(0.9, 0.9), weight_decay=0.1, fused=True,
    )  # fmt: skip
    expected, momentum = module.layers[0]["up"].weight.detach().double(), torch.zeros(6, 4, dtype=torch.float64)
    for step in range(3):
        for each in (module, alone):
            with_gradients(each, step)
        gradient = module.layers[0]["up"].weight.grad.double()
        momentum = 0.95 * momentum + 0.05 * gradient
        update = orthogonalised(0.05 * gradient + 0.95 * momentum)
        expected = expected * (1 - 0.01 * 0.1) - 0.01 * 0.2 * 6**0.5 * update
        optimizer.step()
        plain.step()
    held = optimizer.state[module.layers[0]["up"].weight]["momentum_buffer"]
    assert torch.allclose(held.double(), momentum, atol=1e-6)
    assert torch.allclose(module.layers[0]["up"].weight.double(), expected, atol=5e-4)  # torch orthogonalises in bfloat16
    assert torch.equal(module.layers[0]["up"].bias, alone.layers[0]["up"].bias)
    assert torch.equal(module.head.weight, alone.head.weight)
    assert torch.equal(module.embed.weight, alone.embed.weight)


def test_the_learning_rate_of_a_group_reaches_both_parts() -> None:
    module = Layered()
    optimizer = build_optimizer(module, settings(weight_decay=0.0))
    before = [parameter.detach().clone() for parameter in module.parameters()]
    with_gradients(module)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    assert all(torch.equal(now, then) for now, then in zip(module.parameters(), before, strict=True))


def test_adafactor_scales_its_step_by_the_size_of_a_parameter() -> None:
    module = Layered()
    with torch.no_grad():
        module.head.weight.fill_(0.5)
    rate = 0.03  # another than the default of torch's class
    optimizer = build_optimizer(module, settings("adafactor", weight_decay=0.0, learning_rate=rate))
    module.head.weight.grad = torch.ones_like(module.head.weight)
    optimizer.step()
    assert torch.allclose(module.head.weight, torch.full_like(module.head.weight, 0.5 - rate * 0.5))


def test_a_loaded_state_goes_on_as_if_nothing_had_happened() -> None:
    found = []
    for interrupted in (False, True):
        module = Layered()
        optimizer = build_optimizer(module, settings())
        for step in range(4):
            if interrupted and step == 2:
                state = optimizer.state_dict()
                optimizer = build_optimizer(module, settings())
                optimizer.load_state_dict(state)
            with_gradients(module, step)
            assert optimizer.step(lambda: 1.5) == 1.5
        found.append([parameter.detach() for parameter in module.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def changes_of(optimizer: str, stage: int) -> dict[str, Any]:
    learner = {"weight_decay": 0.1, "lr_schedule": "cosine", "max_grad_norm": 0.5, "critic_warmup_steps": 1}
    return {"learner": {**learner, "optimizer": optimizer, "zero_stage": stage}, "algo": {"advantage_estimator": "gae"}}


def of_learner(learner: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in learner._started.named_weights()}


@pytest.mark.parametrize(("optimizer", "stage"), CASES)
def test_a_learner_that_is_loaded_goes_on_bit_for_bit(optimizer: str, stage: int, tiny_model: str, tmp_path: Path) -> None:
    if optimizer in EIGHT:
        pytest.importorskip("bitsandbytes")
    changes = changes_of(optimizer, stage)
    learner = started(tiny_model, changes)
    begin = of_learner(learner)
    steps(learner, 0, 2)
    learner.save_checkpoint(str(tmp_path), 2)
    saved, expected = of_learner(learner), (steps(learner, 2, 4), of_learner(learner))
    assert all(not torch.equal(begin[name], saved[name]) for name in begin)
    learner.close()
    again = started(tiny_model, changes)
    assert again.load_checkpoint(str(tmp_path)) == 2
    assert steps(again, 2, 4) == expected[0]
    assert [name for name, tensor in of_learner(again).items() if not torch.equal(tensor, expected[1][name])] == []
    exported = exported_of(again, tmp_path)
    again.close()
    assert all(torch.equal(exported[name], saved[name]) for name in exported)


def exported_of(learner: Any, checkpoint: Path) -> dict[str, Tensor]:
    from agentrl.learner.export import export_checkpoint

    export_checkpoint(checkpoint, learner._started.settings, checkpoint / "exported")
    return load_file(checkpoint / "exported" / "model.safetensors")


def test_a_state_is_not_taken_apart_for_another_zero_stage(tiny_model: str, tmp_path: Path) -> None:
    learner = started(tiny_model, changes_of("adafactor", 0))
    steps(learner, 0, 1)
    learner.save_checkpoint(str(tmp_path), 1)
    learner.close()
    again = started(tiny_model, changes_of("adafactor", 1))
    with pytest.raises(CheckpointError, match=r"adafactor is of --num-learners 1, --zero-stage 0; resume with the same"):
        again.load_checkpoint(str(tmp_path))
    again.close()


def test_muon_trains_the_matrices_of_an_adapter(tmp_path: Path) -> None:
    from agentrl.learner.lora import add_adapter
    from agentrl.learner.models import PolicyModel, load_model
    from tests.learner_support import make_settings

    folder = write_model(tmp_path)
    model = load_model(make_settings(folder), trained=False)
    assert len(hidden_matrices(PolicyModel(model).requires_grad_(True))) == 14  # seven in each of two layers
    add_adapter(model, LoraConfig(lora_rank=2), base=folder)
    assert {min(matrix.shape) for matrix in hidden_matrices(PolicyModel(model))} == {2}

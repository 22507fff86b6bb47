"""The gradient of a step on given rows, of each objective, does not depend on the ranks that compute it, nor on what each of them has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor

from agentrl.algo.plan import AlgoConfig
from agentrl.learner.settings import LearnerSettings
from tests.e2e.test_tensor_parallel import joined
from tests.learner_support import largest_difference, write_experts, write_model
from tests.ports import free_ports
from tests.unit.learner.test_row_objective import SPREAD, named, ragged, settings_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero 0": (2, {"zero_stage": 0, "micro_batch_tokens": 60}),
    "zero 2, packed": (2, {"zero_stage": 2, "micro_batch_tokens": 60, "attn_implementation": "varlen"}),
    "zero 3": (2, {"zero_stage": 3, "micro_batch_tokens": 60}),
    "sequences in two parts": (2, {"zero_stage": 2, "sequence_parallel": 2, "micro_batch_tokens": 100}),
    "sequences in two parts, zero 3": (4, {"zero_stage": 3, "sequence_parallel": 2, "share_prompts": False}),
    "layers in two parts": (2, {"zero_stage": 0, "learner_tensor_parallel": 2, "micro_batch_tokens": 60}),
    "layers in two parts, zero 2": (4, {"zero_stage": 2, "learner_tensor_parallel": 2, "micro_batch_tokens": 60}),
}
EXPERTS = [SPREAD[0], SPREAD[1]]


def step_of(settings: LearnerSettings, name: str, rank: int, world: int, port: int) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The gradient of a step on ragged rows, whole or this rank's parts, and its metrics."""
    from agentrl.learner.deepspeed.ranks import join
    from agentrl.learner.state import load_state

    learner = settings.learner
    together = {"sequence_parallel": learner.sequence_parallel, "tensor_parallel": learner.learner_tensor_parallel}
    ranks = join(rank, world, master_port=port, master_addr="127.0.0.1", device="cpu", timeout_s=120.0, **together)
    state = load_state(settings, ranks)
    from deepspeed.utils import safe_get_full_grad

    found: dict[str, Tensor] = {}
    engine = state.models.policy
    update = type(engine).update

    def collect(rate: float) -> float | None:
        found.update({each: safe_get_full_grad(part).detach().clone().float() for each, part in engine.module.named_parameters()})
        return update(engine, rate)

    engine.update = collect  # type: ignore[method-assign]
    metrics = state.train_rows(0, ragged(name))
    state.close()
    return found, metrics


def on_a_rank(rank: int, ports: list[int], cases: dict[str, tuple[LearnerSettings, str]], out: Path, world: int) -> None:
    for number, (settings, name) in enumerate(cases.values()):
        torch.save(step_of(settings, name, rank, world, ports.pop()), out / f"{number}-{rank}.pt")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("model"), **HEADS)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Reference and teacher: another model."""
    return write_model(tmp_path_factory.mktemp("other"), seed=3, **HEADS)


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_experts(tmp_path_factory.mktemp("experts"), norm_topk_prob=True, **HEADS)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_has_the_gradient_and_the_metrics_of_one_rank(layout: str, model: str, other: str, experts: str, tmp_path: Path) -> None:
    world, learner = LAYOUTS[layout]
    cases = {named(case): (model, case, other, None) for case in SPREAD}
    if "layers" not in layout:  # experts are not divided
        balanced = AlgoConfig(aux_loss_coef=0.5)
        cases |= {f"{named(case)} experts": (experts, case, experts, balanced) for case in EXPERTS}

    def settings(chosen: str, case: tuple[str, Any], second: str, algo: AlgoConfig | None, **rest: Any) -> LearnerSettings:
        return settings_of(chosen, *case, second, algo, **{"learner_backend": "deepspeed", **rest})

    spread = {each: (settings(*case, **learner), case[1][0]) for each, case in cases.items()}
    mp.spawn(on_a_rank, args=(free_ports(len(cases)), spread, tmp_path, world), nprocs=world)
    size = learner.get("learner_tensor_parallel", 1)
    for number, (each, case) in enumerate(cases.items()):
        expected, metrics = step_of(settings(*case), case[1][0], 0, 1, 0)
        scale = max(float(part.abs().max()) for part in expected.values())
        found = [torch.load(tmp_path / f"{number}-{rank}.pt") for rank in range(world)]
        for first in range(0, world, size):
            parts = [found[rank][0] for rank in range(first, first + size)]
            gradient = {key: joined([part[key] for part in parts], value.shape) for key, value in expected.items()}
            assert largest_difference(gradient, expected) < 1e-5 * scale, each
        different = ("time/", "padding", "micro_batches", "shared_prompts", "tokens/saved")
        same = [figure for figure in metrics if not figure.startswith(different)]
        for _, figures in found:
            assert {key: figures[key] for key in same} == pytest.approx({key: metrics[key] for key in same}, rel=1e-4, abs=2e-5), each

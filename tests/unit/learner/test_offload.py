"""The state of a learner out of the GPU's memory and back, on a CPU: everything is copied to other memory, and nothing else changes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from agentrl.learner.deepspeed import offload as moves
from agentrl.learner.learner import LearnerRank
from tests.learner_support import CollectingSender, largest_difference, make_groups, make_settings


def trained(model: str, *, moved: bool, **changes: Any) -> dict[str, torch.Tensor]:
    learner = LearnerRank(make_settings(model, **changes), CollectingSender())
    learner.start(0, 1, 0)
    state = learner._started
    engines = [engine.engine for engine in state._trained]
    for step in range(2):
        if moved:
            for engine in engines:
                held = [tensor.untyped_storage() for tensor in (*weights(engine), *masters(engine))]  # so that no address is used again
                before = {storage.data_ptr() for storage in held}
                moves.offload(engine, keep_weights=True, pin=True)
                assert {pointer(weight) for weight in weights(engine)} <= before
                assert not {pointer(master) for master in masters(engine)} & before
                exported = {name: tensor.clone() for name, tensor in state.named_weights()}
                moves.offload(engine, keep_weights=False, pin=True)
                moves.offload(engine, keep_weights=False, pin=True)  # twice is as once
                if engine.zero_optimization_stage() and not step:  # else CPU memory is the same, and a move is none
                    assert not {pointer(weight) for weight in weights(engine)} & before
            learner.reload()
            assert largest_difference(exported, {name: tensor.clone() for name, tensor in state.named_weights()}) == 0.0
        learner.train(step, *make_groups(seed=step, version=step))
    found = {name: tensor.detach().clone() for name, tensor in state.named_weights()}
    learner.close()
    return found


@pytest.mark.parametrize(
    ("stage", "dtype"), [(0, "float32"), (1, "float32"), (2, "float32"), (3, "float32"), (2, "bfloat16"), (3, "bfloat16")]
)
def test_moving_the_state_changes_nothing(tiny_model: str, stage: int, dtype: str) -> None:
    settings = {"learner": {"zero_stage": stage, "learner_dtype": dtype}, "algo": {"advantage_estimator": "gae"}}
    assert largest_difference(trained(tiny_model, moved=False, **settings), trained(tiny_model, moved=True, **settings)) == 0.0


@pytest.mark.parametrize("stage", [2, 3])
def test_an_optimizer_in_cpu_memory_stays_there(tiny_model: str, stage: int) -> None:
    """DeepSpeed would bring what moved back to the GPU."""
    learner = LearnerRank(make_settings(tiny_model, learner={"zero_stage": stage, "offload": ("optimizer",)}), CollectingSender())
    learner.start(0, 1, 0)
    engine = learner._started._trained[0].engine
    before = {pointer(master) for master in masters(engine)}
    learner.offload(keep_weights=False)
    assert moves._MASTER not in engine.optimizer.offloaded_states
    assert moves._OPTIMIZER not in engine.optimizer.offloaded_states
    learner.reload()
    assert {pointer(master) for master in masters(engine)} == before
    learner.train(0, *make_groups())
    learner.close()


def pointer(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def weights(engine: Any) -> list[torch.Tensor]:
    return [getattr(parameter, "ds_tensor", parameter) for parameter in engine.module.parameters()]


def masters(engine: Any) -> list[torch.Tensor]:
    optimizer = engine.optimizer
    return getattr(optimizer, "single_partition_of_fp32_groups", None) or getattr(optimizer, "fp32_partitioned_groups_flat", [])


def test_gradients_are_dropped_without_zero_too() -> None:
    module = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    moves.offload(SimpleNamespace(optimizer=optimizer, module=module, zero_optimization_stage=lambda: 0), keep_weights=True, pin=False)
    assert [parameter.grad for parameter in module.parameters()] == [None, None]

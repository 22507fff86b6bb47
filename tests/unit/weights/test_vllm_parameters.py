"""Places of a worker's parts in the tensors of a checkpoint."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from agentrl.weights.vllm_parameters import _linear, _places


def layer_of(kind: str, **attributes: Any) -> Any:
    """A layer of vLLM with what is read of it, because making one needs a group of workers."""
    from vllm.model_executor.layers import linear

    layer = getattr(linear, kind).__new__(getattr(linear, kind))
    torch.nn.Module.__init__(layer)
    for name, value in attributes.items():
        setattr(layer, name, value)
    return layer


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_rows_of_inputs_lie_beside_those_of_the_workers_before(rank: int) -> None:
    layer = layer_of("RowParallelLinear", tp_rank=rank, weight=torch.zeros(4, 3), bias=torch.zeros(4))
    parts = list(_linear(layer, ["o_proj"], first=rank == 0))
    assert (parts[0].row, parts[0].column) == (0, 3 * rank)
    assert [part.name for part in parts[1:]] == ["o_proj.bias"] * (rank == 0)


@pytest.mark.parametrize(("rank", "keys"), [(0, 0), (1, -1), (2, 8), (3, -1)])
def test_copies_of_the_heads_of_another_worker_have_no_place(rank: int, keys: int) -> None:
    layer = layer_of("QKVParallelLinear", tp_rank=rank, num_heads=2, head_size=8, num_kv_heads=1, num_kv_head_replicas=2)
    assert _places(layer, 32) == [(16, 16 * rank), (8, keys), (8, keys)]

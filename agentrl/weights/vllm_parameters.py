"""The weights that a worker of vLLM computes with, as parts of the tensors of a checkpoint; nothing is gathered or copied to the CPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from agentrl.weights.digests import digest

FAMILIES = frozenset({"idefics3", "llama", "mistral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "mixtral"})
"""Types of models of which vLLM keeps the tensors of a checkpoint as they are; those of experts are not read."""

PROBED = 256
"""Rows of an identity matrix that go through a layer at once."""


@dataclass(frozen=True, slots=True)
class Part:
    """A rectangle of a tensor of a checkpoint."""

    name: str  # of the tensor in a checkpoint, or of an output layer that is tied to the embedding
    tensor: Tensor  # the numbers
    row: int = 0  # place of its first row
    column: int = 0  # place of its first column


def layer_sizes(layer: Any) -> tuple[int, int, torch.dtype]:
    """Return inputs, outputs and data type of a linear layer on this worker, or of an embedding whose matrix gives the logits."""
    if isinstance(layer, VocabParallelEmbedding):
        return layer.embedding_dim, layer.num_embeddings_per_partition, layer.weight.dtype
    inputs = getattr(layer, "input_size_per_partition", layer.input_size)
    outputs = getattr(layer, "output_size_per_partition", layer.output_size)
    return inputs, outputs, layer.params_dtype


def worker_digests(model: Any, shapes: Mapping[str, Sequence[int]], dtype: torch.dtype) -> dict[str, list[Any]]:
    """Return the digests of this worker's parts: name -> name of the learner's tensor, and the digest as a number of 64 bits with a sign.

    Tensors that are not among `shapes`, the learner's, and those of other families of models are left out.
    """
    if getattr(model.config, "model_type", "") not in FAMILIES:
        return {}
    # By the type itself, because the output layer's class inherits from the embedding's.
    embedding = next((f"{path}.weight" for path, layer in model.named_modules() if type(layer) is VocabParallelEmbedding), "")
    found: dict[str, list[Any]] = {}
    for part in _parts(model, shapes):
        whole = part.name if part.name in shapes else embedding
        if whole not in shapes or (whole != part.name and not part.name.endswith("lm_head.weight")):
            continue
        value = digest(part.tensor, dtype, row=part.row, column=part.column)
        found[part.name] = [whole, value - 2**64 if value >= 2**63 else value]
    return found


def _parts(model: Any, shapes: Mapping[str, Sequence[int]]) -> Iterator[Part]:
    packed: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", {})
    first = get_tensor_model_parallel_rank() == 0
    layer: Any
    for path, layer in model.named_modules():
        if isinstance(layer, VocabParallelEmbedding):
            indices = layer.shard_indices
            # vLLM pads the vocabulary with rows that are in no checkpoint.
            weight = _weight(layer)[: indices.num_org_elements]
            yield Part(f"{path}.weight", weight, row=indices.org_vocab_start_index)
        elif isinstance(layer, LinearBase):
            above, _, own = path.rpartition(".")
            yield from _linear(layer, [f"{above}.{name}" for name in packed.get(own, [own])], first=first)
        elif first:  # what is not divided is the same on all workers
            for name, tensor in layer.named_parameters(prefix=path, recurse=False):
                if list(tensor.shape) == list(shapes.get(name, ())):
                    yield Part(name, tensor)


def _linear(layer: Any, names: Sequence[str], *, first: bool) -> Iterator[Part]:
    """Yield weight and bias of a layer, which several layers of the checkpoint may be in, one below the other."""
    weight, bias = _weight(layer), getattr(layer, "bias", None)
    if isinstance(layer, RowParallelLinear):
        yield Part(f"{names[0]}.weight", weight, column=layer.tp_rank * weight.shape[1])
        # Every worker holds the whole bias of such a layer, and digests are added up.
        if bias is not None and first:
            yield Part(f"{names[0]}.bias", bias)
        return
    places = _places(layer, weight.shape[0])
    bounds = [0]
    for size, _ in places:
        bounds.append(bounds[-1] + size)
    for name, (start, end), (_, row) in zip(names, pairwise(bounds), places, strict=True):
        if row < 0:
            continue
        yield Part(f"{name}.weight", weight[start:end], row=row)
        if bias is not None:
            yield Part(f"{name}.bias", bias[start:end], row=row)


def _places(layer: Any, rows: int) -> list[tuple[int, int]]:
    """Return of each layer of the checkpoint how many rows this worker has, and the place of the first; -1 for copies of another's."""
    rank = getattr(layer, "tp_rank", 0)
    if isinstance(layer, QKVParallelLinear):
        queries, keys, values = (
            layer.num_heads * layer.head_size,
            layer.num_kv_heads * layer.head_size,
            layer.num_kv_heads * getattr(layer, "v_head_size", layer.head_size),
        )
        group, copy = divmod(rank, layer.num_kv_head_replicas)
        return [(queries, rank * queries), *((size, -1 if copy else group * size) for size in (keys, values))]
    if isinstance(layer, MergedColumnParallelLinear):
        sizes = [size // layer.tp_size for size in layer.output_sizes]
        return [(size, rank * size) for size in sizes]
    if isinstance(layer, ColumnParallelLinear):
        return [(rows, rank * rows)]
    return [(rows, -1 if rank else 0)]  # the same on all workers


def _weight(layer: Any) -> Tensor:
    """Return the matrix that a layer multiplies by # [outputs, inputs].

    On a CPU that is a packed copy, which is read by sending an identity matrix through the layer.
    """
    linear = getattr(layer, "cpu_linear", None)
    if linear is None:
        weight: Tensor = layer.weight
        return weight
    inputs, _, dtype = layer_sizes(layer)
    rows = torch.split(torch.eye(inputs, dtype=dtype), PROBED)
    return torch.cat([linear(part, layer.weight, None) for part in rows]).T

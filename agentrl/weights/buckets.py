"""Weights in buckets: parameters are packed one after another into two buffers, of which one is sent while the other is filled."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from agentrl.core.errors import WeightSyncError
from agentrl.weights.groups import Carrier
from agentrl.weights.sender import NamedTensors

BUCKET_BYTES = 512 * 2**20
BUFFERS = 2


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Name, data type and shape of one tensor that is sent."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of the tensor, bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def describe(named_tensors: NamedTensors) -> list[TensorInfo]:
    """Return the description of every tensor; under ZeRO-3 a pass over all parameters, on every rank."""
    return [TensorInfo(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in named_tensors]


def as_vllm_reads(infos: Iterable[TensorInfo]) -> dict[str, Any]:
    """Return names, data types and shapes in the form of vLLM's receivers."""
    infos = list(infos)
    return {
        "names": [info.name for info in infos],
        "dtype_names": [str(info.dtype).removeprefix("torch.") for info in infos],
        "shapes": [list(info.shape) for info in infos],
    }


def cut(infos: Iterable[TensorInfo], bucket_bytes: int) -> list[list[TensorInfo]]:
    """Divide tensors into buckets; a bucket ends with the tensor that takes it beyond `bucket_bytes`, as vLLM's receivers expect."""
    buckets: list[list[TensorInfo]] = []
    held = bucket_bytes + 1
    for info in infos:
        if held > bucket_bytes:
            buckets.append([])
            held = 0
        buckets[-1].append(info)
        held += info.nbytes
    return buckets


def send_in_buckets(
    named_tensors: NamedTensors, infos: Sequence[TensorInfo], channel: Carrier, device: torch.device, bucket_bytes: int = BUCKET_BYTES
) -> None:
    """Pack and send all tensors; returns when the last byte is sent.

    Beside the tensor that `named_tensors` holds at the moment, at most two buffers are in memory, each as large as the largest bucket.

    Raises:
        WeightSyncError: If the tensors are not those of `infos`; receivers would cut the bytes at other places.
    """
    buckets = cut(infos, bucket_bytes)
    largest = max((sum(info.nbytes for info in bucket) for bucket in buckets), default=0)
    buffers = [channel.buffer(largest, device) for _ in range(min(BUFFERS, len(buckets)))]
    under_way: list[Callable[[], object]] = []
    tensors = iter(named_tensors)
    for index, bucket in enumerate(buckets):
        if len(under_way) == BUFFERS:
            under_way.pop(0)()
        buffer = buffers[index % BUFFERS]
        under_way.append(channel.begin(buffer[: _fill(buffer, bucket, tensors)]))
    extra = next(tensors, None)  # also lets the other ranks end their last collective operation
    for wait in under_way:
        wait()
    if extra is not None:
        raise WeightSyncError(f"the model has a parameter {extra[0]!r} that engines were not told of")


def receive_in_buckets(
    infos: Iterable[TensorInfo],
    channel: Carrier,
    device: torch.device,
    bucket_bytes: int,
    load: Callable[[Sequence[tuple[str, Tensor]]], object],
) -> None:
    """Receive what `send_in_buckets` sends, and load it bucket by bucket; one bucket is received while the one before is loaded.

    Loaded tensors share memory with their bucket, and may be kept.
    """
    under_way: list[tuple[list[TensorInfo], Tensor, Callable[[], object]]] = []
    for bucket in cut(infos, bucket_bytes):
        buffer = torch.empty(sum(info.nbytes for info in bucket), dtype=torch.uint8, device=device)
        under_way.append((bucket, buffer, channel.begin(buffer)))
        if len(under_way) == BUFFERS:
            _take(*under_way.pop(0), load)
    for waiting in under_way:
        _take(*waiting, load)


def _take(
    bucket: Sequence[TensorInfo], buffer: Tensor, wait: Callable[[], object], load: Callable[[Sequence[tuple[str, Tensor]]], object]
) -> None:
    wait()
    found, used = [], 0
    for info in bucket:
        part = buffer[used : used + info.nbytes]
        part = part.clone() if used % info.dtype.itemsize else part  # numbers begin at multiples of their size
        found.append((info.name, part.view(info.dtype).view(info.shape)))
        used += info.nbytes
    load(found)


def _fill(buffer: Tensor, bucket: Sequence[TensorInfo], tensors: Iterator[tuple[str, Tensor]]) -> int:
    """Copy the next tensors into a buffer; returns the bytes it then holds."""
    used = 0
    for info in bucket:
        name, tensor = next(tensors, ("nothing", torch.empty(0)))
        found = TensorInfo(name, tensor.dtype, tuple(tensor.shape))
        if found != info:
            raise WeightSyncError(f"engines were told to expect {info} but the next parameter is {found}")
        buffer[used : used + info.nbytes].copy_(tensor.detach().contiguous().view(-1).view(torch.uint8))
        used += info.nbytes
    return used

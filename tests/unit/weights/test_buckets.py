"""Weights in buckets, over gloo: what arrives, how much memory it takes, and that vLLM's own receiver reads it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("vllm")

from agentrl.core.errors import WeightSyncError
from agentrl.core.protocols import Membership
from agentrl.weights.buckets import TensorInfo, cut, describe, send_in_buckets
from tests.group_support import Engine, sender

SHAPES = [(300,), (8, 11), (2,), (64, 5), (4,), (40, 40), (2, 3, 3)]  # even sizes: vLLM reads no tensor of 4-byte numbers between two words
DTYPES = [torch.float32, torch.bfloat16, torch.int32]


def tensors(seed: int) -> list[tuple[str, Tensor]]:
    torch.manual_seed(seed)
    made = [(torch.randn(shape) * 50).to(DTYPES[index % len(DTYPES)]) for index, shape in enumerate(SHAPES * 3)]
    return [(f"layer.{index}", tensor.mT if tensor.dim() == 2 else tensor) for index, tensor in enumerate(made)]


@pytest.mark.parametrize("kind", ["nccl", "ipc"])
@pytest.mark.parametrize("bucket_bytes", [1, 1000, 10**6])
def test_every_version_arrives_byte_for_byte(kind: str, bucket_bytes: int) -> None:
    learner, engine, members = sender(kind, bucket_bytes=bucket_bytes), Engine("engine-0", kind), Membership(1, ("engine-0",))
    try:
        for version in (1, 2):
            update = learner.send(tensors(version), version, members)
            assert update is not None
            assert ("update" in update.payload) == (version == 1)
            assert engine.take(update) == ""
            learner.settle()
            assert all(torch.equal(engine.loaded[name], tensor) for name, tensor in tensors(version))
            assert all(engine.loaded[name].dtype == tensor.dtype for name, tensor in tensors(version))
    finally:
        learner.close()
        engine.member.leave()


class Kept:
    """A channel that keeps what it is given, and sends it only when it is waited for."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def buffer(self, size: int, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def end(self) -> None:
        return

    def abort(self) -> None:
        return

    def begin(self, bucket: Tensor) -> Any:
        return lambda: self.sent.append(bucket.numpy().tobytes())


def test_two_buckets_are_all_the_memory_it_takes() -> None:
    count, size, bucket = 64, 250_000, 4_000_000
    infos = [TensorInfo(f"w{index}", torch.float32, (size,)) for index in range(count)]

    def gathered() -> Iterator[tuple[str, Tensor]]:
        for index in range(count):
            yield f"w{index}", torch.full((size,), float(index))

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        send_in_buckets(gathered(), infos, Kept(), torch.device("cpu"), bucket)
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]  # type: ignore[union-attr]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    largest = max(sum(info.nbytes for info in part) for part in cut(infos, bucket))
    assert largest == 5_000_000
    assert 2 * largest < peak <= 2 * largest + 3 * size * 4  # and the parameter that is gathered, with the next one
    assert live == 0


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(0, 40), max_size=30), bucket_bytes=st.integers(1, 100))
def test_every_byte_arrives_in_order(sizes: list[int], bucket_bytes: int) -> None:
    given = [(f"w{index}", torch.full((size,), index % 256, dtype=torch.uint8)) for index, size in enumerate(sizes)]
    channel = Kept()
    send_in_buckets(given, describe(given), channel, torch.device("cpu"), bucket_bytes)
    assert b"".join(channel.sent) == b"".join(tensor.numpy().tobytes() for _, tensor in given)
    assert all(sum(info.nbytes for info in bucket[:-1]) <= bucket_bytes for bucket in cut(describe(given), bucket_bytes))


@pytest.mark.parametrize(
    "sent",
    [
        [("a", torch.zeros(3)), ("b", torch.zeros(4))],
        [("a", torch.zeros(3, dtype=torch.float64)), ("b", torch.zeros(5))],
        [("a", torch.zeros(3))],
        [("a", torch.zeros(3)), ("b", torch.zeros(5)), ("c", torch.zeros(1))],
    ],
)
def test_tensors_other_than_those_described_are_refused(sent: list[tuple[str, Tensor]]) -> None:
    infos = describe([("a", torch.zeros(3)), ("b", torch.zeros(5))])
    with pytest.raises(WeightSyncError, match="engines were"):
        send_in_buckets(sent, infos, Kept(), torch.device("cpu"))

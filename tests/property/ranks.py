"""Data-parallel ranks as threads, with a sum over them as the collective."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Ranks:
    """One rank's view of the collective: call it with a tensor and get the sum over all ranks."""

    def __init__(self, rank: int, slots: list[Tensor | None], barrier: threading.Barrier) -> None:
        self.rank, self.slots, self.barrier = rank, slots, barrier

    def __call__(self, tensor: Tensor) -> Tensor:
        self.slots[self.rank] = tensor
        self.barrier.wait(timeout=10)
        total = torch.stack([slot for slot in self.slots if slot is not None]).sum(0)
        self.barrier.wait(timeout=10)
        return total

    @classmethod
    def run(cls, size: int, work: Callable[[int, Ranks], T]) -> list[T]:
        """Run `work` once per rank, all at the same time."""
        slots: list[Tensor | None] = [None] * size
        barrier = threading.Barrier(size)
        with ThreadPoolExecutor(size) as pool:
            futures = [pool.submit(work, rank, cls(rank, slots, barrier)) for rank in range(size)]
            return [future.result(timeout=30) for future in futures]

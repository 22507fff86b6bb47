"""Seconds by phase of a step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from agentrl.core.metrics import MetricSums


class Clock:
    """Adds up the wall time of named phases; on a GPU a phase ends when the device has finished it.

    Args:
        device: Where the work runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds: dict[str, float] = {}
        self._whole = 0.0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block as part of the phase `name`."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - begin

    @contextmanager
    def running(self) -> Iterator[None]:
        """Time the block as part of the whole."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._whole += time.perf_counter() - begin

    def record(self, stats: MetricSums) -> None:
        """Report ``time/<phase>_s`` and, of the whole, ``time/train_s``; of several ranks, the slowest counts."""
        for name, seconds in self._seconds.items():
            stats.high(f"time/{name}_s", seconds)
        stats.high("time/train_s", self._whole)

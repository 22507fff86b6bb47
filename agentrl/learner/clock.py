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
        self._start = time.perf_counter()
        self._seconds: dict[str, float] = {}

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

    def record(self, stats: MetricSums) -> None:
        """Report ``time/<phase>_s`` and ``time/train_s``; of several ranks, the slowest counts."""
        for name, seconds in self._seconds.items():
            stats.high(f"time/{name}_s", seconds)
        stats.high("time/train_s", time.perf_counter() - self._start)

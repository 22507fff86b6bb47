"""Statistics that need no model."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from agentrl.core.metrics import MetricSums
from agentrl.learner.batch import Batch
from agentrl.learner.layout import MicroBatch


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


def describe_batch(batch: Batch, step: int) -> MetricSums:
    """Sizes and ages of a whole batch.

    Args:
        batch: The batch.
        step: Version of the weights it is trained on.

    Returns:
        ``tokens/trained`` (sampled ones), ``tokens/rows`` (all), ``rows``, ``episodes`` and ``groups`` (as in `Batch`: one for
        each agent); over trained tokens
        ``staleness/mean``, ``staleness/max`` and ``staleness/share_<k>``, the share that is exactly k versions old.
    """
    stats = MetricSums()
    for name, value in {
        "tokens/trained": batch.num_actions,
        "tokens/rows": batch.num_tokens,
        "rows": batch.num_rows,
        "episodes": batch.num_episodes,
        "groups": batch.num_groups,
    }.items():
        stats.total(name, float(value))
    age = step - batch.versions
    stats.mean("staleness/mean", float(age.sum()), float(batch.num_actions))
    stats.high("staleness/max", float(age.max()))
    for versions, count in zip(*(part.tolist() for part in torch.unique(age, return_counts=True)), strict=True):
        stats.mean(f"staleness/share_{versions}", float(count), float(batch.num_actions))
    return stats


def describe_layout(micros: Sequence[MicroBatch]) -> MetricSums:
    """``padding``, the share of what goes through the model that is padding, and ``micro_batches`` over all ranks.

    Also ``shared_prompts``, the share of the rows' tokens that need not go through it, because they are another row's prompt.
    """
    stats = MetricSums()
    area = sum(micro.input_ids.numel() for micro in micros)
    tokens, row_tokens = sum(micro.num_tokens for micro in micros), sum(micro.num_row_tokens for micro in micros)
    stats.mean("padding", float(area - tokens), float(area))
    stats.mean("shared_prompts", float(row_tokens - tokens), float(row_tokens))
    stats.total("micro_batches", float(len(micros)))
    return stats

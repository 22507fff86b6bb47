"""Statistics that need no model."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from agentrl.core.metrics import MetricSums
from agentrl.learner.batch import Batch
from agentrl.learner.layout import MicroBatch


def describe_batch(batches: Sequence[Batch], step: int) -> MetricSums:
    """Sizes and ages of a step's whole batch.

    Args:
        batches: The batch, or its parts.
        step: Version of the weights it is trained on.

    Returns:
        ``tokens/trained`` (sampled ones), ``tokens/rows`` (all), ``rows``, ``episodes`` and ``groups`` (as in `Batch`: one for
        each agent); over trained tokens
        ``staleness/mean``, ``staleness/max`` and ``staleness/share_<k>``, the share that is exactly k versions old.
    """
    stats = MetricSums()
    for name, value in {
        "tokens/trained": sum(batch.num_actions for batch in batches),
        "tokens/rows": sum(batch.num_tokens for batch in batches),
        "rows": sum(batch.num_rows for batch in batches),
        "episodes": sum(batch.num_episodes for batch in batches),
        "groups": sum(batch.num_groups for batch in batches),
    }.items():
        stats.total(name, float(value))
    age = step - torch.cat([batch.versions for batch in batches])
    stats.mean("staleness/mean", float(age.sum()), float(len(age)))
    stats.high("staleness/max", float(age.max()))
    for versions, count in zip(*(part.tolist() for part in torch.unique(age, return_counts=True)), strict=True):
        stats.mean(f"staleness/share_{versions}", float(count), float(len(age)))
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

"""A few rows of a batch in the shape a model takes, and the way back to flat action tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from agentrl.learner.batch import Batch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """Rows that go through the model together; B rows of at most L tokens, `a` action tokens.

    Attributes:
        input_ids: Padded on the right, or all rows back to back in one. # [B, L] or [1, L]
        real: Which places of the flattened `input_ids` are not padding. # [B * L] bool
        position_ids: Places within the row, only where rows are back to back. # [1, L]
        select: Where in the flattened `input_ids` the output that predicts each action token is. # [a]
        targets: The action tokens. # [a]
        temperature: Sampling temperature of each action token. # [a]
        actions: Place of each action token among those of the batch. # [a]
        num_tokens: Tokens without padding.
    """

    input_ids: Tensor
    real: Tensor
    position_ids: Tensor | None
    select: Tensor
    targets: Tensor
    temperature: Tensor
    actions: Tensor
    num_tokens: int


def lay_out(batch: Batch, rows: Sequence[int], *, packed: bool) -> MicroBatch:
    """Take rows out of a batch.

    Causal attention never looks to the right, so padding there needs no mask; tokens after the last action token of a
    row decide nothing and are left out.

    Args:
        batch: The batch.
        rows: Numbers of the rows; none gives a micro-batch without action tokens, for a rank with nothing left to do.
        packed: Rows back to back in one sequence, told apart by `position_ids` (flash attention), instead of padded.
    """
    if not rows:
        return _nothing(batch)
    bounds = torch.searchsorted(batch.row, torch.arange(batch.num_rows + 1, device=batch.row.device)).tolist()
    starts = batch.offsets.tolist()
    spans = [torch.arange(bounds[row], bounds[row + 1], device=batch.row.device) for row in rows]
    ends = [int(batch.position[bounds[row + 1] - 1]) for row in rows]
    pieces = [batch.tokens[starts[row] : end] for row, end in zip(rows, ends, strict=True)]
    lengths = [len(piece) for piece in pieces]
    width = max(lengths)
    begins = [sum(lengths[:place]) if packed else place * width for place in range(len(rows))]
    select = [batch.position[span] - 1 - starts[row] + begin for row, span, begin in zip(rows, spans, begins, strict=True)]
    actions = torch.cat(spans)
    input_ids = torch.cat(pieces)[None] if packed else pad_sequence(pieces, batch_first=True)
    real = torch.arange(width, device=batch.row.device) < torch.tensor(lengths, device=batch.row.device)[:, None]
    return MicroBatch(
        input_ids=input_ids,
        real=torch.ones_like(input_ids[0], dtype=torch.bool) if packed else real.flatten(),
        position_ids=torch.cat([torch.arange(length, device=batch.row.device) for length in lengths])[None] if packed else None,
        select=torch.cat(select),
        targets=batch.tokens[batch.position[actions]],
        temperature=batch.temperature[actions],
        actions=actions,
        num_tokens=sum(lengths),
    )


def _nothing(batch: Batch) -> MicroBatch:
    empty = torch.zeros(0, dtype=torch.int64, device=batch.row.device)
    return MicroBatch(
        input_ids=batch.tokens[:1][None],
        real=torch.zeros(1, dtype=torch.bool, device=batch.row.device),
        position_ids=None,
        select=empty,
        targets=empty,
        temperature=batch.temperature[:0],
        actions=empty,
        num_tokens=0,
    )

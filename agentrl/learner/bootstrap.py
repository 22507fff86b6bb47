"""Values of the states in which episodes were cut short: rows that go on to them, and what the critic says there."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from agentrl.core.types import FinishReason, Turn, floats, ints
from agentrl.learner.batch import Batch

_NOTHING = Turn(prompt_ids=ints([]), token_ids=ints([]), logprobs=floats([]), versions=ints([]), finish_reason=FinishReason.ABORTED)
_TOKEN, _LOGPROB = ints([0]), floats([0.0])
"""A token that was never sampled: what predicts it is the state of the cut, and no model reads it."""


def with_cuts(batch: Batch) -> Batch:
    """Return a batch in which one more action token follows what each episode that was cut short read last; without any as it is.

    It is there to be valued, and not to be trained: what a token earned is that of the token before.
    """
    if not batch.cuts:
        return batch
    rows, lengths, actions = list(batch.rows), batch.row_lengths.clone(), batch.row_actions.clone()
    for number, unread in batch.cuts:
        turn = replace(unread or _NOTHING, token_ids=_TOKEN, logprobs=_LOGPROB, versions=_TOKEN)
        rows[number] = replace(rows[number], turns=(*rows[number].turns, turn))
        lengths[number] += len(turn.prompt_ids) + 1
        actions[number] += 1
    row = torch.arange(len(rows)).repeat_interleave(actions)
    begins = batch.row_actions.cumsum(0) - batch.row_actions
    place = torch.arange(len(row)) - (actions.cumsum(0) - actions)[row]
    source = begins[row] + torch.minimum(place, batch.row_actions[row] - 1)
    per_token = {name: getattr(batch, name)[source] for name in ("episode", "turn", "state", "logprobs", "versions", "token_rewards")}
    return replace(batch, rows=tuple(rows), row_lengths=lengths, row_actions=actions, row=row, **per_token)


def apart(values: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Divide the values of a batch that `with_cuts` made of `batch`.

    Args:
        values: Values of its action tokens, C of them at cuts. # [A + C]
        batch: The batch that it was made of, which has cuts.

    Returns:
        The values of the action tokens of `batch` # [A], and of the state in which each episode was cut, 0 for others # [E].
    """
    rows = torch.tensor([row for row, _ in batch.cuts])
    actions = batch.row_actions.clone()
    actions[rows] += 1
    ends = (actions.cumsum(0) - 1)[rows].to(values.device)
    sampled = torch.ones_like(values, dtype=torch.bool)
    sampled[ends] = False
    at_cut = values.new_zeros(batch.num_episodes)
    at_cut[batch.row_episode[rows].to(values.device)] = values[ends]
    return values[sampled], at_cut

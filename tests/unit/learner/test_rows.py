"""Rows of given tokens: what the model sees of them, which output is read, and groups that stay in one micro-batch."""

from __future__ import annotations

import pytest
import torch

from agentrl.core.types import ints
from agentrl.learner.layout import Layout
from agentrl.learner.rows import Rows, TokenRow
from agentrl.learner.sharding import pack, pad, plan_updates
from agentrl.learner.trees import one_row_bundles


def rows_of(*rows: tuple[list[int], list[int]]) -> Rows:
    """Rows of tokens and of places that are read."""
    made = tuple(TokenRow(tokens=ints(tokens), reads=ints(reads)) for tokens, reads in rows)
    counts = torch.tensor([len(row.reads) for row in made])
    lengths = torch.tensor([len(row.tokens) for row in made])
    return Rows(rows=made, row_lengths=lengths, row_actions=counts, row=torch.arange(len(made)).repeat_interleave(counts))


ROWS = rows_of(([5, 6, 7, 8, 9], [1, 2]), ([4, 3], [1]), ([2, 8, 4], [0, 1]))


def test_a_row_ends_with_the_last_place_that_is_read() -> None:
    assert ROWS.input_lengths().tolist() == [3, 2, 2]
    assert (ROWS.num_tokens, ROWS.num_actions, ROWS.num_rows) == (10, 5, 3)
    assert ROWS.row_group().tolist() == [0, 1, 2]


@pytest.mark.parametrize("packed", [False, True])
def test_the_token_behind_each_place_is_its_target(packed: bool) -> None:
    """That behind the end of a row is none, which is read by models that predict no token."""
    micro = Layout(ROWS).micro_batch(one_row_bundles(ROWS), packed=packed)
    assert micro.targets.tolist() == [7, 8, 0, 8, 4]
    assert micro.input_ids.flatten()[micro.select].tolist() == [6, 7, 3, 2, 8]
    assert micro.temperature.tolist() == [1.0] * 5


def test_groups_stay_whole_in_a_micro_batch() -> None:
    group = [0, 0, 1, 1, 2, 2]
    for packed in (False, True):
        for ranks in (1, 2):
            (plan,) = plan_updates(
                [9, 2, 8, 8, 3, 1], group, updates=1, ranks=ranks, budget=12, packed=packed, hidden_size=8, whole_groups=True
            )
            micros = [micro for rank in plan.micros for micro in rank if micro]
            assert sorted(row for micro in micros for row in micro) == [0, 1, 2, 3, 4, 5]
            assert all({group[row] for row in micro if row % 2} == {group[row] for row in micro if not row % 2} for micro in micros)


def test_atoms_fill_micro_batches_by_what_all_of_their_rows_take() -> None:
    assert pad([6, 5, 6, 2, 2, 2], [(0, 1), (2, 3), (4, 5)], 24) == [(0, 1, 2, 3), (4, 5)]
    assert pad([6, 5, 6, 2, 2, 2], [(0, 1), (2, 3), (4, 5)], 36) == [(0, 1, 2, 3, 4, 5)]
    assert pack([6, 5, 6, 2, 2, 2], [(0, 1), (2, 3), (4, 5)], 15) == [(0, 1, 4, 5), (2, 3)]
    assert pack([6, 5, 6, 2, 2, 2], [(0, 1), (2, 3), (4, 5)], 3) == [(0, 1), (2, 3), (4, 5)]

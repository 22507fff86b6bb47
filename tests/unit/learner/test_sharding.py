from __future__ import annotations

import pytest

from agentrl.core.types import Group, Task
from agentrl.learner.batch import collate
from agentrl.learner.sharding import balance, busiest, pack, pad, plan_updates, work
from agentrl.learner.trees import share_prefixes
from tests.benchmarks.balance import collate_seconds, episodes, max_over_mean
from tests.unit.learner.test_batch import trajectory, turn


def test_balance_gives_the_largest_to_the_emptiest() -> None:
    assert balance([7, 1, 5, 5, 2], [0, 1, 2, 3, 4], 2) == [[0, 1, 4], [2, 3]]


def test_pad_sorts_by_length_and_counts_padding() -> None:
    assert pad([10, 3, 9, 4, 20], [(0,), (1,), (2,), (3,), (4,)], 20) == [(4,), (0, 2), (3, 1)]


def test_short_rows_are_not_padded_to_long_ones_where_it_would_cost_much() -> None:
    assert pad([512, 512, 400, 100], [(0,), (1,), (2,), (3,)], 10**6) == [(0, 1, 2), (3,)]
    assert pad([50, 40, 3], [(0,), (1,), (2,)], 10**6) == [(0, 1, 2)]


def test_a_row_beyond_the_budget_goes_alone() -> None:
    assert pad([30, 2, 2], [(0,), (1,), (2,)], 8) == [(0,), (1, 2)]


def test_every_rank_runs_equally_many_micro_batches() -> None:
    (plan,) = plan_updates([8, 8, 8], [0, 0, 0], updates=1, ranks=2, budget=8, packed=False, hidden_size=8)
    assert plan.micros == (((0,), (2,)), ((1,), ()))
    assert plan.rows == (0, 1, 2)


def test_a_rank_without_rows_gets_empty_micro_batches() -> None:
    (plan,) = plan_updates([4], [0], updates=1, ranks=3, budget=8, packed=False, hidden_size=8)
    assert plan.micros == (((0,),), ((),), ((),))


def test_groups_without_rows_make_no_empty_update() -> None:
    plans = plan_updates([5, 5, 5], [0, 3, 3], updates=3, ranks=1, budget=100, packed=False, hidden_size=8)
    assert sorted(plan.rows for plan in plans) == [(0,), (1, 2)]


def test_no_more_updates_than_groups() -> None:
    assert len(plan_updates([4, 4], [0, 1], updates=5, ranks=1, budget=8, packed=False, hidden_size=8)) == 2


def test_packing_fills_up_without_padding() -> None:
    assert pack([6, 5, 4, 3, 20], [(0,), (1,), (2,), (3,), (4,)], 10) == [(4,), (0, 2), (1, 3)]


def test_a_packed_plan_needs_no_more_micro_batches_than_tokens_ask_for() -> None:
    (plan,) = plan_updates([8, 2, 5, 5], [0, 0, 0, 0], updates=1, ranks=1, budget=10, packed=True, hidden_size=8)
    assert plan.micros == (((0, 1), (2, 3)),)


def test_a_group_is_spread_over_ranks_by_work() -> None:
    """A row of 40 tokens is as much work as five of 10 in a model so narrow that attention is most of it."""
    lengths = [40, 10, 10, 10, 10, 10, 10, 10, 10]
    (plan,) = plan_updates(lengths, [0] * 9, updates=1, ranks=2, budget=100, packed=True, hidden_size=1)
    assert [sorted(row for micro in rank for row in micro) for rank in plan.micros] == [[0], [1, 2, 3, 4, 5, 6, 7, 8]]


@pytest.mark.parametrize(("ranks", "groups", "limit"), [(512, 256, 1.10), (8, 8, 1.15), (3, 7, 1.15)])
def test_ranks_are_about_equally_busy(ranks: int, groups: int, limit: float) -> None:
    assert max_over_mean(episodes(groups), ranks=ranks) <= limit


def test_shared_prompts_never_make_the_busiest_rank_busier() -> None:
    """Eight answers to one long prompt in one sequence would be most of the work of two ranks."""
    batch = collate([Group(group_id=0, task=Task("x"), trajectories=tuple(trajectory(turn([1] * 300, [2 + n] * 100)) for n in range(8)))])

    def most(parts: int, given: int) -> int:
        bundles = share_prefixes(batch, budget=10**6, hidden_size=1000, parts=given)
        return busiest([work(bundle.length, 1000) for bundle in bundles], parts)

    assert len(share_prefixes(batch, budget=10**6, hidden_size=1000)) == 1
    assert most(2, 2) < 0.8 * most(2, 1)
    assert all(most(parts, parts) <= most(parts, 1) for parts in range(1, 10))


def test_a_rank_collates_in_proportion_to_its_own_rows() -> None:
    """Seconds differ between runs on a busy machine, so the best of three counts, and half of the ideal saving is enough."""
    batch = episodes(32)
    alone, of_eight = (min(collate_seconds(batch, ranks=ranks)[0] for _ in range(3)) for ranks in (1, 8))
    assert of_eight < alone / 4

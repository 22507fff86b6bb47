from __future__ import annotations

from agentrl.learner.sharding import balance, pack, pad, plan_updates


def test_balance_gives_the_largest_to_the_emptiest() -> None:
    assert balance([7, 1, 5, 5, 2], [0, 1, 2, 3, 4], 2) == [[0, 1, 4], [2, 3]]


def test_pad_sorts_by_length_and_counts_padding() -> None:
    assert pad([10, 3, 9, 4, 20], [0, 1, 2, 3, 4], 20) == [(4,), (0, 2), (3, 1)]


def test_short_rows_are_not_padded_to_long_ones_where_it_would_cost_much() -> None:
    assert pad([512, 512, 400, 100], [0, 1, 2, 3], 10**6) == [(0, 1, 2), (3,)]
    assert pad([50, 40, 3], [0, 1, 2], 10**6) == [(0, 1, 2)]


def test_a_row_beyond_the_budget_goes_alone() -> None:
    assert pad([30, 2, 2], [0, 1, 2], 8) == [(0,), (1, 2)]


def test_every_rank_runs_equally_many_micro_batches() -> None:
    (plan,) = plan_updates([8, 8, 8, 1], [0, 0, 0, 1], updates=1, ranks=2, budget=8, packed=False)
    assert plan.micros == (((0,), (1,), (2,)), ((3,), (), ()))
    assert plan.rows == (0, 1, 2, 3)


def test_a_rank_without_groups_gets_empty_micro_batches() -> None:
    (plan,) = plan_updates([4], [0], updates=1, ranks=3, budget=8, packed=False)
    assert plan.micros == (((0,),), ((),), ((),))


def test_no_more_updates_than_groups() -> None:
    assert len(plan_updates([4, 4], [0, 1], updates=5, ranks=1, budget=8, packed=False)) == 2


def test_packing_fills_up_without_padding() -> None:
    assert pack([6, 5, 4, 3, 20], [0, 1, 2, 3, 4], 10) == [(4,), (0, 2), (1, 3)]


def test_a_packed_plan_needs_no_more_micro_batches_than_tokens_ask_for() -> None:
    (plan,) = plan_updates([8, 2, 5, 5], [0, 0, 0, 0], updates=1, ranks=1, budget=10, packed=True)
    assert plan.micros == (((0, 1), (2, 3)),)

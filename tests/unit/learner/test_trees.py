"""Rows that branch off each other go through the model as one prefix tree, where that is less work."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from agentrl.core.types import Group, Task
from agentrl.learner.attention import KERNELS
from agentrl.learner.batch import collate
from agentrl.learner.layout import Layout
from agentrl.learner.teaching import with_teachers_tokens
from agentrl.learner.trees import share_prefixes
from tests.benchmarks.tree import BUDGET, CASES
from tests.learner_support import action_targets, make_trees
from tests.unit.learner.test_batch import trajectory, turn

GROUPS = make_trees(2, branches=10, depth=6, seed=1)
WIDE = 10_000
"""Width of a model for which sharing is always worth it."""


def test_a_tree_holds_every_token_once_in_the_order_of_a_walk() -> None:
    """The second episode forks in the middle of sampled tokens, the first begins anew after its own first turn."""
    first = trajectory(turn([1, 2], [3, 4, 5]), turn([1, 2, 3, 4, 7], [8, 9], fresh=True))
    second = trajectory(turn([1, 2], [3, 4, 6, 6]))
    batch = collate([Group(group_id=0, task=Task("x"), trajectories=(first, second, trajectory(turn([1, 2, 3, 4, 7], [8, 1]))))])
    (bundle,) = share_prefixes(batch, budget=100, hidden_size=1000)
    assert (bundle.rows, bundle.shared, bundle.length) == ((0, 1, 3, 2), (0, 4, 6, 4), 7)
    micro = Layout(batch).micro_batch([bundle], packed=False)
    assert micro.input_ids.tolist() == [[1, 2, 3, 4, 7, 8, 6]]
    assert micro.position_ids is not None
    assert micro.position_ids.tolist() == [[0, 1, 2, 3, 4, 5, 4]]
    assert micro.inputs()["attention_mask"][0, 0].int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 1, 1, 0],
        [1, 1, 1, 1, 0, 0, 1],
    ]
    assert micro.actions.tolist() == [0, 1, 2, 3, 4, 9, 10, 5, 6, 7, 8]
    assert micro.by_action(micro.select).tolist() == [1, 2, 3, 4, 5, 4, 5, 1, 2, 3, 6]
    assert micro.by_action(micro.targets).tolist() == [3, 4, 5, 8, 9, 8, 1, 3, 4, 6, 6]
    assert (micro.select.tolist(), micro.targets.tolist()) == ([1, 2, 3, 4, 5, 5, 3, 6], [3, 4, 5, 8, 9, 1, 6, 6])
    apart = micro.predicted_apart()
    assert apart.prediction is None
    assert apart.targets.tolist() == micro.by_action(micro.targets).tolist()
    assert (micro.num_tokens, micro.num_row_tokens) == (7, 4 + 6 + 5 + 6)


def test_a_token_sampled_at_another_temperature_is_another_prediction() -> None:
    warm = trajectory(turn([1, 2], [3, 4, 5]))
    cold = trajectory(replace(warm.turns[0], temperature=0.5))
    batch = collate([Group(group_id=0, task=Task("x"), trajectories=(warm, cold, warm))])
    micro = Layout(batch).micro_batch(share_prefixes(batch, budget=100, hidden_size=1000), packed=True)
    assert micro.input_ids.tolist() == [[1, 2, 3, 4]]
    assert micro.ends is not None
    assert micro.ends.tolist() == [[4, 4, 4, 4]]  # the last token of a row is no input
    assert micro.temperature.tolist() == [1.0] * 3 + [0.5] * 3
    assert micro.by_action(micro.temperature).tolist() == [1.0] * 3 + [0.5] * 3 + [1.0] * 3


def test_a_row_joins_another_branch_where_the_nearest_is_full() -> None:
    rows = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 7, 6], [1, 2, 8, 9], [1, 2, 3, 4, 9, 9]]
    batch = collate([Group(group_id=0, task=Task("x"), trajectories=tuple(trajectory(turn(row, [1])) for row in rows))])
    found = share_prefixes(batch, budget=8, hidden_size=1000)
    assert [(bundle.rows, bundle.shared, bundle.length) for bundle in found] == [((0, 1), (0, 4), 8), ((2, 3), (0, 2), 8)]


def test_ten_branches_are_hardly_more_than_the_longest_row() -> None:
    long = list(range(2, 62)) * 10
    turns = [turn(long, [1])] + [turn([*long[: 300 + 30 * place], place], [1] * 20, fresh=True) for place in range(1, 11)]
    batch = collate([Group(group_id=0, task=Task("x"), trajectories=(trajectory(*turns),))])
    assert len(share_prefixes(batch, budget=16384, hidden_size=1000, parts=11)) > 1  # eleven ranks would wait for one
    (bundle,) = share_prefixes(batch, budget=16384, hidden_size=1000, costs=KERNELS["varlen"].costs)
    assert len(bundle.rows) == 11
    assert bundle.length <= 1.4 * max(batch.input_lengths())
    assert sum(batch.input_lengths()) > 6 * bundle.length


def test_the_metrics_of_a_step_count_the_tokens_that_trees_save(tiny_model: str) -> None:
    from tests.unit.learner.test_algorithms import started

    found = {}
    for share in (True, False):
        learner = started(tiny_model, learner={"share_prompts": share})
        found[share] = learner.train(0, *GROUPS).metrics
        learner.close()
    batch = collate(GROUPS)
    rows = int(batch.input_lengths().sum())
    saved = rows - sum(bundle.length for bundle in share_prefixes(batch, budget=16384, hidden_size=32))
    assert (found[True]["tokens/saved"], found[False]["tokens/saved"]) == (saved, 0.0)
    assert found[True]["shared_prompts"] == pytest.approx(saved / rows)
    assert saved > 0.4 * rows
    for name in ("loss", "grad_norm", "entropy"):
        assert math.isclose(found[True][name], found[False][name], rel_tol=1e-4, abs_tol=1e-6)


def test_of_branches_with_which_it_shares_as_much_a_row_joins_the_youngest() -> None:
    """The second tree is there because the first is full; a row that the first has room for does not make it the younger one."""
    rows = [[1, 2, 3, 4, 5, 6], [1, 2, 8, 9, 9, 9], [1, 2, 3, 4, 7], [1, 2, 6]]
    batch = collate([Group(group_id=0, task=Task("x"), trajectories=tuple(trajectory(turn(row, [1])) for row in rows))])
    found = share_prefixes(batch, budget=8, hidden_size=1000)
    assert [(bundle.rows, bundle.length) for bundle in found] == [((0, 2), 7), ((1, 3), 7)]


def test_a_row_joins_the_branch_with_which_it_shares_most() -> None:
    rows = [[1, 2, 3, 4, 5, 6], [1, 2, 8, 9, 9, 9], [1, 2, 3, 4, 7]]
    batch = collate([Group(group_id=0, task=Task("x"), trajectories=tuple(trajectory(turn(row, [1])) for row in rows))])
    found = share_prefixes(batch, budget=9, hidden_size=1000)
    assert [(bundle.rows, bundle.length) for bundle in found] == [((0, 2), 7), ((1,), 6)]


def test_the_budget_counts_the_tokens_of_the_tree() -> None:
    rows = tuple(trajectory(turn([1, 2, 3, token], [1])) for token in (4, 5, 6, 7))
    batch = collate([Group(group_id=0, task=Task("x"), trajectories=rows)])
    assert [bundle.rows for bundle in share_prefixes(batch, budget=6, hidden_size=1000)] == [(0, 1, 2), (3,)]


def test_the_tenth_answer_to_a_long_prompt_joins_as_the_second_does() -> None:
    """What a row adds to a mask of all pairs is counted, not all of it again."""
    rows = tuple(trajectory(turn([1] * 300, [token] * 20)) for token in range(2, 12))
    batch = collate([Group(group_id=0, task=Task("x"), trajectories=rows)])
    assert len(share_prefixes(batch, budget=1000, hidden_size=64)) == 1


def test_a_walk_goes_back_to_where_branches_part() -> None:
    rows = tuple(trajectory(turn(row, [1])) for row in ([1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 8, 9], [1, 2, 8, 7]))
    (bundle,) = share_prefixes(collate([Group(group_id=0, task=Task("x"), trajectories=rows)]), budget=100, hidden_size=1000)
    assert (bundle.shared, bundle.length) == ((0, 3, 2, 3), 8)


def test_groups_do_not_share_tokens() -> None:
    groups = [Group(group_id=number, task=Task("x"), trajectories=(trajectory(turn([1, 2, 3], [4])),)) for number in range(2)]
    assert [bundle.rows for bundle in share_prefixes(collate(groups), budget=100, hidden_size=1000)] == [(0,), (1,)]


def test_the_benchmark_meets_its_tokens() -> None:
    for case, make in CASES.items():
        batch = make()
        bundles = share_prefixes(batch, budget=BUDGET, hidden_size=576, costs=KERNELS["sdpa"].costs)
        assert sum(bundle.length for bundle in bundles) <= 1.4 * int(batch.input_lengths().max()), case
        assert batch.num_rows == 10


def test_each_row_of_a_shared_token_is_compared_with_its_own_teachers_tokens() -> None:
    batch = collate(GROUPS)
    ids = torch.arange(2 * batch.num_actions).view(-1, 2)
    micro = Layout(batch).micro_batch(share_prefixes(batch, budget=1000, hidden_size=WIDE), packed=False)
    assert micro.prediction is not None
    asked = with_teachers_tokens(micro, replace(batch, teacher_ids=ids))
    assert asked.prediction is None
    assert asked.targets[:, 0].tolist() == action_targets(batch)[micro.actions].tolist()
    assert torch.equal(asked.targets[:, 1:], ids[micro.actions])
    assert torch.equal(asked.select, micro.by_action(micro.select))

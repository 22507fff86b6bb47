"""Whatever the groups look like, a batch holds exactly their trainable tokens, and a plan covers every row once."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.core.types import Group, Status, Task
from agentrl.learner.attention import expanded
from agentrl.learner.batch import collate
from agentrl.learner.layout import Layout
from agentrl.learner.sharding import plan_updates
from agentrl.learner.trees import one_row_bundles, share_prefixes
from tests.learner_support import action_targets, make_groups, make_trajectory, make_trees


@st.composite
def groups(draw: st.DrawFn) -> tuple[Group, ...]:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    statuses = st.lists(st.sampled_from([Status.FINISHED, Status.TRUNCATED, Status.ENV_ERROR, Status.TIMEOUT]), min_size=1, max_size=4)
    shapes = draw(st.lists(statuses, min_size=1, max_size=5).filter(lambda shape: any(s.trainable for member in shape for s in member)))
    return tuple(
        Group(group_id=g, task=Task("x"), trajectories=tuple(make_trajectory(rng, g, m, status=s) for m, s in enumerate(members)))
        for g, members in enumerate(shapes)
    )


@given(groups())
@settings(max_examples=60, deadline=None)
def test_a_batch_holds_exactly_the_trainable_tokens_in_order(given_groups: tuple[Group, ...]) -> None:
    batch = collate(given_groups)
    members = [t for group in given_groups for t in group.trainable]
    turns = [turn for member in members for turn in member.turns]
    assert action_targets(batch).tolist() == [token for turn in turns for token in turn.token_ids.tolist()]
    assert np.array_equal(batch.logprobs.numpy(), np.concatenate([turn.logprobs for turn in turns]))
    assert batch.versions.tolist() == [version for turn in turns for version in turn.versions.tolist()]
    assert batch.num_episodes == len(members)
    assert batch.episode.tolist() == sorted(batch.episode.tolist())
    assert batch.num_rows == sum(1 + sum(turn.fresh for turn in member.turns[1:]) for member in members)
    sums = np.bincount(batch.episode.numpy(), weights=batch.token_rewards.double().numpy(), minlength=len(members))
    assert np.allclose(sums, [member.reward for member in members], atol=1e-5)


@given(groups(), st.integers(1, 3), st.integers(1, 3), st.integers(1, 64), st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_plan_covers_every_row_once_and_keeps_groups_in_one_update(
    given_groups: tuple[Group, ...], updates: int, ranks: int, budget: int, packed: bool
) -> None:
    batch = collate(given_groups)
    lengths, group = batch.input_lengths().tolist(), batch.row_group().tolist()
    plans = plan_updates(lengths, group, updates=updates, ranks=ranks, budget=budget, packed=packed, hidden_size=8)
    seen: list[int] = []
    owner: dict[int, int] = {}
    for number, plan in enumerate(plans):
        assert len({len(micros) for micros in plan.micros}) == 1
        for micros in plan.micros:
            for rows in micros:
                seen += rows
                size = sum(lengths[row] for row in rows) if packed else len(rows) * max((lengths[row] for row in rows), default=0)
                assert len(rows) <= 1 or size <= budget
                assert all(owner.setdefault(group[row], number) == number for row in rows)
    assert sorted(seen) == list(range(batch.num_rows))
    assert plans == plan_updates(lengths, group, updates=updates, ranks=ranks, budget=budget, packed=packed, hidden_size=8)


PAIRS = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=2), min_size=1, max_size=9)


@given(PAIRS, st.integers(1, 4), st.integers(1, 100), st.booleans())
@settings(max_examples=100, deadline=None)
def test_both_rows_of_a_pair_are_in_one_micro_batch(pairs: list[list[int]], ranks: int, budget: int, packed: bool) -> None:
    """A pair is two sequences, or one in which both rows share the beginning."""
    lengths = [length for pair in pairs for length in pair]
    group = [number for number, pair in enumerate(pairs) for _ in pair]
    (plan,) = plan_updates(lengths, group, updates=1, ranks=ranks, budget=budget, packed=packed, hidden_size=8, whole_groups=True)
    assert len({len(micros) for micros in plan.micros}) == 1
    micros = [micro for rank in plan.micros for micro in rank]
    assert sorted(row for micro in micros for row in micro) == list(range(len(lengths)))
    for micro in micros:
        members = {group[row] for row in micro}
        assert len(micro) == sum(len(pairs[number]) for number in members)
        size = sum(lengths[row] for row in micro) if packed else len(micro) * max((lengths[row] for row in micro), default=0)
        assert len(members) <= 1 or size <= budget


@given(groups(), st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_layout_puts_every_action_behind_its_context(given_groups: tuple[Group, ...], packed: bool) -> None:
    batch = collate(given_groups)
    micro = Layout(batch).micro_batch(one_row_bundles(batch), packed=packed)
    before = np.concatenate([row.tokens[row.action_positions - 1] for row in batch.rows])[micro.actions.numpy()]
    assert micro.input_ids.flatten()[micro.select].tolist() == before.tolist()
    assert micro.targets.tolist() == action_targets(batch)[micro.actions].tolist()
    assert sorted(micro.actions.tolist()) == list(range(batch.num_actions))


@st.composite
def trees(draw: st.DrawFn) -> tuple[Group, ...]:
    """Groups whose rows branch off each other; of few different tokens, so that rows go on alike by chance, or are equal."""
    seed, count, branches, depth = (draw(st.integers(0, limit)) for limit in (2**32 - 1, 2, 8, 6))
    if draw(st.booleans()):
        return make_groups(count + 1, branches + 1, seed=seed)
    return make_trees(count + 1, branches=branches + 1, depth=depth, seed=seed, vocabulary=draw(st.sampled_from([3, 4, 64])))


@given(trees(), st.integers(1, 200), st.sampled_from([1, 64, 4096]), st.integers(1, 3), st.booleans())
@settings(max_examples=80, deadline=None)
def test_rows_of_a_tree_see_what_they_see_alone(
    given_groups: tuple[Group, ...], budget: int, hidden_size: int, parts: int, packed: bool
) -> None:
    batch = collate(given_groups)
    bundles = share_prefixes(batch, budget=budget, hidden_size=hidden_size, parts=parts)
    assert sorted(row for bundle in bundles for row in bundle.rows) == list(range(batch.num_rows))
    assert [min(bundle.rows) for bundle in bundles] == sorted(min(bundle.rows) for bundle in bundles)
    assert all(len(bundle.rows) == 1 or bundle.length <= budget for bundle in bundles)
    assert all(batch.row_group()[row] == bundle.group for bundle in bundles for row in bundle.rows)
    micro = Layout(batch).micro_batch(bundles, packed=packed)
    assert micro.num_row_tokens == int(batch.input_lengths().sum())
    assert micro.num_tokens == sum(bundle.length for bundle in bundles) <= micro.num_row_tokens
    assert sorted(micro.actions.tolist()) == list(range(batch.num_actions))
    predictions = list(zip(micro.select.tolist(), micro.targets.tolist(), micro.temperature.tolist(), strict=True))
    if micro.prediction is not None:
        assert len(set(predictions)) == len(predictions) < batch.num_actions
    assert micro.by_action(micro.targets).tolist() == action_targets(batch)[micro.actions].tolist()
    width, mask = micro.input_ids.shape[1], micro.inputs()["attention_mask"]
    seen_by = None if mask is None else expanded(mask)[None] if packed else mask[:, 0]
    assert seen_by is None or bool(seen_by.diagonal(dim1=1, dim2=2).all())  # padding sees itself, so that nothing is undefined
    starts = np.cumsum([0, *(bundle.length for bundle in bundles)])
    for at, action in zip(micro.by_action(micro.select).tolist(), micro.actions.tolist(), strict=True):
        number = int(batch.row[action])
        row = batch.rows[number]
        position = int(row.action_positions[action - int(batch.row_actions[:number].sum())])
        line, place = divmod(at, width)
        begin = starts[np.searchsorted(starts, place, "right") - 1] if packed else 0
        seen = (torch.arange(width) <= place) & (torch.arange(width) >= begin) if seen_by is None else seen_by[line, place]
        assert micro.input_ids[line, seen].tolist() == row.tokens[:position].tolist()
        if micro.position_ids is not None:
            assert micro.position_ids[line, seen].tolist() == list(range(position))


@given(trees())
@settings(max_examples=60, deadline=None)
def test_one_tree_of_a_group_has_every_beginning_of_its_rows_once(given_groups: tuple[Group, ...]) -> None:
    batch = collate(given_groups)
    bundles = share_prefixes(batch, budget=10**9, hidden_size=10**6)
    inputs = [row.tokens[: row.action_positions[-1]].tolist() for row in batch.rows]
    for group in range(batch.num_groups):
        own = [bundle for bundle in bundles if bundle.group == group]
        rows = [row for row in range(batch.num_rows) if batch.row_group()[row] == group]
        assert len(own) == len({inputs[row][0] for row in rows})
        beginnings = {tuple(inputs[row][:end]) for row in rows for end in range(1, len(inputs[row]) + 1)}
        assert sum(bundle.length for bundle in own) == len(beginnings)
    for bundle in bundles:
        for before, row, shared in zip(bundle.rows, bundle.rows[1:], bundle.shared[1:], strict=False):
            length = min(len(inputs[before]), len(inputs[row]))
            assert inputs[before][:shared] == inputs[row][:shared]
            assert shared == length or inputs[before][shared] != inputs[row][shared]

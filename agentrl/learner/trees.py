"""Rows that begin with the same tokens, as prefix trees: which of them go through the model as one sequence, and in which order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise

import numpy as np

from agentrl.learner.attention import BLOCK, PADDED, Costs
from agentrl.learner.rows import Row, Rows
from agentrl.learner.sharding import busiest, work


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """Rows that go through the model as one sequence, in the order of a walk over their prefix tree: every token is there once."""

    rows: tuple[int, ...]  # their numbers in the batch
    shared: tuple[int, ...]  # tokens that each row has in common with the row before it; 0 for the first
    length: int  # tokens of the sequence
    group: int  # group of the rows


@dataclass(frozen=True, slots=True, eq=False)
class _Tree:
    """Places where the rows of a group part: a node stands for the tokens that several rows begin with."""

    paths: tuple[tuple[int, ...], ...]  # nodes that each row goes through, from the root on
    depths: tuple[int, ...]  # tokens from the beginning of a row to the end of each node


@dataclass(slots=True, eq=False)
class _Open:
    """A bundle that rows may join."""

    length: int
    rows: list[int] = field(default_factory=list)


def one_row_bundles(batch: Rows) -> list[Bundle]:
    """Every row as a sequence of its own."""
    return [
        Bundle(rows=(row,), shared=(0,), length=length, group=group)
        for row, (length, group) in enumerate(zip(batch.input_lengths().tolist(), batch.row_group().tolist(), strict=True))
    ]


def share_prefixes(batch: Rows, *, budget: int, hidden_size: int, parts: int = 1, costs: Costs = PADDED) -> list[Bundle]:
    """Rows of a group that begin with the same tokens, in one sequence where that is less work.

    Rows may part anywhere: behind a prompt, among sampled tokens, in a context that was rewritten. Bundles are in the order of their first
    rows; one of several rows has at most `budget` tokens. The width of the model, `hidden_size`, and the kernel's `costs` decide how much
    attention weighs against everything else. With several `parts` (ranks times mini-batches) the bundles are kept so short that the
    busiest part has the least work: while others wait, one rank saves nothing with a prompt that it computes once.
    """
    trees = list(_trees(batch))
    lengths = batch.input_lengths().tolist()

    def bundles(limit: int) -> list[Bundle]:
        grown = (_grown(tree, lengths[first : first + len(tree.paths)], limit, hidden_size, costs) for first, _, tree in trees)
        return [
            _walked(tree, bundle, first, lengths, group) for (first, group, tree), own in zip(trees, grown, strict=True) for bundle in own
        ]

    if parts == 1:
        return bundles(budget)
    fair = batch.num_tokens // parts
    limits = [budget, *(limit for limit in (fair, fair // 2, fair // 4, fair // 8, 0) if limit < budget)]
    return min(map(bundles, limits), key=lambda found: busiest([work(bundle.length, hidden_size) for bundle in found], parts))


def _trees(batch: Rows) -> Iterator[tuple[int, int, _Tree]]:
    """Yield the first row of each group, its number, and its tree."""
    experts = batch.experts_shape()
    images: dict[str, int] = {}
    for group, members in groupby(enumerate(batch.row_group().tolist()), key=lambda pair: pair[1]):
        numbers = [row for row, _ in members]
        keys = [_key(batch.rows[row], experts, images) for row in numbers]
        size = 4 if experts is None else 4 + 2 * int(np.prod(experts))
        yield numbers[0], group, _tree(keys, size)


def _key(row: Row, experts: tuple[int, ...] | None, images: dict[str, int]) -> bytes:
    """Bytes of a row's inputs, equally many for each token; equal ones have the same token, the same image and the same experts.

    `images` numbers the images by their keys; the first token of an image stands for it.
    """
    tokens = row.tokens[: row.reads[-1] + 1].astype(np.int32)
    for each in row.images:
        tokens[each.place] = -1 - images.setdefault(each.image.key, len(images))
    if experts is None:
        return tokens.tobytes()
    chosen = row.experts
    whole = np.full((len(tokens), int(np.prod(experts))), -1, np.int16) if chosen is None else chosen.reshape(len(chosen), -1)
    return np.concatenate([tokens[:, None].view(np.uint8), np.ascontiguousarray(whole).view(np.uint8)], axis=1).tobytes()


def _tree(keys: Sequence[bytes], size: int) -> _Tree:
    """Return the tree of rows by their keys, which have `size` bytes for a token: sorted, a row parts latest from one beside it."""
    order = sorted(range(len(keys)), key=keys.__getitem__)
    depths, above = [0], [0]  # of nodes; the first is the root, which is no part of a path
    leaf = [0] * len(keys)  # deepest node of each row
    line = [0]  # nodes from the root to the row before
    for before, row in pairwise(order):
        common = _common(keys[before], keys[row], size)
        below = -1
        while depths[line[-1]] > common:
            below = line.pop()
        if depths[line[-1]] < common:
            depths.append(common)
            above.append(line[-1])
            line.append(len(depths) - 1)
            if below < 0:
                leaf[before] = line[-1]
            else:
                above[below] = line[-1]
        leaf[row] = line[-1]
    return _Tree(tuple(_path(node, above) for node in leaf), tuple(depths))


def _path(node: int, above: Sequence[int]) -> tuple[int, ...]:
    path = []
    while node:
        path.append(node)
        node = above[node]
    return tuple(reversed(path))


def _common(first: bytes, other: bytes, size: int) -> int:
    """Return how many tokens two keys have in common at their beginnings."""
    length = min(len(first), len(other))
    if first[:length] == other[:length]:
        return length // size
    differs = np.frombuffer(first, np.uint8, length) != np.frombuffer(other, np.uint8, length)
    return int(differs.argmax()) // size


def _grown(tree: _Tree, lengths: Sequence[int], budget: int, hidden_size: int, costs: Costs) -> list[_Open]:
    """Divide the rows of a tree into bundles: each row joins the one with which it shares most, if that is less work, or begins a new one.

    Of bundles with which it shares as much it joins the youngest.
    """
    made: list[_Open] = []
    youngest: dict[int, int] = {}  # bundle that has rows through a node
    for row, (path, whole) in enumerate(zip(tree.paths, lengths, strict=True)):
        for node in reversed(path):
            place = youngest.get(node, -1)
            if place >= 0 and _worth_it(made[place].length, tree.depths[node], whole, budget, hidden_size, costs):
                made[place].length += whole - tree.depths[node]
                break
        else:
            place = len(made)
            made.append(_Open(whole))
        made[place].rows.append(row)
        youngest |= {node: max(place, youngest.get(node, -1)) for node in path}
    return made


def _walked(tree: _Tree, bundle: _Open, first: int, lengths: Sequence[int], group: int) -> Bundle:
    """Return the bundle with its rows in the order of a walk: a branch of the tree is left when all its rows were there, oldest first."""
    oldest: dict[int, int] = {}
    for row in bundle.rows:
        for node in tree.paths[row]:
            oldest.setdefault(node, row)
    rows = sorted(bundle.rows, key=lambda row: (*(oldest[node] for node in tree.paths[row]), row))
    shared = [0, *(_parting(tree, before, row) for before, row in pairwise(rows))]
    numbers = tuple(first + row for row in rows)
    length = sum(lengths[number] for number in numbers) - sum(shared)
    return Bundle(rows=numbers, shared=tuple(shared), length=length, group=group)


def _parting(tree: _Tree, first: int, other: int) -> int:
    """Return how many tokens two rows have in common at their beginnings."""
    pairs = zip(tree.paths[first], tree.paths[other], strict=False)
    return max((tree.depths[node] for node, same in pairs if node == same), default=0)


def _worth_it(so_far: int, shared: int, whole: int, budget: int, hidden_size: int, costs: Costs) -> bool:
    """Return True if what a `whole` row adds to a sequence of `so_far` tokens that has its first `shared` ones is less work than the row.

    In multiplications of a layer, over its width: 12 times the width for a token's projections; for attention 2 for every pair of
    tokens that the kernel computes, times what a multiplication there costs.
    """
    suffix = whole - shared
    longer = so_far + suffix
    pairs = suffix * (shared + BLOCK) + suffix**2 / 2 if costs.skips else longer**2 - so_far**2
    together = 12 * hidden_size * suffix + 2 * costs.masked * pairs
    return longer <= budget and together <= 12 * hidden_size * whole + costs.causal * whole**2

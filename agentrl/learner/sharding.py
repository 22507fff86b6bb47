"""Assignment of groups to mini-batches, and of sequences to ranks and micro-batches. Plain integers, deterministic."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

Micro = tuple[int, ...]
"""Rows that go through the model together; empty for a rank that has run out of work."""

WORTH_A_PASS = 1024
"""Tokens from which a micro-batch is large enough to be closed early rather than padded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatePlan:
    """One optimizer update."""

    rows: tuple[int, ...]  # every row of the update, over all ranks
    # Micro-batches of each rank, equally many for every rank, because each one is a collective operation
    micros: tuple[tuple[Micro, ...], ...]


def plan_updates(
    row_lengths: Sequence[int],
    row_group: Sequence[int],
    *,
    updates: int,
    ranks: int,
    budget: int,
    packed: bool,
    hidden_size: int,
    whole_groups: bool = False,
) -> tuple[UpdatePlan, ...]:
    """Cut a batch into optimizer updates, ranks and micro-batches; groups stay whole in an update.

    Args:
        row_lengths: Tokens of each row, or of each sequence made of several rows. # [R]
        row_group: Group of each row, from 0; those without a row are in no update. # [R]
        updates: Mini-batches; at most as many as there are groups with rows are made.
        ranks: Data-parallel ranks; a rank without a row gets empty micro-batches.
        budget: Tokens of a micro-batch; a longer row goes alone.
        packed: True if rows of a micro-batch follow each other instead of being padded.
        hidden_size: Width of the model, which decides how much attention weighs in the work of a row.
        whole_groups: Groups stay whole in a micro-batch, too; otherwise their rows go to any rank.
    """
    size = [0] * (max(row_group) + 1)
    rows_of: list[list[int]] = [[] for _ in size]
    for row, (length, group) in enumerate(zip(row_lengths, row_group, strict=True)):
        size[group] += length
        rows_of[group].append(row)
    effort = [work(length, hidden_size) for length in row_lengths]
    plans = []
    groups = [group for group, rows in enumerate(rows_of) if rows]
    for chosen in balance(size, groups, min(updates, len(groups))):
        rows = sorted(row for group in chosen for row in rows_of[group])
        atoms = [tuple(rows_of[group]) for group in chosen] if whole_groups else [(row,) for row in rows]
        weights = [sum(effort[row] for row in atom) for atom in atoms]
        shares = [[atoms[place] for place in part] for part in balance(weights, range(len(atoms)), ranks)]
        ready = [(pack if packed else pad)(row_lengths, share, budget) for share in shares]
        most = max(len(micros) for micros in ready)
        even = tuple(tuple(micros) + ((),) * (most - len(micros)) for micros in ready)
        plans.append(UpdatePlan(rows=tuple(rows), micros=even))
    return tuple(plans)


def work(length: int, hidden_size: int) -> int:
    """Return the multiplications for a sequence of `length` tokens in a layer, over its width: projections, then causal attention."""
    return 12 * hidden_size * length + length**2


def balance(size: Sequence[int], items: Sequence[int], parts: int) -> list[list[int]]:
    """Spread items so that the parts are about equally large: largest first, each to the smallest part so far.

    `size` has the size of every item by its number; each part is ascending, and equal input gives equal output. No part is larger than 4/3
    of the best possible (Graham, Bounds on multiprocessing timing anomalies, 1969).
    """
    spread: list[list[int]] = [[] for _ in range(parts)]
    loads = [(0, part) for part in range(parts)]
    for item in sorted(items, key=lambda number: (-size[number], number)):
        load, smallest = loads[0]
        spread[smallest].append(item)
        heapq.heapreplace(loads, (load + size[item], smallest))
    return [sorted(part) for part in spread]


def busiest(size: Sequence[int], parts: int) -> int:
    """Return the size of the largest part that `balance` makes of all items."""
    return max(sum(size[item] for item in part) for part in balance(size, range(len(size)), parts))


def pad(row_lengths: Sequence[int], atoms: Sequence[Micro], budget: int) -> list[Micro]:
    """Rows to micro-batches of at most `budget` tokens, padding to the longest row included; longest first, so that memory peaks early.

    Those of an atom stay together. They are taken by length, so that those padded together are about equally long; a row of less than three
    quarters of the longest begins a new micro-batch, unless a pass for so few tokens as there are costs more than padding.
    """
    micros: list[Micro] = []
    current: list[int] = []
    longest = 0
    length = {atom: max(row_lengths[row] for row in atom) for atom in atoms}
    for atom in sorted(atoms, key=lambda atom: (-length[atom], atom)):
        area = len(current) * longest
        full = (len(current) + len(atom)) * longest > budget
        if current and (full or (area >= WORTH_A_PASS and 4 * length[atom] < 3 * longest)):
            micros.append(tuple(current))
            current = []
        longest = longest if current else length[atom]
        current += atom
    return [*micros, tuple(current)] if current else micros


def pack(row_lengths: Sequence[int], atoms: Sequence[Micro], budget: int) -> list[Micro]:
    """Rows to micro-batches of at most `budget` tokens without padding: each atom of rows to the first one with room, longest first."""
    micros: list[list[int]] = []
    room: list[int] = []
    length = {atom: sum(row_lengths[row] for row in atom) for atom in atoms}
    for atom in sorted(atoms, key=lambda atom: (-length[atom], atom)):
        place = next((number for number, left in enumerate(room) if length[atom] <= left), len(room))
        if place == len(room):
            micros.append([])
            room.append(budget)
        micros[place] += atom
        room[place] -= length[atom]
    return [tuple(micro) for micro in micros]

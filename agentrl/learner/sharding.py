"""Assignment of groups to mini-batches and ranks, and of rows to micro-batches. Plain integers, deterministic."""

from __future__ import annotations

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
    row_lengths: Sequence[int], row_group: Sequence[int], *, updates: int, ranks: int, budget: int, packed: bool
) -> tuple[UpdatePlan, ...]:
    """Cut a batch into optimizer updates, ranks and micro-batches; whole groups stay together down to the rank.

    Args:
        row_lengths: Tokens of each row. # [R]
        row_group: Group of each row, dense from 0. # [R]
        updates: Mini-batches; at most as many as there are groups are made.
        ranks: Data-parallel ranks; a rank without a group gets empty micro-batches.
        budget: Tokens of a micro-batch; a longer row goes alone.
        packed: Whether rows of a micro-batch follow each other instead of being padded.
    """
    size = [0] * (max(row_group) + 1)
    for length, group in zip(row_lengths, row_group, strict=True):
        size[group] += length
    plans = []
    for chosen in balance(size, list(range(len(size))), min(updates, len(size))):
        per_rank = [_rows_of(part, row_group) for part in balance(size, chosen, ranks)]
        ready = [(pack if packed else pad)(row_lengths, rows, budget) for rows in per_rank]
        most = max(len(micros) for micros in ready)
        even = tuple(tuple(micros) + ((),) * (most - len(micros)) for micros in ready)
        plans.append(UpdatePlan(rows=tuple(sorted(row for rows in per_rank for row in rows)), micros=even))
    return tuple(plans)


def balance(size: Sequence[int], items: Sequence[int], parts: int) -> list[list[int]]:
    """Spread items so that the parts are about equally large: largest first, each to the smallest part so far.

    `size` has the size of every item by its number; each part is ascending, and equal input gives equal output.
    """
    spread: list[list[int]] = [[] for _ in range(parts)]
    load = [0] * parts
    for item in sorted(items, key=lambda number: (-size[number], number)):
        smallest = min(range(parts), key=lambda part: (load[part], part))
        spread[smallest].append(item)
        load[smallest] += size[item]
    return [sorted(part) for part in spread]


def pad(row_lengths: Sequence[int], rows: Sequence[int], budget: int) -> list[Micro]:
    """Rows to micro-batches of at most `budget` tokens, padding to the longest row included; longest first, so that memory peaks early.

    Rows are taken by length, so that those padded together are about equally long; a row of less than three quarters of the longest begins
    a new micro-batch, unless a pass for so few tokens as there are costs more than padding.
    """
    micros: list[Micro] = []
    current: list[int] = []
    for row in sorted(rows, key=lambda number: (-row_lengths[number], number)):
        longest = row_lengths[current[0]] if current else 0
        area = len(current) * longest
        if area + longest > budget or (area >= WORTH_A_PASS and 4 * row_lengths[row] < 3 * longest):
            micros.append(tuple(current))
            current = []
        current.append(row)
    return [*micros, tuple(current)] if current else micros


def pack(row_lengths: Sequence[int], rows: Sequence[int], budget: int) -> list[Micro]:
    """Rows to micro-batches of at most `budget` tokens without padding: each to the first one with room, longest first."""
    micros: list[list[int]] = []
    room: list[int] = []
    for row in sorted(rows, key=lambda number: (-row_lengths[number], number)):
        place = next((number for number, left in enumerate(room) if row_lengths[row] <= left), len(room))
        if place == len(room):
            micros.append([])
            room.append(budget)
        micros[place].append(row)
        room[place] -= row_lengths[row]
    return [tuple(micro) for micro in micros]


def _rows_of(groups: Sequence[int], row_group: Sequence[int]) -> list[int]:
    wanted = set(groups)
    return [row for row, group in enumerate(row_group) if group in wanted]

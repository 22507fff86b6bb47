"""The order in which a finite collection of tasks is drawn: a function of the seed and the epoch, so that it can be entered anywhere."""

from __future__ import annotations

import random
from collections.abc import Sequence

from agentrl.core.seeding import derive_seed


class TaskOrder:
    """Epochs over a collection whose parts are drawn in given proportions.

    Within an epoch no task comes twice. With one part, an epoch is the whole collection. With several, the next task comes
    from the part that is furthest behind its share, so the proportions hold over any stretch of draws; an epoch ends when
    one of the parts has been drawn completely. That part begins anew, in another order, and the others go on where they are.

    Args:
        sizes: Tasks in each part; part i holds the tasks after those of part i-1.
        weights: Share of each part; only their proportions count.
        seed: Seed of the run.
        shuffle: Whether a part is put into a new order each time it begins.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float] = (1.0,), *, seed: int = 0, shuffle: bool = True) -> None:
        total = sum(weights)
        self._sizes, self._shares = tuple(sizes), tuple(weight / total for weight in weights)
        self._starts = tuple(sum(sizes[:part]) for part in range(len(sizes)))
        self._seed, self._shuffle = seed, shuffle
        self._epoch, self._drawn = 0, [0] * len(sizes)

    def epoch(self, number: int) -> list[int]:
        """Indices of an epoch's tasks, in the order in which they are drawn.

        Args:
            number: Of the epoch, from 0. Far ones cost time in proportion to the draws before them if there are several parts.
        """
        if len(self._sizes) == 1:
            return self._pass(0, number)
        if number < self._epoch:
            self._epoch, self._drawn = 0, [0] * len(self._sizes)
        while self._epoch < number:
            self._parts()
            self._epoch += 1
        before = tuple(self._drawn)
        parts, self._epoch = self._parts(), self._epoch + 1
        orders = [self._pass(part, drawn // size) for part, (drawn, size) in enumerate(zip(before, self._sizes, strict=True))]
        places = [drawn % size for drawn, size in zip(before, self._sizes, strict=True)]
        found: list[int] = []
        for part in parts:
            found.append(orders[part][places[part]])
            places[part] += 1
        return found

    def _parts(self) -> list[int]:
        """The parts that the next epoch's tasks come from; moves the cursor behind them."""
        drawn, shares, sizes = self._drawn, self._shares, self._sizes
        number, parts = sum(drawn), list[int]()
        while True:
            number += 1
            part = max(range(len(sizes)), key=lambda index: number * shares[index] - drawn[index])
            drawn[part] += 1
            parts.append(part)
            if drawn[part] % sizes[part] == 0:
                return parts

    def _pass(self, part: int, number: int) -> list[int]:
        start = self._starts[part]
        order = list(range(start, start + self._sizes[part]))
        if self._shuffle:
            more = (part,) if len(self._sizes) > 1 else ()
            random.Random(derive_seed(self._seed, "tasks", number, *more)).shuffle(order)
        return order


def shares(count: int, weights: Sequence[float]) -> list[int]:
    """Whole numbers in the proportions of `weights` that sum to `count`."""
    exact = [count * weight / sum(weights) for weight in weights]
    parts = [int(part) for part in exact]
    by_rest = sorted(range(len(parts)), key=lambda index: parts[index] - exact[index])
    for index in by_rest[: count - sum(parts)]:
        parts[index] += 1
    return parts

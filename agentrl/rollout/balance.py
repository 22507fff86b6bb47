"""Which of many workers has the least to do, found without looking at all of them."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from agentrl.rollout.seat import Seat


class LeastLoaded:
    """Keeps seats in order of their live episodes, so that a choice among thousands takes microseconds.

    Args:
        seats: In the order in which ties go to them.
    """

    def __init__(self, seats: Iterable[Seat]) -> None:
        self._seats = list(seats)
        self._number = {seat.name: number for number, seat in enumerate(self._seats)}
        self._listed: list[int | None] = [None] * len(self._seats)  # the load of each seat's one valid entry
        self._heap: list[tuple[int, int]] = []  # load, number of the seat; entries that are no longer valid are passed over
        for seat in self._seats:
            self.update(seat)

    def update(self, seat: Seat) -> None:
        """To be called when a seat's load has changed, or when it is ready again."""
        number = self._number[seat.name]
        if self._listed[number] != seat.live_episodes:
            self._listed[number] = seat.live_episodes
            heapq.heappush(self._heap, (seat.live_episodes, number))
            if len(self._heap) > 4 * len(self._seats) + 64:
                self._rebuild()

    def first(self) -> Seat | None:
        """The ready seat with the fewest live episodes; `None` if none is ready."""
        while self._heap:
            load, number = self._heap[0]
            if self._listed[number] == load:
                if self._seats[number].ready:
                    return self._seats[number]
                self._listed[number] = None  # `update` lists it when it is ready again
            heapq.heappop(self._heap)
        return None

    def _rebuild(self) -> None:
        """Leave out what is no longer valid."""
        self._heap = [(load, number) for number, load in enumerate(self._listed) if load is not None]
        heapq.heapify(self._heap)

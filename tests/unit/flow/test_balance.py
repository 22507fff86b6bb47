"""The choice of the least loaded worker is that of a look at all of them."""

from __future__ import annotations

import random

import pytest

from agentrl.flow.worker_slots import LeastLoaded, WorkerSlot, WorkerState
from tests.unit.flow.fakes import ScriptedWorker


def looked_at_all(seats: list[WorkerSlot]) -> WorkerSlot | None:
    return min((seat for seat in seats if seat.ready), key=lambda seat: seat.live_episodes, default=None)


@pytest.mark.parametrize("num_seats", [1, 2, 7, 40])
def test_whatever_happens_the_first_of_the_least_loaded_is_chosen(num_seats: int) -> None:
    rng = random.Random(num_seats)
    seats = [WorkerSlot(f"engine-{i}", ScriptedWorker()) for i in range(num_seats)]
    by_load, running = LeastLoaded(seats), []
    for _ in range(3000):
        assert by_load.first() is looked_at_all(seats)
        what, seat = rng.random(), rng.choice(seats)
        if what < 0.5 and (chosen := by_load.first()) is not None:
            chosen.live_episodes += 4
            running.append(chosen)
            by_load.update(chosen)
        elif what < 0.9 and running:
            ended = running.pop(rng.randrange(len(running)))
            ended.live_episodes -= 4
            by_load.update(ended)
        elif seat.ready:
            seat.lose("gone", WorkerState.LOST)
        else:
            seat.fill(ScriptedWorker())
            by_load.update(seat)
    assert len(by_load._heap) <= 4 * num_seats + 64


def test_it_does_not_grow_while_nothing_is_lost() -> None:
    seats = [WorkerSlot(f"engine-{i}", ScriptedWorker()) for i in range(8)]
    by_load = LeastLoaded(seats)
    for _ in range(20_000):
        seat = by_load.first()
        assert seat is not None
        for change in (8, -8):
            seat.live_episodes += change
            by_load.update(seat)
    assert len(by_load._heap) < 100

"""The queue between callers and the thread of a model: bursts are awaited, and longer where nothing is under way."""

from __future__ import annotations

import pytest

from agentrl.engine import commands
from agentrl.engine.commands import GATHER_ROUNDS, IDLE_ROUNDS, CommandQueue


class Scene:
    """A queue into which another command comes during each pause, up to a number of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, more: int, under_way: bool) -> None:
        self.queue, self.more, self.under_way, self.served = CommandQueue(), more, under_way, 0
        monkeypatch.setattr(commands.time, "sleep", self.pause)
        self.queue.put(self.command)

    def pause(self, seconds: float) -> None:
        if self.more:
            self.more -= 1
            self.queue.put(self.command)

    def command(self) -> None:
        self.served += 1
        self.under_way = True

    def serve(self) -> bool:
        return self.queue.serve(lambda: self.under_way)


@pytest.mark.parametrize(("under_way", "rounds"), [(False, IDLE_ROUNDS), (True, GATHER_ROUNDS)], ids=["idle", "busy"])
def test_a_burst_is_awaited_and_longer_where_nothing_is_under_way(monkeypatch: pytest.MonkeyPatch, under_way: bool, rounds: int) -> None:
    scene = Scene(monkeypatch, more=1000, under_way=under_way)
    assert scene.serve()
    assert scene.served == 1 + rounds


def test_the_first_pause_without_a_command_is_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, more=2, under_way=False)
    assert scene.serve()
    assert scene.served == 3
    scene.queue.put(None)
    assert not scene.serve()

"""The global generators belong to one episode at a time."""

import contextlib
import random
import threading

import numpy as np
import pytest

from agentrl.suites import specs as random_state
from agentrl.suites.specs import EpisodeRandom


def draw(episode: EpisodeRandom) -> tuple[float, float]:
    with episode.in_force():
        return random.random(), float(np.random.random())


def test_interleaved_episodes_draw_what_they_draw_alone() -> None:
    alone = {seed: [draw(episode) for _ in range(3)] for seed, episode in ((1, EpisodeRandom(1)), (2, EpisodeRandom(2)))}
    first, second = EpisodeRandom(1), EpisodeRandom(2)
    mixed = [(draw(first), draw(second)) for _ in range(3)]
    assert [pair[0] for pair in mixed] == alone[1]
    assert [pair[1] for pair in mixed] == alone[2]
    assert alone[1] != alone[2]


def test_what_is_outside_goes_on_undisturbed_also_after_an_exception() -> None:
    random.seed(5)
    np.random.seed(5)
    expected = random.random(), np.random.random(), random.random(), np.random.random()
    random.seed(5)
    np.random.seed(5)
    seen = [random.random(), np.random.random()]
    with contextlib.suppress(KeyError), EpisodeRandom(1).in_force():
        random.seed(9)
        np.random.seed(9)
        raise KeyError
    assert (*seen, random.random(), np.random.random()) == expected


def test_a_seed_of_any_size_will_do() -> None:
    assert draw(EpisodeRandom(2**40 + 7)) == draw(EpisodeRandom(7))


def test_an_episode_that_keeps_the_generators_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_state, "WAIT_S", 0.05)
    held, done = threading.Event(), threading.Event()

    def hang() -> None:
        with EpisodeRandom(1).in_force():
            held.set()
            done.wait(10)

    thread = threading.Thread(target=hang)
    thread.start()
    held.wait(10)
    try:
        with pytest.raises(TimeoutError, match="another episode"):
            draw(EpisodeRandom(2))
    finally:
        done.set()
        thread.join()
    draw(EpisodeRandom(2))

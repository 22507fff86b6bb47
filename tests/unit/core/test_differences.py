"""The first difference of two plays is found at its turn, with both values."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.core.differences import AGENT, END, Difference, Tokens, first_difference, first_place

PLAY = [{AGENT: "a", "observation": Tokens((1, 2, 3), "one two three"), "reward": 0.5}, {AGENT: "b", "reward": None}]


def changed(turn: int, **values: Any) -> list[dict[str, Any]]:
    return [{**known, **(values if number == turn else {})} for number, known in enumerate(PLAY)]


@pytest.mark.parametrize(
    ("got", "difference"),
    [
        (changed(0, reward=0.25), Difference(turn=0, what="reward", expected="0.5", got="0.25", agent="a")),
        (changed(1, reward=1.0), Difference(turn=1, what="reward", expected="none", got="1", agent="b")),
        (changed(1, agent="c", reward=1.0), Difference(turn=1, what=AGENT, expected="b", got="c", agent="b")),
        (changed(1, more="x"), Difference(turn=1, what="more", expected="none", got="x", agent="b")),
        (PLAY[:1], Difference(turn=1, what=END, expected="it goes on", got="it has ended")),
        ([*PLAY, {}], Difference(turn=2, what=END, expected="it has ended", got="it goes on")),
    ],
)
def test_the_first_value_that_differs_is_named(got: list[dict[str, Any]], difference: Difference) -> None:
    assert first_difference(PLAY, got) == difference


def test_tokens_are_compared_by_their_ids() -> None:
    assert first_difference(PLAY, changed(0, observation=Tokens((1, 2, 3), "other words"))) is None
    difference = first_difference(PLAY, changed(0, observation=Tokens((1, 2), "one two")))
    assert difference is not None
    assert (difference.expected, difference.got, difference.token) == ("one two three", "one two", 2)
    assert (difference.expected_ids, difference.got_ids) == ((1, 2, 3), (1, 2))


def test_numbers_are_the_same_within_the_tolerance_only() -> None:
    assert first_difference(PLAY, changed(0, reward=0.5 + 1e-12), tolerance=1e-9) is None
    assert first_difference(PLAY, changed(0, reward=0.5 + 1e-12)) is not None
    assert first_difference([{"reward": float("nan")}], [{"reward": float("nan")}], tolerance=1e-9) is not None


def test_values_are_shown_as_asked() -> None:
    difference = first_difference(PLAY, changed(0, reward="a word"), show=repr)
    assert difference is not None
    assert (difference.expected, difference.got) == ("0.5", "'a word'")


def test_the_first_place_may_be_the_end_of_one() -> None:
    assert (first_place("same", "same"), first_place("sum", "some"), first_place("so", "some")) == (None, 1, 2)

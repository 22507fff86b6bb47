"""Running moments of scores, against the standard library, and their state in a checkpoint."""

import json
import random
import statistics

import pytest

from agentrl.core.scoring import Moments, ScoreMoments, clipped, normalized

SCORES = [random.Random(3).gauss(400.0, 2.5) for _ in range(500)]


def test_moments_are_those_of_the_standard_library() -> None:
    moments = Moments().added(SCORES[:200]).added(SCORES[200:])
    assert moments.count == 500
    assert moments.mean == pytest.approx(statistics.fmean(SCORES), rel=1e-12)
    assert moments.std == pytest.approx(statistics.pstdev(SCORES), rel=1e-9)


def test_a_state_that_went_through_json_goes_on_bit_for_bit() -> None:
    straight, first = ScoreMoments(), ScoreMoments()
    straight.add({"a": SCORES[start : start + 2], "b": SCORES[start : start + 1]} for start in range(100))
    first.add({"a": SCORES[start : start + 2], "b": SCORES[start : start + 1]} for start in range(40))
    second = ScoreMoments(json.loads(json.dumps(first.state())))
    second.add({"a": SCORES[start : start + 2], "b": SCORES[start : start + 1]} for start in range(40, 100))
    assert second.state() == straight.state()
    assert second.scales() == straight.scales()


def test_models_are_counted_apart_and_one_without_spread_has_no_scale() -> None:
    moments = ScoreMoments()
    moments.add([{"a": (1.0, 3.0), "b": (5.0,)}, {"b": (5.0,)}])
    assert moments.scales() == {"a": (2.0, 1.0)}
    assert moments.state()["b"] == (2, 5.0, 0.0)


def test_a_score_is_normalised_then_cut() -> None:
    assert normalized(7.0, (5.0, 0.5)) == 4.0
    assert normalized(7.0, None) == normalized(7.0, (5.0, 0.0)) == 7.0
    assert [clipped(value, 3.0) for value in (-4.0, -2.0, 4.0)] == [-3.0, -2.0, 3.0]

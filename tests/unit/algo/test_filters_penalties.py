import subprocess
import sys

import pytest

from agentrl.algo.filters import Rejection, filter_truncated, keep_all, reject_flat
from agentrl.algo.plan import AlgoConfig, flatness
from agentrl.core.summaries import GroupSummary
from agentrl.core.types import Status
from agentrl.rollout.penalties import overlong_penalty, stop_properly
from tests.unit.flow.fakes import member


def test_modules_for_the_driver_load_no_torch() -> None:
    code = "import sys, agentrl.algo, agentrl.algo.filters, agentrl.rollout.penalties; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def group(scores: list[float | None], rewards: list[float]) -> GroupSummary:
    members = tuple(member(reward, score=score) for score, reward in zip(scores, rewards, strict=True))
    return GroupSummary(group_id=0, members=members, versions=(0, 0), seconds=1.0)


def judged(finished: GroupSummary, score_range: tuple[float, float] | None = None, **options: object) -> Rejection | None:
    return reject_flat(finished, flatness(AlgoConfig(options=options)), score_range)


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([0.0, 0.0], Rejection.TOO_HARD),
        ([1.0, 1.0], Rejection.TOO_EASY),
        ([0.0, 1.0], None),
        ([0.0, 1e-9], None),
        ([None, 1.0], Rejection.TOO_EASY),
        ([None, None], None),
    ],
)
def test_the_range_is_open(scores: list[float | None], expected: Rejection | None) -> None:
    assert judged(group(scores, [0.0, 1.0]), (0.0, 1.0)) is expected
    assert judged(group(scores, [0.0, 1.0])) is None  # of different rewards something is learned, whatever the scores
    assert judged(group(scores, [0.5, 0.5])) is (expected or Rejection.ZERO_VARIANCE)


def test_a_mean_on_the_bound_is_outside() -> None:
    assert judged(group([0.1, 0.2, 0.3], [0.0, 1.0, 2.0]), (0.2, 0.9)) is Rejection.TOO_HARD
    assert judged(group([0.9, 0.9, 0.9], [0.0, 1.0, 2.0]), (0.2, 0.9)) is Rejection.TOO_EASY


def test_equal_rewards_are_rejected_whatever_the_scores() -> None:
    assert judged(group([0.0, 1.0], [2.0, 2.0])) is Rejection.ZERO_VARIANCE
    assert judged(group([0.5, 0.5], [2.0, 2.1])) is None


def test_rewards_are_compared_as_estimators_see_them() -> None:
    assert judged(group([0.5, 0.5], [15.0, 20.0])) is None
    assert judged(group([0.5, 0.5], [15.0, 20.0]), reward_clip_range=(-10.0, 10.0)) is Rejection.ZERO_VARIANCE
    assert judged(group([0.5, 0.5], [9.0, 20.0]), reward_clip_range=(-10.0, 10.0)) is None


@pytest.mark.parametrize(
    ("in_baseline", "cut", "expected"),
    [
        (True, (False, True, True), None),
        (True, (True, True, True), Rejection.TRUNCATED),
        (False, (False, True, True), Rejection.TRUNCATED),
        (False, (False, True, False), Rejection.ZERO_VARIANCE),
        (False, (False, False, True), None),
    ],
)
def test_a_group_needs_episodes_that_were_not_cut_short(in_baseline: bool, cut: tuple[bool, ...], expected: Rejection | None) -> None:
    status = [Status.TRUNCATED if short else Status.FINISHED for short in cut]
    members = tuple(member(reward, ended, score=0.5) for reward, ended in zip((1.0, 0.0, 1.0), status, strict=True))
    by_length = tuple(member(m.reward, score=0.5, truncated=m.cut_short) for m in members)
    for some in (members, by_length):
        finished = GroupSummary(group_id=0, members=some, versions=(0, 0), seconds=1.0)
        assert filter_truncated(finished, judged, in_baseline=in_baseline, least=2) is expected
    assert filter_truncated(finished, keep_all, in_baseline=False, least=1) is (None if False in cut else Rejection.TRUNCATED)


@pytest.mark.parametrize(
    ("rewards", "same"),
    [([1.0, 1.0 + 1.2e-7], True), ([0.1 + 0.2, 0.3], True), ([-1.0, -1.0 - 1.2e-7], True), ([1e-8, 2e-8], False), ([0.0, 0.0], True)],
)
def test_rounding_is_no_contrast(rewards: list[float], same: bool) -> None:
    assert judged(group([0.5, 0.5], rewards)) is (Rejection.ZERO_VARIANCE if same else None)


@pytest.mark.parametrize(("length", "expected"), [(10, 0.0), (80, 0.0), (90, -0.5), (100, -1.0), (130, -1.0)])
def test_overlong_penalty_grows_over_the_buffer(length: int, expected: float) -> None:
    assert overlong_penalty(length, limit=100, buffer=20) == pytest.approx(expected)
    assert overlong_penalty(length, limit=100, buffer=20, factor=3.0) == pytest.approx(3 * expected)


def test_no_buffer_means_no_penalty() -> None:
    assert overlong_penalty(500, limit=100, buffer=0) == 0.0


@pytest.mark.parametrize(
    ("penalty", "truncated", "expected"), [(0.5, True, 1.0), (0.0, True, 0.0), (-1.0, True, -1.0), (None, True, 2.0), (-1.0, False, 2.0)]
)
def test_stop_properly(penalty: float | None, truncated: bool, expected: float) -> None:
    assert stop_properly(2.0, truncated=truncated, penalty=penalty) == expected

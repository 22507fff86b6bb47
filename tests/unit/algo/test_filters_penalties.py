import subprocess
import sys

import pytest

from agentrl.algo.filters import Rejection, rejection
from agentrl.rollout.penalties import overlong_penalty, stop_properly


def test_modules_for_the_driver_load_no_torch() -> None:
    code = "import sys, agentrl.algo, agentrl.algo.filters, agentrl.rollout.penalties; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


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
    assert rejection(scores, [0.0, 1.0], score_range=(0.0, 1.0)) is expected


def test_a_mean_on_the_bound_is_outside() -> None:
    assert rejection([0.1, 0.2, 0.3], [0.0, 1.0, 2.0], score_range=(0.2, 0.9)) is Rejection.TOO_HARD
    assert rejection([0.9, 0.9, 0.9], [0.0, 1.0, 2.0], score_range=(0.2, 0.9)) is Rejection.TOO_EASY


def test_without_a_range_scores_do_not_matter() -> None:
    assert rejection([0.0, 0.0], [0.0, 1.0]) is None


def test_zero_variance_looks_at_rewards_not_scores() -> None:
    assert rejection([0.0, 1.0], [2.0, 2.0], zero_variance=True) is Rejection.ZERO_VARIANCE
    assert rejection([0.5, 0.5], [2.0, 2.1], zero_variance=True) is None
    assert rejection([0.5, 0.5], [2.0, 2.0]) is None


def test_too_few_members() -> None:
    assert rejection([0.5], [1.0], min_members=2) is Rejection.TOO_FEW_MEMBERS
    assert rejection([0.5], [1.0], min_members=1) is None
    assert rejection([], []) is Rejection.TOO_FEW_MEMBERS


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

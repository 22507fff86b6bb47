"""Signs that a run cannot learn."""

from __future__ import annotations

import pytest

from agentrl.core.callbacks import MetricsRow
from agentrl.track.tracker import Diagnosis

HEALTHY = {
    "reward/mean": 0.4,
    "group/zero_variance": 0.5,
    "grad_norm": 0.3,
    "episode/truncated": 0.1,
    "episode/count": 64.0,
    "episode/turns_mean": 1.0,
    "advantage/abs": 0.5,
}


def warnings(*rows: dict[str, float], max_turns: int = 8) -> list[str]:
    diagnosis = Diagnosis(max_new_tokens=64, max_turns=max_turns)
    for step, row in enumerate(rows, 1):
        diagnosis.on_metrics(MetricsRow(step=step, metrics={**HEALTHY, **row}))
    return [f"{warning.id}: {warning.text}. {warning.remedy}" for warning in diagnosis.warnings]


def test_a_healthy_run_has_no_warning() -> None:
    assert warnings(*[{}] * 20) == []


@pytest.mark.parametrize(("reward", "remedy"), [(0.0, "are the labels there?"), (1.0, "take harder tasks")])
def test_flat_groups_are_said_once_with_a_remedy_that_fits_the_reward(reward: float, remedy: str) -> None:
    (warning,) = warnings(*[{"group/zero_variance": 1.0, "reward/mean": reward, "grad_norm": 0.0}] * 12)
    assert warning.startswith("flat-groups")
    assert remedy in warning


def test_a_step_that_teaches_something_begins_the_count_anew() -> None:
    flat = {"group/zero_variance": 1.0}
    assert warnings(*[flat] * 4, {}, *[flat] * 4) == []


@pytest.mark.parametrize(("share", "said"), [(0.04, False), (0.05, True), (0.97, True)])
def test_clipped_rewards_are_said_after_the_first_step(share: float, said: bool) -> None:
    found = warnings({"reward/clipped": share})
    assert [text.partition(":")[0] for text in found] == ["rewards-clipped"] * said
    assert not said or f"{share:.0%} of the episodes in step 1" in found[0]


@pytest.mark.parametrize(
    ("row", "remedy"),
    [({"off_policy/masked": 1.0}, "--off-policy-range"), ({"learning_rate": 0.0}, "--learning-rate"), ({}, "advantage/abs")],
)
def test_a_zero_gradient_names_its_cause(row: dict[str, float], remedy: str) -> None:
    (warning,) = warnings(*[{"grad_norm": 0.0, **row}] * 3)
    assert warning.startswith("zero-gradient")
    assert remedy in warning


@pytest.mark.parametrize(("turns", "remedy"), [(4.0, "--max-turns (now 4)"), (1.0, "--max-new-tokens (now 64)")])
def test_truncation_of_everything_names_the_bound(turns: float, remedy: str) -> None:
    (warning,) = warnings(*[{"episode/truncated": 1.0, "episode/turns_mean": turns}] * 3, max_turns=4)
    assert remedy in warning


@pytest.mark.parametrize(
    ("context", "remedy"), [("--max-episode-tokens (now 512)", "raise --max-episode-tokens (now 512)"), ("", "a longer context")]
)
def test_observations_that_do_not_fit_are_said_instead_of_truncation(context: str, remedy: str) -> None:
    diagnosis = Diagnosis(max_new_tokens=64, max_turns=8, context=context)
    for step in range(1, 6):
        diagnosis.on_metrics(MetricsRow(step=step, metrics={**HEALTHY, "episode/truncated": 1.0, "episode/overflowed": 0.96}))
    (warning,) = diagnosis.warnings
    assert warning.id == "observations-do-not-fit"
    assert remedy in warning.remedy


def test_a_quarter_of_failed_episodes_is_said_with_their_kind() -> None:
    assert warnings(*[{"failures/timeout": 10.0}] * 4) == []
    (warning,) = warnings({"failures/timeout": 6.0, "failures/env_error": 30.0})
    assert "36% of the episodes failed, most with env_error" in warning


def test_a_difference_of_engine_and_learner_is_said_once_with_its_step() -> None:
    row = {"mismatch/limit": 0.01, "mismatch/mean": 0.02, "audit/logprob_error": 1e-6}
    (warning,) = warnings({}, {"mismatch/limit": 0.01, "mismatch/mean": 0.01}, row, {**row, "mismatch/mean": 0.3})
    assert warning.startswith("mismatch: engine and learner differed by 0.02 nats on average in step 3")
    assert "(limit 0.01)" in warning
    assert "If audit/logprob_error is small, the engine is at fault" in warning


def test_a_difference_of_the_learner_from_its_own_row_is_another_kind() -> None:
    row = {"mismatch/limit": 0.01, "mismatch/mean": 0.02, "audit/logprob_error": 0.5}
    first, second = warnings(row, row)
    assert first.startswith("mismatch: ")
    assert second.startswith("audit: the learner differed by 0.5 nats on average from its own row alone in float32 in step 1")


def test_without_a_limit_no_difference_is_said() -> None:
    assert warnings({"mismatch/mean": 9.0, "audit/logprob_error": 9.0}) == []


@pytest.mark.parametrize(("reason", "words"), [(1.0, "4 bits"), (2.0, "no memory")])
def test_audits_that_are_off_are_said_once(reason: float, words: str) -> None:
    (warning,) = warnings(*[{"audit/off": reason}] * 3)
    assert warning.startswith("audits-off: ")
    assert words in warning
    assert "--audit-every 0" in warning

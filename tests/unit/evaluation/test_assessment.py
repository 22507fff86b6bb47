"""pass@k, bootstrap intervals, and what they are put together to."""

from __future__ import annotations

import itertools
import random
from dataclasses import asdict, replace
from fractions import Fraction

import numpy as np
import pytest

from agentrl.evaluation.assessment import Assessment, EpisodeOutcome, TaskOutcome, assess, compare
from agentrl.evaluation.statistics import bootstrap_mean, pass_at_k, useful_k


def enumerated(tries: int, solved: int, k: int) -> Fraction:
    """The share of all choices of k tries that hold a solved one."""
    chosen = list(itertools.combinations([True] * solved + [False] * (tries - solved), k))
    return Fraction(sum(map(any, chosen)), len(chosen))


def test_pass_at_k_is_what_enumeration_gives() -> None:
    for tries in range(1, 9):
        for solved in range(tries + 1):
            for k in range(1, tries + 1):
                assert pass_at_k(tries, solved, k) == float(enumerated(tries, solved, k))


def test_pass_at_k_on_known_cases() -> None:
    assert pass_at_k(10, 3, 1) == 0.3
    assert pass_at_k(5, 2, 2) == pytest.approx(1 - (3 * 2) / (5 * 4))
    assert pass_at_k(4, 0, 4) == 0.0
    assert pass_at_k(4, 1, 4) == 1.0
    assert pass_at_k(200, 1, 100) == pytest.approx(0.5, abs=1e-15)
    assert pass_at_k(10_000, 1, 1) == 1e-4  # neither overflow nor a difference of nearly equal numbers
    assert pass_at_k(10_000, 5_000, 5_000) == 1.0


def test_pass_at_k_has_no_bias() -> None:
    chance, k = 0.3, 3
    draw = random.Random(0)
    estimates = [pass_at_k(6, sum(draw.random() < chance for _ in range(6)), k) for _ in range(20_000)]
    assert np.mean(estimates) == pytest.approx(1 - (1 - chance) ** k, abs=0.01)
    plugged_in = [1 - (1 - sum(draw.random() < chance for _ in range(6)) / 6) ** k for _ in range(20_000)]
    assert abs(np.mean(plugged_in) - (1 - (1 - chance) ** k)) > 0.02  # so the test would see it


@pytest.mark.parametrize(("tries", "solved", "k"), [(4, 2, 0), (4, 2, 5), (4, 5, 1), (4, -1, 1), (0, 0, 1)])
def test_pass_at_k_refuses_what_makes_no_sense(tries: int, solved: int, k: int) -> None:
    with pytest.raises(ValueError, match="k must be"):
        pass_at_k(tries, solved, k)


def test_useful_k() -> None:
    assert [useful_k(tries) for tries in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


def test_a_bootstrap_is_repeatable_and_does_not_depend_on_its_blocks() -> None:
    values = list(np.random.default_rng(1).normal(size=40))
    first = bootstrap_mean(values, seed=3)
    assert first == bootstrap_mean(values, seed=3)
    assert first == bootstrap_mean(values, seed=3, draws_at_once=100)
    assert first != bootstrap_mean(values, seed=4)


def test_a_bootstrap_agrees_with_the_normal_approximation_for_many_tasks() -> None:
    values = np.random.default_rng(1).normal(0.3, 2.0, size=400)
    estimate = bootstrap_mean(list(values), seed=0)
    error = values.std() / 20
    assert estimate.value == pytest.approx(values.mean())
    assert estimate.low is not None
    assert estimate.high is not None
    assert (estimate.low, estimate.high) == pytest.approx((values.mean() - 1.96 * error, values.mean() + 1.96 * error), abs=0.1 * error)


def test_intervals_cover_the_truth_as_often_as_they_say() -> None:
    draw = np.random.default_rng(7)
    estimates = [bootstrap_mean(list(draw.binomial(1, 0.4, size=60).astype(float)), seed=i, resamples=500) for i in range(400)]
    covered = np.mean([low <= 0.4 <= high for e in estimates if (low := e.low) is not None and (high := e.high) is not None])
    assert 0.90 <= covered <= 0.98


def test_one_task_has_no_interval_and_nothing_is_refused() -> None:
    assert (bootstrap_mean([0.5], seed=0).low, bootstrap_mean([0.5], seed=0).high) == (None, None)
    for bad in ([], [float("nan")]):
        with pytest.raises(ValueError, match="finite"):
            bootstrap_mean(bad, seed=0)


def outcome(name: str, *rewards: float, kind: str = "", failed: int = 0) -> TaskOutcome:
    episodes = tuple(EpisodeOutcome(reward=r, score=min(max(r, 0.0), 1.0), tokens=10, turns=2, truncated=False) for r in rewards)
    return TaskOutcome(task_id=name, kind=kind, episodes=episodes, failures=("env_error: ValueError: x",) * failed)


def shown(assessment: Assessment) -> dict[str, float]:
    return {name: round(estimate.value, 6) for name, estimate in assessment.overall.items()}


def test_every_task_counts_the_same_however_many_episodes_it_has() -> None:
    assessment = assess([outcome("a", 1.0, 1.0, 1.0, 1.0), outcome("b", 0.0, 1.0, failed=2)])
    assert shown(assessment) == {"reward": 0.75, "score": 0.75, "pass@1": 0.625, "pass@2": 0.75, "pass@4": 1.0}
    assert {estimate.tasks for estimate in assessment.overall.values()} == {2}


def test_pass_at_k_never_rises_because_episodes_failed() -> None:
    """Half of the tasks are always solved, the others never; of each of these an episode failed, or all did."""
    easy = [outcome(f"easy {number}", 1.0, 1.0, 1.0, 1.0) for number in range(5)]
    hard = [outcome(f"hard {number}", 0.0, 0.0, 0.0, failed=1) for number in range(4)]
    assessment = assess([*easy, *hard, outcome("hard 4", failed=4)])
    assert {name: value for name, value in shown(assessment).items() if name.startswith("pass@")} == dict.fromkeys(
        ("pass@1", "pass@2", "pass@4"), 0.5
    )
    assert {assessment.overall[f"pass@{k}"].tasks for k in (1, 2, 4)} == {10}
    for failed in range(4):
        tried = [outcome("a", *[1.0, 0.0, 0.0, 0.0][: 4 - failed], failed=failed), outcome("b", *[0.0] * (4 - failed), failed=failed)]
        assert shown(assess(tried))["pass@2"] == 0.25  # of the tries of `a` one solved it, whatever became of the others


def test_every_k_is_of_the_same_tasks() -> None:
    fewer = assess([outcome("a", 1.0, 1.0, 1.0, 1.0), outcome("b", 0.0, 0.0, 0.0)])
    assert [name for name in shown(fewer) if name.startswith("pass@")] == ["pass@1", "pass@2", "pass@3"]
    unscored = EpisodeOutcome(reward=0.5, score=None, tokens=1, turns=1, truncated=False)
    some = assess([outcome("a", 1.0, 1.0), TaskOutcome(task_id="c", episodes=(unscored, unscored))])
    assert (shown(some)["pass@2"], some.overall["pass@2"].tasks, some.overall["reward"].tasks) == (1.0, 1, 2)
    torn = assess([outcome("a", 1.0), TaskOutcome(task_id="c", episodes=(unscored,), failures=("x",))])
    assert (shown(torn)["pass@1"], torn.overall["pass@1"].tasks) == (1.0, 1)  # nothing says what the tries at `c` were worth
    assert "pass@1" not in shown(assess([TaskOutcome(task_id="c", episodes=(unscored,)), outcome("d", failed=1)]))


def test_failures_count_in_pass_at_k_of_each_agent_and_of_a_comparison() -> None:
    def played(*scores: float, failed: int) -> TaskOutcome:
        own = outcome("a", *scores, failed=failed)
        return replace(own, agents={"bob": own.episodes, "ann": own.episodes})

    mine, theirs = played(1.0, failed=3), played(1.0, 1.0, 0.0, 0.0, failed=0)
    assert assess([mine]).by_agent["bob"]["pass@1"].value == 0.25
    compared = compare([mine], [theirs])
    assert (compared.overall["pass@1"].model, compared.overall["pass@1"].baseline) == (0.25, 0.5)
    assert set(compared.overall) == {"reward", "score", "pass@1", "pass@2", "pass@4"}
    lost = compare([outcome("a", failed=4)], [theirs])
    assert (lost.tasks, lost.unpaired, set(lost.overall), lost.overall["pass@1"].difference.value) == (
        0,
        1,
        {"pass@1", "pass@2", "pass@4"},
        -0.5,
    )


def test_failures_are_counted_apart_and_are_no_zeros() -> None:
    assessment = assess([outcome("a", 1.0, 0.5), outcome("b", failed=2), outcome("c", 1.0, failed=1)])
    assert (assessment.tasks, assessment.episodes, assessment.failed_tasks, assessment.failed_episodes) == (2, 3, ("b",), 3)
    assert assessment.overall["reward"].value == (0.75 + 1.0) / 2
    assert assessment.causes == {"env_error: ValueError: x": 3}
    assert assessment.metrics()["failed_tasks"] == 1


def test_nothing_but_failures_has_no_figures_at_all() -> None:
    metrics = assess([outcome("a", failed=2)]).metrics()
    assert metrics == {"tasks": 0, "episodes": 0, "failed_tasks": 1, "failed_episodes": 2}


def test_by_kind() -> None:
    assessment = assess([outcome("a", 1.0, kind="easy"), outcome("b", 0.0, kind="hard"), outcome("c", 0.5, kind="hard"), outcome("d", 1.0)])
    assert {kind: e["reward"].value for kind, e in assessment.by_kind.items()} == {"easy": 1.0, "hard": 0.25, "other": 1.0}
    assert assessment.metrics()["reward/hard"] == 0.25
    assert assess([outcome("a", 1.0, kind="easy")]).by_kind == {}


def test_by_agent() -> None:
    def both(name: str, buyer: float, seller: float) -> TaskOutcome:
        agents = {"buyer": outcome(name, buyer).episodes, "seller": outcome(name, seller).episodes}
        return replace(outcome(name, (buyer + seller) / 2), agents=agents)

    model, baseline = [both("a", 1.0, 0.0), both("b", 0.5, 0.5)], [both("a", 0.0, 0.0), both("b", 0.0, 0.5)]
    assessment = assess(model)
    assert {agent: e["reward"].value for agent, e in assessment.by_agent.items()} == {"buyer": 0.75, "seller": 0.25}
    assert assessment.metrics()["reward/agent/buyer"] == 0.75
    differences = compare(model, baseline).by_agent
    assert {agent: d["reward"].difference.value for agent, d in differences.items()} == {"buyer": 0.75, "seller": 0.0}
    assert assess([outcome("a", 1.0)]).by_agent == {}


def test_the_score_that_counts_as_solved_can_be_chosen() -> None:
    tasks = [outcome("a", 0.6, 0.2)]
    assert [assess(tasks, solved_at=level).overall["pass@1"].value for level in (1.0, 0.6, 0.1)] == [0.0, 0.5, 1.0]


def test_a_paired_difference_is_surer_than_two_separate_means() -> None:
    draw = np.random.default_rng(0)
    levels = draw.uniform(0, 1, size=50)  # tasks differ a lot, models a little
    model = [outcome(str(i), float(level + 0.05 + draw.normal(0, 0.02))) for i, level in enumerate(levels)]
    baseline = [outcome(str(i), float(level)) for i, level in enumerate(levels)]
    difference = compare(model, baseline).overall["reward"]
    assert difference.clear
    assert difference.difference.value == pytest.approx(0.05, abs=0.01)
    assert difference.better > 0.9
    alone = assess(model).overall["reward"], assess(baseline).overall["reward"]
    assert alone[0].low is not None
    assert alone[1].high is not None
    assert alone[0].low < alone[1].high  # separate intervals overlap


def test_two_equal_models_do_not_differ_and_only_shared_tasks_count() -> None:
    model = [outcome("a", 1.0, 0.0), outcome("b", 0.5), outcome("c", 1.0)]
    baseline = [outcome("b", 0.5), outcome("a", 0.0, 1.0), outcome("c", failed=1), outcome("d", 1.0)]
    comparison = compare(model, baseline)
    assert (comparison.tasks, comparison.unpaired) == (2, 2)
    reward = comparison.overall["reward"]
    assert (reward.difference.value, reward.better, reward.worse, reward.clear) == (0.0, 0.0, 0.0, False)
    assert set(asdict(comparison)["overall"]["reward"]) == {"baseline", "model", "difference", "better", "worse"}


def test_ends_of_an_interval_have_their_names() -> None:
    found = assess([outcome(str(number), float(number % 3)) for number in range(9)]).metrics()
    assert found["reward_low"] < found["reward"] < found["reward_high"]

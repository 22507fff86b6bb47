"""Predictions against runs of known speeds, and against closed forms."""

from __future__ import annotations

import pytest

from agentrl.profile.prediction import Prediction, bound_of, predict, recommended, splits_of, staleness_predictions, time_costs
from agentrl.profile.simulated_engine import EngineModel
from agentrl.profile.simulation import LearnerModel, constant, episodes_of, simulate
from tests.unit.profile.recordings import plan, recorded_run

STEADY = episodes_of(tokens=constant(40), env_s=constant(0.3), turns=2)


@pytest.mark.parametrize(
    ("recorded_with", "engines", "groups", "staleness"), [(0, 1, 8, 1), (0, 4, 8, 1), (0, 1, 8, 4), (1, 1, 8, 0), (1, 1, 16, 1)]
)
def test_other_sizes_are_predicted_from_one_run(recorded_with: int, engines: int, groups: int, staleness: int) -> None:
    _, found = recorded_run(max_staleness=recorded_with)
    predicted = predict(found, num_engines=engines, groups_per_step=groups, max_staleness=staleness)
    true = simulate(plan(num_engines=engines, groups_per_step=groups, max_staleness=staleness, num_steps=60, seed=7))
    assert predicted.step_s == pytest.approx(true.step_s, rel=0.12)
    assert predicted.staleness_mean == pytest.approx(true.mean("staleness/mean"), abs=0.1)


def test_the_bound_of_constant_durations_is_exact() -> None:
    _, found = recorded_run(episodes=STEADY)
    bound = bound_of(found)
    decode_s, train_s = 80 * (0.010 + 32 * 0.0005), 0.5 + 0.0001 * 32 * 80 + 0.05
    assert (bound.generate_s, bound.train_s, bound.publish_s) == pytest.approx((decode_s + 0.6, train_s, 0.17))
    assert bound.synchronous_s == pytest.approx(found.step_s)
    assert bound.ideal_s == pytest.approx(decode_s + 0.6)
    assert bound.speedup == pytest.approx((decode_s + 0.6 + train_s) / (decode_s + 0.6))


def test_costs_are_told_apart() -> None:
    same_length = {cost.name: cost for cost in time_costs(recorded_run(episodes=STEADY)[1])}
    assert same_length["episodes of different length (stragglers)"].gain == pytest.approx(0.0, abs=1e-6)
    step_s = recorded_run(episodes=STEADY)[1].step_s
    assert same_length["time outside the engine (environment)"].step_s == pytest.approx(step_s - 0.6)
    assert same_length["publication"].step_s == pytest.approx(step_s - 0.17)
    assert same_length["handing groups to the learner"].step_s == pytest.approx(step_s - 0.05)
    assert same_length["taking turns (synchronous)"].gain > 0.3
    mixed = time_costs(recorded_run()[1])
    assert [cost.gain for cost in mixed] == sorted((cost.gain for cost in mixed), reverse=True)
    assert next(c for c in mixed if "stragglers" in c.name).gain > 0.5


def test_the_best_split_gives_each_side_what_it_needs() -> None:
    # Ten engines' worth of decoding against two ranks' worth of training.
    engine = EngineModel(token_s=1e-6, token_s_per_sequence=0.001)
    _, found = recorded_run(episodes=episodes_of(tokens=constant(100)), engine=engine, learner=LearnerModel(token_s=0.0002))
    found_splits = splits_of(found, 12, max_staleness=8)
    assert len(found_splits) == 11
    best = found_splits[0]
    # 3,200 tokens take 3.2 s on one engine and 0.64 s on one rank: 10 engines and 2 ranks need 0.32 s each.
    assert (best.num_engines, best.num_learners) == (10, 2)
    assert best.step_s == pytest.approx(0.32, rel=0.1)
    assert [split.num_engines * 2 + split.num_learners for split in splits_of(found, 9, devices_per_engine=2)] == [9] * 4


def test_many_devices_are_searched_without_trying_every_split() -> None:
    engine = EngineModel(token_s=1e-6, token_s_per_sequence=0.001)
    _, found = recorded_run(episodes=episodes_of(tokens=constant(100)), engine=engine, learner=LearnerModel(token_s=0.0002))
    splits = splits_of(found, 40, max_staleness=2)
    assert len(splits) <= 24
    assert splits[0].episodes_per_s == max(split.episodes_per_s for split in splits)


def test_a_deeper_queue_is_not_recommended_where_it_gives_nothing() -> None:
    _, found = recorded_run(episodes=STEADY, learner=LearnerModel(step_s=10.0))
    depths = staleness_predictions(found)
    assert [prediction.max_staleness for prediction in depths] == [0, 1, 2, 4, 8]
    assert recommended(depths).max_staleness == 1
    assert depths[1].step_s == pytest.approx(10.0, rel=0.01)
    assert all(prediction.staleness_max <= prediction.max_staleness for prediction in depths)


def test_a_deeper_queue_must_pay_for_its_staleness() -> None:
    def prediction(staleness: int, rate: float) -> Prediction:
        return Prediction(
            num_engines=1,
            num_learners=1,
            max_staleness=staleness,
            groups_per_step=1,
            oversampled_groups=0,
            step_s=1 / rate,
            episodes_per_s=rate,
            staleness_mean=0.0,
            staleness_max=0.0,
            idle_generator=0.0,
            idle_learner=0.0,
        )

    assert recommended([prediction(0, 50.0), prediction(1, 98.0), prediction(4, 100.0)]).max_staleness == 1
    assert recommended([prediction(0, 50.0), prediction(1, 90.0), prediction(4, 115.0)]).max_staleness == 1
    assert recommended([prediction(4, 120.0), prediction(0, 50.0), prediction(1, 90.0)]).max_staleness == 4

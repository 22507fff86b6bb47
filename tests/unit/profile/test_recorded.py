"""Speeds and distributions are recovered from what a run of known speeds records."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace

import pytest

from agentrl.core.errors import ConfigError
from agentrl.profile.recorded import RecordedEpisode, draw_like, read_episodes, read_recorded, sequences_and_pace, time_shares
from agentrl.profile.report import _evaluations, _saved
from agentrl.profile.simulated_engine import EpisodeShape
from agentrl.profile.simulation import constant, episodes_of, simulate
from tests.unit.profile.recordings import plan, recorded, recorded_run, records_of


@pytest.mark.parametrize("staleness", [0, 1])
def test_the_speeds_of_engine_and_learner_are_recovered(staleness: int) -> None:
    run, found = recorded_run(max_staleness=staleness)
    assert found.notes == ()
    assert (found.plan.learner.step_s, found.plan.learner.token_s, found.plan.learner.overhead_s) == pytest.approx((0.5, 0.0001, 0.05))
    sequences = round(statistics.fmean(point[0] for point in sequences_and_pace(found)))
    assert found.plan.engine.step_s(sequences) == pytest.approx(run.plan.engine.step_s(sequences), rel=0.05)
    assert found.plan.engine.token_s_per_sequence == pytest.approx(run.plan.engine.token_s_per_sequence, rel=0.15)
    assert found.plan.engine.pause_s(random.Random()) == pytest.approx(0.1)
    assert found.plan.engine.load_s(random.Random()) == pytest.approx(0.05)


def test_a_synchronous_run_without_times_tells_as_much() -> None:
    run = simulate(plan(), keep_groups=True)
    with_times, without = recorded(run).plan.engine, recorded(run, times=False).plan.engine
    assert without.token_s == pytest.approx(with_times.token_s, rel=0.02)


def test_one_recorded_episode_of_each_group_is_enough() -> None:
    run = simulate(plan(max_staleness=1, num_steps=40), keep_groups=True)
    found = recorded(run, members=1)
    assert found.plan.engine.step_s(32) == pytest.approx(run.plan.engine.step_s(32), rel=0.1)


def test_what_is_missing_or_assumed_is_said() -> None:
    run = simulate(plan(max_staleness=1, episodes=episodes_of(tokens=constant(30), turns=2)), keep_groups=True)
    notes = "\n".join(recorded(run, times=False).notes)
    assert "steps are too alike" in notes
    assert "half of a decoding step" in notes
    without = read_recorded(
        settings=run.plan.settings,
        num_engines=1,
        num_learners=1,
        max_sequences=256,
        metrics=[{name: value for name, value in row.items() if name != "time/learner_s"} for row in run.steps],
        records=[],
    )
    assert "--record all" in without.notes[0]
    assert any("did not record how long the driver waited" in note for note in without.notes)
    assert without.plan.episodes(random.Random(0), 3)[0].num_tokens == 60


def test_the_tokens_that_rows_share_are_said() -> None:
    _, found = recorded_run(max_staleness=1)
    assert _saved(found) == []
    rows = [row | {"tokens/saved": 1200.0 + number % 2, "shared_prompts": 0.4} for number, row in enumerate(found.rows)]
    (line,) = _saved(replace(found, rows=rows[: len(rows) // 2 * 2]))
    assert "saved the learner 1,200 tokens a step, 40% of all" in line


def test_a_run_of_too_few_steps_tells_nothing() -> None:
    run = simulate(plan(num_steps=3, max_staleness=2), keep_groups=True)
    with pytest.raises(ConfigError, match="at least 3 steady steps"):
        recorded(run)


def test_steps_after_an_evaluation_do_not_count() -> None:
    run = simulate(plan(num_steps=12), keep_groups=True)
    for row in run.steps[5:7]:
        row["eval/tasks"] = 8.0  # type: ignore[index]
    run.steps[6]["time/step_s"] = run.steps[7]["time/step_s"] = 1000.0  # type: ignore[index]
    found = recorded(run)
    assert [row["step"] for row in found.rows] == [2, 3, 4, 5, 6, 9, 10, 11, 12]
    assert found.step_s < 20.0


def test_what_evaluations_cost_is_told_apart_from_the_steps() -> None:
    run = simulate(plan(num_steps=12), keep_groups=True)
    assert time_shares(recorded(run))["evaluation"] == {}
    for step, wait_s in ((4, 0.0), (8, 6.0), (12, None)):
        run.steps[step - 1].update({"eval/tasks": 8.0, "eval/seconds": 10.0})  # type: ignore[attr-defined]
        if wait_s is not None:
            run.steps[step].update({"eval/wait_s": wait_s})  # type: ignore[attr-defined]
    run.steps[9]["time/step_s"] = 1000.0  # type: ignore[index]
    found = recorded(run)
    assert [row["step"] for row in found.rows] == [2, 3, 4, 7, 8, 11, 12]
    assert found.step_s < 20.0
    assert time_shares(found)["evaluation"] == {"count": 2.0, "seconds": 10.0, "wait_s": 3.0}
    shown = dict(_evaluations(time_shares(found)["evaluation"]))
    assert shown == {"evaluations": "10 s each, for 3 s of which the learner waited; 2 between steps"}
    del run.steps[8]["eval/wait_s"]  # type: ignore[attr-defined]
    assert time_shares(recorded(run))["evaluation"]["wait_s"] == 5.0  # nothing was trained beside the second


def test_engines_for_evaluations_are_told_with_their_use_and_disturb_no_step() -> None:
    run = simulate(plan(num_steps=12), keep_groups=True)
    figures = {"eval/tasks": 8.0, "eval/seconds": 10.0, "eval/engines": 2.0}
    for row, step in ((6, 4), (8, 8), (12, 12)):
        run.steps[row - 1].update({**figures, "eval/step": float(step)})  # type: ignore[attr-defined]
    for row, wait_s in ((5, 0.1), (7, 1e-6), (9, 1000.0)):
        run.steps[row - 1].update({"eval/wait_s": wait_s})  # type: ignore[attr-defined]
    found = recorded(run)
    assert [row["step"] for row in found.rows] == [2, 3, 4, 5, 6, 7, 8, 10, 11, 12]
    shares = time_shares(found)["evaluation"]
    used = 30.0 / run.steps[-1]["time_s"]
    assert shares == {"count": 2.0, "seconds": 10.0, "wait_s": pytest.approx(500.05, abs=1e-3), "engines": 2.0, "used": pytest.approx(used)}
    assert dict(_evaluations(shares))["evaluations"].endswith(f"2 between steps; 2 engines of their own, used for {used:.0%} of the time")


def test_episodes_of_several_agents_are_one_and_others_are_left_out() -> None:
    def record(episode: str, **changes: object) -> dict[str, object]:
        timings = {"generate_s": 1.0, "env_s": 0.2, "total_s": 1.6}
        return {"group_id": 3, "version": 1, "episode_id": episode, "status": "finished", "timings": timings, "turns": [], **changes}

    def turn(number: int, tokens: int) -> dict[str, object]:
        return {"number": number, "token_ids": [0] * tokens}

    found = read_episodes(
        [
            record("a", agent="x", turns=[turn(0, 5), turn(2, 7)], ended_s=10.0, group_s=2.5),
            record("a", agent="y", turns=[turn(1, 6)], ended_s=10.0, group_s=2.5),
            record("b", status="env_error", turns=[turn(0, 5)]),
            record("c", eval_sampling={"name": "eval"}, turns=[turn(0, 5)]),
            record("d", turns=[turn(0, 5)], clipped=True),
            {"clipped": True, "bytes": 10},
        ]
    )
    outside_s = pytest.approx(0.15)
    assert len(found) == 1
    assert found[0].shape.reset_s == outside_s
    assert found[0].shape.turns == ((5, outside_s), (6, outside_s), (7, outside_s))
    assert (found[0].group, found[0].version, found[0].started_s) == ((3, 0), 1, 7.5)


def test_groups_are_drawn_whole_where_they_were_recorded_whole() -> None:
    def played(group: int, tokens: float) -> RecordedEpisode:
        shape = EpisodeShape(0.0, ((tokens, 0.0),))
        return RecordedEpisode(group=(group, 0), version=0, shape=shape, generate_s=1.0, total_s=1.0, started_s=None)

    rng = random.Random(0)
    whole = draw_like([played(group, group + 1.0) for group in range(10) for _ in range(4)])
    assert all(len({shape.num_tokens for shape in whole(rng, 4)}) == 1 for _ in range(50))
    single = draw_like([played(group, group + 1.0) for group in range(10)])
    assert any(len({shape.num_tokens for shape in single(rng, 4)}) > 1 for _ in range(50))


def test_where_the_time_went() -> None:
    run, found = recorded_run(episodes=episodes_of(tokens=constant(40), env_s=constant(0.3), turns=2))
    decode_s = 80 * (0.010 + 32 * 0.0005)
    step_s = decode_s + 0.6 + 0.5 + 0.0001 * 32 * 80 + 0.05 + 0.02 + 0.15
    parts = time_shares(found)
    assert found.step_s == pytest.approx(step_s)
    assert parts["learner"] == pytest.approx({"train_s": 0.756, "handing_over_s": 0.05, "export_s": 0.02, "waiting_s": decode_s + 0.75})
    assert parts["engine"] == pytest.approx({"decoding": decode_s / step_s, "paused": 0.1 / step_s, "idle": 1 - (decode_s + 0.1) / step_s})
    assert parts["episode"] == pytest.approx({"engine_s": decode_s, "env_s": 0.6, "elsewhere_s": 0.0}, abs=1e-9)
    assert parts["group"] == pytest.approx({"played_s": decode_s + 0.6, "queued_s": 0.0}, abs=1e-9)
    assert len(records_of(run, members=2)) == 24 * 8 * 2

"""Where the time of a run went is found in what a run of known speeds records."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agentrl.core.errors import ConfigError
from agentrl.profile.recorded import bound_of, time_shares
from agentrl.profile.report import _evaluations, _saved
from tests.simulation import simulate
from tests.unit.profile.recordings import STEADY, plan, recorded, recorded_run


def test_the_tokens_that_rows_share_are_said() -> None:
    _, found = recorded_run(max_staleness=1)
    assert _saved(found) == []
    rows = [row | {"tokens/saved": 1200.0 + number % 2, "shared_prompts": 0.4} for number, row in enumerate(found.rows)]
    (line,) = _saved(replace(found, rows=rows[: len(rows) // 2 * 2]))
    assert "saved the learner 1,200 tokens a step, 40% of all" in line


def test_a_run_of_too_few_steps_tells_nothing() -> None:
    run = simulate(plan(num_steps=3, max_staleness=2))
    with pytest.raises(ConfigError, match="at least 3 steady steps"):
        recorded(run)


def test_steps_after_an_evaluation_do_not_count() -> None:
    run = simulate(plan(num_steps=12))
    for row in run.steps[5:7]:
        row["eval/tasks"] = 8.0  # type: ignore[index]
    run.steps[6]["time/step_s"] = run.steps[7]["time/step_s"] = 1000.0  # type: ignore[index]
    found = recorded(run)
    assert [row["step"] for row in found.rows] == [2, 3, 4, 5, 6, 9, 10, 11, 12]
    assert found.step_s < 20.0


def test_what_evaluations_cost_is_told_apart_from_the_steps() -> None:
    run = simulate(plan(num_steps=12))
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
    run = simulate(plan(num_steps=12))
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


def test_where_the_time_went() -> None:
    _, found = recorded_run(episodes=STEADY)
    decode_s = 80 * (0.010 + 32 * 0.0005)
    step_s = decode_s + 0.6 + 0.5 + 0.0001 * 32 * 80 + 0.05 + 0.02 + 0.15
    parts = time_shares(found)
    assert found.step_s == pytest.approx(step_s)
    assert parts["learner"] == pytest.approx({"train_s": 0.756, "handing_over_s": 0.05, "export_s": 0.02, "waiting_s": decode_s + 0.75})
    assert parts["engine"] == pytest.approx({"decoding": decode_s / step_s, "paused": 0.1 / step_s, "idle": 1 - (decode_s + 0.1) / step_s})
    assert parts["episode"] == pytest.approx({"engine_s": decode_s, "env_s": 0.6, "elsewhere_s": 0.0}, abs=1e-9)
    assert parts["group"] == pytest.approx({"played_s": decode_s + 0.6, "queued_s": 0.0}, abs=1e-9)


def test_the_bound_of_constant_durations_is_exact() -> None:
    decode_s, train_s = 80 * (0.010 + 32 * 0.0005), 0.5 + 0.0001 * 32 * 80 + 0.05
    _, found = recorded_run(episodes=STEADY)
    bound = bound_of(found)
    assert (bound.generate_s, bound.train_s, bound.publish_s) == pytest.approx((decode_s + 0.6, train_s, 0.17))
    assert bound.synchronous_s == pytest.approx(found.step_s)
    assert bound.ideal_s == pytest.approx(decode_s + 0.6)


def test_of_an_asynchronous_run_the_time_counts_in_which_engines_decode() -> None:
    _, found = recorded_run(episodes=STEADY, max_staleness=1)
    bound = bound_of(found)
    assert bound.generate_s == pytest.approx(time_shares(found)["engine"]["decoding"] * found.step_s)
    assert bound.ideal_s <= found.step_s

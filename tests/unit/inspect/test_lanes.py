"""Who worked when: the lanes of a step."""

from __future__ import annotations

import pytest

from agentrl.inspect.reader import RunReader
from agentrl.inspect.steps import step_answer
from tests.run_files import MadeRun


def test_the_lanes_of_a_step_go_back_to_where_its_groups_were_made(tmp_path):
    made = MadeRun(tmp_path / "run")
    begin = made._seconds
    early = made.group(1)  # half a second, which ends now
    made._seconds = begin + 2.0
    late, other = made.group(1), made.group(2, verdict="kept")
    made._seconds = begin + 3.0
    made.step(1, [early, late])  # begins 0.8 s before, and lasts 0.7 s
    made._seconds = begin + 3.05
    across = made.group(2)  # began before the weights were live, and ended after
    made._seconds = begin + 9.0
    far = made.group(2)
    made.step(2, [other, across, far])
    lanes = step_answer(RunReader(made.close()).open(), 1)["lanes"]
    length = lanes["end_s"] - lanes["step_begin_s"]
    back = lanes["begin_s"] - lanes["step_begin_s"]
    assert back == pytest.approx(-2.0 * length, abs=1e-3)  # and not farther, though the first group was earlier
    spans = {span["group"]: span["step"] for span in lanes["spans"] if span["lane"] == "groups"}
    assert spans == {early: 1, late: 1, other: 2, across: 2}  # the last was played when the step was over
    assert {span["step"] for span in lanes["spans"] if span["lane"] == "engine" and span["group"] == other} == {2}

"""Engines of their own for evaluations, on Ray: the same figures and the same weights as without, also in a run that is resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.runs import SMALL, Run, train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

FLAGS = ("--engine", "transformers", "--eval-size", "6", "--eval-every", "2", "--eval-samples", "2", "--learning-rate", "1e-3")
OTHERS = ("--keep-best", "eval/reward", "--save-every", "1", "--skip-checks", "env", "model")


def figures(run: Run) -> dict[int, dict[str, Any]]:
    """The figures of each evaluation, by the step that was measured."""
    rows = [row for row in run.metrics if "eval/tasks" in row]
    left_out = ("eval/seconds", "eval/engines", "eval/wait_s")
    return {
        int(row["eval/step"]): {name: value for name, value in row.items() if name.startswith("eval/") and name not in left_out}
        for row in rows
    }


def test_they_measure_what_the_other_engines_measure_and_change_nothing(tmp_path: Path) -> None:
    first = train(tmp_path / "apart", *FLAGS, *OTHERS, *SMALL, "--eval-engines", "1", "--num-steps", "3")
    assert first.code == 0, first.output
    apart = train(tmp_path / "apart", "--resume", str(tmp_path / "apart"), "--num-steps", "5", "--eval-engines", "2")
    assert apart.code == 0, apart.output
    shared = train(tmp_path / "shared", *FLAGS, *OTHERS, *SMALL, "--runtime", "local", "--num-steps", "5")
    assert shared.code == 0, shared.output
    measured, expected = figures(apart), figures(shared)
    assert list(measured) == [2, 3, 4, 5]  # step 3 was the last when the run began
    assert {step: measured[step]["eval/reward"] for step in expected} == {step: expected[step]["eval/reward"] for step in expected}
    assert [row["eval/engines"] for row in apart.metrics if "eval/tasks" in row] == [1, 1, 2, 2]
    steps = [json.loads(line)["step"] for line in (apart.directory / "evaluations.jsonl").read_text().splitlines()]
    assert steps == [2, 3, 4, 5]
    models = [run.directory / "model" / "model.safetensors" for run in (apart, shared)]
    assert models[0].read_bytes() == models[1].read_bytes()

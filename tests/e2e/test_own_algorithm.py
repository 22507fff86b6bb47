"""An estimator, a loss, a correction and a filter of a user's own file train as built-in ones do, bit by bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.runs import ROOT, SMALL, Run, succeeded, train

EXAMPLE = ROOT / "examples" / "own_algorithm.py"
FLAGS = (*SMALL, "--num-steps", "2", "--record", "none", "--no-tensorboard", "--mini-batches", "2")
BUILT_IN = ("--advantage-estimator", "group_norm", "--policy-loss", "ppo", "--off-policy", "icepop", "--flat-groups", "resample")
OWN = (
    *("--advantage-estimator", f"{EXAMPLE.relative_to(ROOT)}:group_advantages"),
    *("--policy-loss", f"{EXAMPLE.relative_to(ROOT)}:clipped_loss"),
    *("--off-policy", f"{EXAMPLE.relative_to(ROOT)}:agreeing_tokens"),
    *("--group-filter", f"{EXAMPLE.relative_to(ROOT)}:mixed_results"),
)


def weights(run: Run) -> bytes:
    return (run.directory / "model" / "model.safetensors").read_bytes()


@pytest.mark.timeout(300)
@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["local", "ray"])
def test_own_functions_equal_to_the_built_in_ones_give_the_same_weights(tmp_path: Path, runtime: str) -> None:
    built_in = succeeded(train(tmp_path / "built-in", *FLAGS, *BUILT_IN, "--runtime", runtime))
    own = succeeded(train(tmp_path / "own", *FLAGS, *OWN, "--runtime", runtime))
    assert weights(own) == weights(built_in)
    assert [row["group/pass_rate"] for row in own.metrics] == [row["group/pass_rate"] for row in built_in.metrics]
    assert all(row["policy/distance"] >= 0 for row in own.metrics)
    assert (own.directory / "plugins" / EXAMPLE.name).read_text() == EXAMPLE.read_text()
    algo = json.loads((own.directory / "config.json").read_text())["algo"]
    assert algo["advantage_estimator"] == f"{EXAMPLE}:group_advantages"
    assert algo["off_policy"] == f"{EXAMPLE}:agreeing_tokens"


@pytest.mark.slow
def test_an_exception_in_a_loss_ends_the_run_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("import agentrl\n\n@agentrl.policy_loss\ndef broken(inputs, options):\n    return inputs.nothing\n")
    run = train(tmp_path / "run", *FLAGS, "--policy-loss", f"{path}:broken", "--runtime", "ray")
    assert run.code != 0
    assert "--policy-loss: broken of" in run.output
    assert f"({path}, line 5). Correct the function." in run.output

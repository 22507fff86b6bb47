"""A process that the run depends on is killed: a typed error within seconds, and nothing left."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import psutil
import pytest

from agentrl.core.files import memory_root
from tests.e2e.runs import ENVS, SMALL, Run, start, succeeded
from tests.e2e.test_endings import family, running, wait_for_a_step


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("actor", "error"), [("RolloutActor", "EngineDeadError"), ("LearnerActor", "LearnerDeadError")])
def test_a_killed_actor_ends_the_run(tmp_path: Path, actor: str, error: str) -> None:
    words = ("--async", "--num-steps", "10000", "--max-engine-restarts", "0", *SMALL)
    process = start("train", "--agent", str(ENVS / "calculator.py"), "--run-dir", str(tmp_path / "run"), *words)
    try:
        wait_for_a_step(process, tmp_path / "run")
        children = family(process.pid)
        (victim,) = [child for child in children if actor in " ".join(child.cmdline())]
        begin = time.monotonic()
        victim.kill()
        output, _ = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    assert process.returncode == 1, output
    assert f"agentrl: {error}: " in output
    assert "Traceback" not in output
    assert time.monotonic() - begin < 30
    psutil.wait_procs(children, timeout=10)
    assert not running(children)


@pytest.mark.timeout(240)
def test_a_killed_engine_is_replaced(tmp_path: Path) -> None:
    words = ("--async", "--num-steps", "12", "--record", "all", *SMALL)
    process = start("train", "--agent", str(ENVS / "calculator.py"), "--run-dir", str(tmp_path / "run"), *words)
    try:
        wait_for_a_step(process, tmp_path / "run")
        (victim,) = [child for child in family(process.pid) if "RolloutActor" in " ".join(child.cmdline())]
        victim.kill()
        output, _ = process.communicate(timeout=150)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    run = succeeded(Run(process.returncode, output, tmp_path / "run"))
    assert [row["step"] for row in run.metrics] == list(range(1, 13))
    assert run.metrics[-1]["engine/restarts"] == 1
    assert run.metrics[-1]["engine/groups_run_again"] > 0
    assert run.metrics[-1]["ledger/trained"] == 12 * 4
    assert run.summary["ledger"]["in_flight"] == 0
    assert max(row["staleness/max"] for row in run.metrics) <= 1
    records = [json.loads(line) for line in (run.directory / "trajectories.jsonl").read_text().splitlines()]
    names = [record["trajectory_id"] for record in records]
    assert len(names) == len(set(names))
    assert {record["status"] for record in records} <= {"finished", "truncated"}
    assert max(row["mismatch/max"] or 0.0 for row in run.metrics) < 1e-3  # the weights of the new engine are those of its label


@pytest.mark.timeout(240)
def test_a_killed_learner_goes_on_from_the_last_checkpoint(tmp_path: Path) -> None:
    words = ("--num-steps", "6", "--save-every", "1", *SMALL)
    run_dir = tmp_path / "run"
    process = start("train", "--agent", str(ENVS / "calculator.py"), "--run-dir", str(run_dir), *words)
    try:
        while not list(run_dir.glob("checkpoints/step-*")):
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.05)
        (victim,) = [child for child in family(process.pid) if "LearnerActor" in " ".join(child.cmdline())]
        victim.kill()
        output, _ = process.communicate(timeout=150)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    run = succeeded(Run(process.returncode, output, run_dir))
    assert "a learner rank is gone" in output
    assert [row["step"] for row in run.metrics] == list(range(1, 7))
    assert run.metrics[-1]["ledger/trained"] == 6 * 4
    assert run.summary["status"] == "finished"


@pytest.mark.timeout(240)
def test_a_driver_killed_outright_leaves_nothing(tmp_path: Path) -> None:
    weights_before = set(memory_root().glob("agentrl-*"))
    words = ("--async", "--num-steps", "10000", *SMALL)
    process = start("train", "--agent", str(ENVS / "calculator.py"), "--run-dir", str(tmp_path / "run"), *words)
    try:
        wait_for_a_step(process, tmp_path / "run")
        children = family(process.pid)
        folders = {word.split("=")[-1] for child in children for word in child.cmdline() if "--temp-dir=" in word or "--temp_dir=" in word}
        assert folders
    finally:
        process.kill()
        process.communicate()
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not running(alive)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and (any(map(os.path.exists, folders)) or set(memory_root().glob("agentrl-*")) - weights_before):
        time.sleep(0.1)
    assert not [folder for folder in folders if Path(folder).exists()]
    assert not set(memory_root().glob("agentrl-*")) - weights_before

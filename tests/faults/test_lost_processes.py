"""A process that the run depends on is killed: the run goes on or ends with a typed error, and nothing is left."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import psutil
import pytest

from agentrl.core.operating_system import memory_root
from tests.e2e.runs import ENVS, SMALL, Run, succeeded
from tests.e2e.test_endings import family, running, wait_for_a_step
from tests.faults.report import Saw
from tests.faults.support import disturbed, ended, lines, until, workers_of

pytestmark = [pytest.mark.faults, pytest.mark.timeout(400)]

CALCULATOR = ("--agent", str(ENVS / "calculator.py"))
PATIENCE_S = 15.0


def largest_mismatch(run: Run) -> float:
    return max(row["mismatch/max"] or 0.0 for row in run.metrics)


def whole(run: Run, steps: int) -> list[str]:
    """Names of the episodes of a run, of which none was lost, none counted twice, and none trained on in part."""
    assert [row["step"] for row in run.metrics] == list(range(1, steps + 1))
    assert run.metrics[-1]["ledger/trained"] == steps * 4
    assert run.summary["ledger"]["in_flight"] == 0
    assert max(row["staleness/max"] for row in run.metrics) <= 1
    assert largest_mismatch(run) < 1e-3  # the weights of a new engine are those of its label
    records = [json.loads(line) for line in (run.directory / "trajectories.jsonl").read_text().splitlines()]
    names = [record["trajectory_id"] for record in records]
    assert len(names) == len(set(names)) == 16 * len({record["group_id"] for record in records}) // 4
    assert {record["status"] for record in records} <= {"finished", "truncated"}
    return names


@pytest.mark.row(1, "SIGKILL of one of {num_engines} engine processes while it generates, on Ray")
@pytest.mark.parametrize("num_engines", [1, 2])
def test_a_killed_engine_is_replaced(tmp_path: Path, num_engines: int, saw: Saw) -> None:
    run_dir, steps = tmp_path / "run", 16
    words = ("--async", "--num-steps", str(steps), "--record", "all", "--num-engines", str(num_engines), *SMALL)
    begin = time.monotonic()
    with disturbed(*CALCULATOR, "--run-dir", str(run_dir), *words) as process:
        wait_for_a_step(process, run_dir)
        start_s = time.monotonic() - begin
        victims = workers_of(process.pid, "RolloutActor")
        assert len(victims) == num_engines
        victims[0].kill()
        before = len(lines(run_dir / "metrics.jsonl"))
        again_s = until(process, lambda: len(lines(run_dir / "metrics.jsonl")) > before + 1)  # the next one may be under way
        output = ended(process, 200)
    run = succeeded(Run(process.returncode, output, run_dir))
    last = run.metrics[-1]
    assert last["engine/groups_run_again"] > 0
    assert last["engine/restarts"] == 1
    assert again_s < PATIENCE_S + (start_s if num_engines == 1 else 0)
    names = whole(run, steps)
    saw(f"progress again after {again_s:.1f} s (start-up of everything: {start_s:.1f} s)")
    saw(f"{last['engine/groups_run_again']:.0f} groups run again, {len(names)} episodes, none lost, twice or in part")
    saw(f"largest difference of a log-probability from its labelled weights {largest_mismatch(run):.1e}")


@pytest.mark.vllm
@pytest.mark.row(1, "SIGKILL of {victim} where vLLM's core has a process of its own, as on a GPU, on Ray")
@pytest.mark.parametrize("victim", ["the core", "the rollout worker"])
def test_a_killed_core_or_its_front_end_is_replaced_and_leaves_nothing(tmp_path: Path, victim: str, saw: Saw) -> None:
    run_dir, steps = tmp_path / "run", 16
    words = ("--async", "--num-steps", str(steps), "--record", "all", "--engine", "vllm", "--engine-core", "process", *SMALL)
    with disturbed(*CALCULATOR, "--run-dir", str(run_dir), *words) as process:
        wait_for_a_step(process, run_dir)
        (worker,) = workers_of(process.pid, "RolloutActor")
        cores = [child for child in worker.children(recursive=True) if "EngineCore" in " ".join(child.cmdline())]
        assert len(cores) == 1
        begin = time.monotonic()
        (cores[0] if victim == "the core" else worker).kill()
        cores[0].wait(PATIENCE_S)
        gone_s = time.monotonic() - begin
        output = ended(process, 300)
    run = succeeded(Run(process.returncode, output, run_dir))
    assert run.metrics[-1]["engine/restarts"] == 1
    names = whole(run, steps)
    saw(f"the core was gone after {gone_s:.1f} s; the engine was started again, {len(names)} episodes, none lost, twice or in part")


@pytest.mark.row(1, "SIGKILL of {victim} where two rollout workers share an engine, on Ray")
@pytest.mark.parametrize("victim", ["RolloutActor", "EngineActor"])
def test_a_killed_part_of_a_shared_engine_is_replaced(tmp_path: Path, victim: str, saw: Saw) -> None:
    run_dir, steps = tmp_path / "run", 16
    words = ("--async", "--num-steps", str(steps), "--record", "all", "--engine", "transformers", *SMALL)
    with disturbed(*CALCULATOR, "--run-dir", str(run_dir), "--rollout-workers-per-engine", "2", *words) as process:
        wait_for_a_step(process, run_dir)
        assert (len(workers_of(process.pid, "RolloutActor")), len(workers_of(process.pid, "EngineActor"))) == (2, 1)
        workers_of(process.pid, victim)[0].kill()
        output = ended(process, 300)
    run = succeeded(Run(process.returncode, output, run_dir))
    last = run.metrics[-1]
    assert last["engine/restarts"] == (0 if victim == "RolloutActor" else 1)  # the engine lives on without a rollout worker
    assert ("rollout worker 0 of an engine is lost" in output) == (victim == "RolloutActor")
    names = whole(run, steps)
    saw(f"{len(names)} episodes, none lost, twice or in part; the engine was started again {last['engine/restarts']:.0f} times")


@pytest.mark.row(2, "SIGKILL of all {num_engines} engine processes, none replaced")
@pytest.mark.parametrize("num_engines", [2])
def test_without_engines_the_run_ends(tmp_path: Path, num_engines: int, saw: Saw) -> None:
    words = ("--async", "--num-steps", "10000", "--max-engine-restarts", "0", "--num-engines", str(num_engines), *SMALL)
    seconds = dead_end(tmp_path / "run", "RolloutActor", "EngineDeadError", words)
    saw(f"EngineDeadError and exit code 1 after {seconds:.1f} s, no process left")


def test_without_a_checkpoint_a_killed_learner_ends_the_run(tmp_path: Path) -> None:
    dead_end(tmp_path / "run", "LearnerActor", "LearnerDeadError", ("--async", "--num-steps", "10000", *SMALL))


def dead_end(run_dir: Path, actor: str, error: str, words: tuple[str, ...]) -> float:
    """Kill every process of a kind; the run ends with this error; seconds that it took."""
    with disturbed(*CALCULATOR, "--run-dir", str(run_dir), *words) as process:
        wait_for_a_step(process, run_dir)
        children = family(process.pid)
        begin = time.monotonic()
        for victim in workers_of(process.pid, actor):
            victim.kill()
        output = ended(process, 60)
        seconds = time.monotonic() - begin
    assert process.returncode == 1, output
    assert f"agentrl: {error}: " in output
    assert "Traceback" not in output
    psutil.wait_procs(children, timeout=10)
    assert not running(children)
    return seconds


def test_a_killed_learner_goes_on_from_the_last_checkpoint(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with disturbed(*CALCULATOR, "--run-dir", str(run_dir), "--num-steps", "6", "--save-every", "1", *SMALL) as process:
        until(process, lambda: bool(list(run_dir.glob("checkpoints/step-*"))))
        (victim,) = workers_of(process.pid, "LearnerActor")
        victim.kill()
        output = ended(process, 200)
    run = succeeded(Run(process.returncode, output, run_dir))
    assert "learner-0 on 127.0.0.1 is gone" in output
    assert [row["step"] for row in run.metrics] == list(range(1, 7))
    assert run.metrics[-1]["ledger/trained"] == 6 * 4
    assert run.summary["status"] == "finished"


@pytest.mark.row(16, "SIGKILL of the driver itself, on Ray")
def test_a_driver_killed_outright_leaves_nothing(tmp_path: Path, saw: Saw) -> None:
    weights_before = set(memory_root().glob("agentrl-*"))
    words = ("--async", "--num-steps", "10000", *SMALL)
    with disturbed(*CALCULATOR, "--run-dir", str(tmp_path / "run"), *words) as process:
        wait_for_a_step(process, tmp_path / "run")
        children = family(process.pid)
        folders = {word.split("=")[-1] for child in children for word in child.cmdline() if "--temp-dir=" in word or "--temp_dir=" in word}
        assert folders
        begin = time.monotonic()
        process.kill()
        process.communicate()
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not running(alive)
    seconds = time.monotonic() - begin
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and (any(map(os.path.exists, folders)) or set(memory_root().glob("agentrl-*")) - weights_before):
        time.sleep(0.1)
    assert not [folder for folder in folders if Path(folder).exists()]
    assert not set(memory_root().glob("agentrl-*")) - weights_before
    saw(f"all {len(children)} processes gone after {seconds:.1f} s, with their folders and the weights in memory")

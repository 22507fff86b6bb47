"""Clusters that others started: addresses without an answer, a machine that is lost and one that joins."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.runs import ENVS, ROOT, SMALL, Run
from tests.faults.raylets import Raylets, raylets
from tests.faults.report import Saw
from tests.faults.support import ended, killed_at_the_end, lines, until

LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "disabled"}
"""Ray takes 127.0.0.1 at its word."""


@contextlib.contextmanager
def started(folder: Path, *words: str, env: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """``agentrl train`` in another folder than that of the project; killed at the end if it still runs."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    command = [sys.executable, "-m", "agentrl", "train", *words]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, cwd=folder, env=variables, stdout=pipe, stderr=subprocess.STDOUT, text=True, start_new_session=True)
    with process, killed_at_the_end(process):
        yield process


def joining(cluster: Raylets) -> tuple[str, ...]:
    return ("--device", "cpu", "--ray-address", cluster.address)


@pytest.mark.row(29, "--ray-address 127.0.0.1:9, where nobody listens")
def test_an_address_where_nobody_listens_is_one_error_that_names_the_flag(tmp_path: Path, saw: Saw) -> None:
    begin = time.monotonic()
    words = ("--agent", str(ENVS / "arithmetic.py"), "--ray-address", "127.0.0.1:9", "--run-dir", "run")
    with started(tmp_path, *words, env={}) as process:
        output = ended(process, 30)
    assert process.returncode == 2
    assert "agentrl: --ray-address = '127.0.0.1:9': nobody listens there" in output
    assert "Traceback" not in output
    saw(f"exit code 2 after {time.monotonic() - begin:.1f} s")


@pytest.mark.faults
@pytest.mark.timeout(200)
@pytest.mark.row(29, "a cluster with a token, joined without it")
def test_a_cluster_that_refuses_the_token_is_one_error(tmp_path: Path, saw: Saw) -> None:
    with raylets(1, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="a" * 64) as cluster:
        begin = time.monotonic()
        words = ("--agent", str(ENVS / "arithmetic.py"), *joining(cluster), "--run-dir", "run")
        with started(tmp_path, *words, env=LOOPBACK) as process:
            output = ended(process, 60)
        seconds = time.monotonic() - begin
    assert process.returncode == 2
    assert "agentrl: --ray-address = " in output
    assert "RAY_AUTH_TOKEN" in output
    assert "Traceback" not in output
    assert seconds < 30
    saw(f"exit code 2 after {seconds:.1f} s")


PLACING = """
import asyncio, sys
from agentrl.resolve.parts import cluster_plan
from agentrl.cluster.ray_runtime import RayRuntime
from agentrl.resolve.commands import load_config

async def main():
    config = load_config(["--agent", "module:Name", *sys.argv[1:]])
    runtime = RayRuntime(cluster_plan(config), lambda stage: print("stage:", stage, flush=True))
    runtime._create_actors = lambda placement: sys.exit(f"placed on {runtime._gpus()} GPUs")
    try:
        await runtime.start()
    except Exception as error:
        sys.exit(f"{type(error).__name__}: {error}")

asyncio.run(main())
"""


def placing(address: str, *flags: str) -> subprocess.Popen[str]:
    """A run that ends when its actors have places, with the number of its GPUs."""
    variables, pipe = {**os.environ, **LOOPBACK}, subprocess.PIPE
    words = [sys.executable, "-c", PLACING, "--ray-address", address, *flags]
    return subprocess.Popen(words, cwd=ROOT, env=variables, stdout=pipe, stderr=subprocess.STDOUT, text=True, start_new_session=True)


@pytest.mark.faults
@pytest.mark.timeout(300)
@pytest.mark.row(31, "GPU machines of a cluster that join only after the run, too few of them, too narrow ones, and none")
def test_machines_with_gpus_are_waited_for_and_their_lack_is_named(saw: Saw) -> None:
    """The GPUs are resources of Ray by name only: what is tried is what a run asks for, and what it says."""
    none, soon = ("--cluster-timeout-s", "0"), ("--cluster-timeout-s", "60")
    with raylets(8) as cluster:
        for flags, problem in (
            (none, "ConfigError: --device = 'auto': the cluster at .* had no GPU within 10 s. Add --device cpu"),
            ((*none, "--device", "cpu"), "placed on 0 GPUs"),
        ):
            with placing(cluster.address, *flags) as process, killed_at_the_end(process):
                assert re.search(problem, ended(process, 100))
        with placing(cluster.address, *soon, "--num-engines", "2") as process, killed_at_the_end(process):
            assert process.stdout is not None
            while "waiting for room" not in process.stdout.readline():
                assert process.poll() is None
            cluster.add(4, 2)
            cluster.add(4, 1)
            assert "placed on 3 GPUs" in ended(process, 100)
        with placing(cluster.address, *none, "--tensor-parallel-size", "4") as process, killed_at_the_end(process):
            problem = ended(process, 100)
    assert (
        "ClusterError: the cluster has no room within 10 s: one process needs 4 GPUs on one machine, and the largest machine has 2"
        in problem
    )
    saw("waited for, and named with the flag to use")


@pytest.mark.faults
@pytest.mark.timeout(600)
@pytest.mark.row(31, "one of two raylets is killed with its engine, and a third one is added")
def test_a_machine_is_lost_and_another_joins(tmp_path: Path, saw: Saw) -> None:
    """The run was started in another folder, with a relative path and a plug-in whose file imports a neighbour."""
    (tmp_path / "mine").mkdir()
    shutil.copy(ENVS / "calculator.py", tmp_path / "mine" / "agent.py")
    shutil.copy(ROOT / "examples" / "own_algorithm.py", tmp_path / "mine" / "neighbour.py")
    (tmp_path / "mine" / "own.py").write_text("from neighbour import clipped_loss\n")
    words = ("--agent", "mine/agent.py", "--policy-loss", "mine/own.py:clipped_loss", "--run-dir", "run", "--async", "--num-steps", "10000")
    sizes = ("--num-engines", "2", "--num-learners", "2", "--max-engine-restarts", "3", *SMALL)
    metrics = tmp_path / "run" / "metrics.jsonl"
    with (
        raylets(3, 1) as cluster,
        started(tmp_path, *words, *sizes, *joining(cluster), env=LOOPBACK) as process,
    ):
        until(process, lambda: len(lines(metrics)) > 2)
        assert cluster.actors("127.0.0.1") == ["LearnerActor", "LearnerActor", "RolloutActor"]
        assert cluster.actors("127.0.0.2") == ["RolloutActor"]
        cluster.kill()
        before = len(lines(metrics))
        again_s = until(process, lambda: len(lines(metrics)) > before + 3)
        assert lines(metrics)[-1]["engine/live"] == 1
        cluster.add(1)
        joined_s = until(process, lambda: lines(metrics)[-1]["engine/live"] == 2)
        assert cluster.actors("127.0.0.3") == ["RolloutActor"]
        before = len(lines(metrics))
        until(process, lambda: len(lines(metrics)) > before + 3)
        process.terminate()
        output = ended(process, 40)
    run = Run(process.returncode, output, tmp_path / "run")
    assert run.code == 130, output
    assert "Traceback" not in output
    last = run.metrics[-1]
    assert last["ledger/trained"] == 4 * len(run.metrics)
    assert max(row["staleness/max"] for row in run.metrics) <= 1
    assert max(row["mismatch/max"] or 0.0 for row in run.metrics) < 1e-3
    saw(f"3 whole steps {again_s:.1f} s after the loss; {last['engine/groups_run_again']:.0f} groups run again, none lost or twice")
    saw(f"the engine on the machine that joined took part {joined_s:.1f} s after it")


@pytest.mark.faults
@pytest.mark.timeout(600)
@pytest.mark.row(32, "the raylet with both learner ranks is killed; another has room for them")
def test_a_machine_with_learner_ranks_is_lost_and_the_learner_goes_on_elsewhere(tmp_path: Path, saw: Saw) -> None:
    words = ("--agent", str(ENVS / "calculator.py"), "--run-dir", "run", "--num-steps", "8", "--save-every", "1")
    metrics = tmp_path / "run" / "metrics.jsonl"
    with (
        raylets(1, 2) as cluster,
        started(tmp_path, *words, "--num-learners", "2", *SMALL, *joining(cluster), env=LOOPBACK) as process,
    ):
        until(process, lambda: bool(list(tmp_path.glob("run/checkpoints/step-*"))))
        assert cluster.actors("127.0.0.2") == ["LearnerActor", "LearnerActor"]
        cluster.add(2)
        before = len(lines(metrics))
        cluster.kill(0)
        again_s = until(process, lambda: len(lines(metrics)) > before + 1)
        assert cluster.actors("127.0.0.3") == ["LearnerActor", "LearnerActor"]
        output = ended(process, 200)
    run = Run(process.returncode, output, tmp_path / "run")
    assert run.code == 0, output
    assert " on 127.0.0.2 is gone" in output
    assert [row["step"] for row in run.metrics] == list(range(1, 9))
    assert run.metrics[-1]["ledger/trained"] == 8 * 4
    saw(f"the run went on from its last checkpoint on another machine; the next step {again_s:.1f} s after the loss")


@pytest.mark.faults
@pytest.mark.timeout(600)
@pytest.mark.row(32, "the raylet with both learner ranks is killed; no other has room for them")
def test_a_machine_with_learner_ranks_is_lost_for_good(tmp_path: Path, saw: Saw) -> None:
    words = ("--agent", str(ENVS / "calculator.py"), "--run-dir", "run", "--num-steps", "10000", "--save-every", "1")
    with (
        raylets(1, 2) as cluster,
        started(tmp_path, *words, "--num-learners", "2", *SMALL, *joining(cluster), env=LOOPBACK) as process,
    ):
        until(process, lambda: bool(list(tmp_path.glob("run/checkpoints/step-*"))))
        begin = time.monotonic()
        cluster.kill()
        output = ended(process, 300)
        seconds = time.monotonic() - begin
    assert process.returncode == 1, output
    assert "agentrl: LearnerDeadError: learner-" in output, output
    assert " on 127.0.0.2 is gone" in output
    assert "--resume" in output
    assert "Traceback" not in output
    saw(f"LearnerDeadError with the machine and --resume, exit code 1 after {seconds:.0f} s")

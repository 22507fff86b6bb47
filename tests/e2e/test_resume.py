"""Killed with SIGKILL and resumed on the real stack, a synchronous run ends as if nothing had happened."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest

from tests.e2e.runs import ENVS, SMALL, Run, start, succeeded, train
from tests.e2e.test_train import untimed
from tests.faults.report import Saw
from tests.faults.support import disturbed, kill, lines, until

pytestmark = pytest.mark.timeout(900)

LOCAL = ("--runtime", "local", *SMALL)
SAVED = (*LOCAL, "--save-every", "2")
STEPS = 8


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that nothing disturbs."""
    return succeeded(train(tmp_path_factory.mktemp("once") / "run", *SAVED, "--num-steps", str(STEPS)))


def kill_at(directory: Path, step: int, moment: float, *args: str) -> int:
    """Start or continue the run, and kill it a moment after it has told of this step; the steps that it has told of by then."""
    metrics = directory / "metrics.jsonl"
    step = max(step, len(lines(metrics)) + 1)  # what the life before has told is there until this one has rewound it
    with disturbed("--resume", "auto", "--run-dir", str(directory), "--agent", str(ENVS / "arithmetic.py"), *args) as process:
        until(process, lambda: len(lines(metrics)) >= step)
        time.sleep(moment)
        kill(process)
    return len(lines(metrics))


def weights(run: Run) -> bytes:
    return (run.directory / "model" / "model.safetensors").read_bytes()


def kill_in_each_part(directory: Path, kills: int, once: Run, *args: str) -> list[int]:
    """Kill a run like `once` at a random moment of each of so many equal parts, and leave it alone in one more; the steps it was at."""
    part, step_s = once.summary["steps"] // (kills + 1), once.summary["time"]["loop_s"] / once.summary["steps"]
    steps = [kill * part + random.randint(1, part) for kill in range(kills)]
    return [kill_at(directory, step, random.uniform(0.0, step_s), *args) for step in steps]


def same_after_kills(folder: Path, kills: int, once: Run, *more: str) -> list[int]:
    num_steps = once.summary["steps"]
    arguments = (*SAVED, "--num-steps", str(num_steps), *more)
    killed = kill_in_each_part(folder / "killed", kills, once, *arguments)
    again = succeeded(train(folder / "killed", "--resume", "auto", *arguments))
    assert weights(again) == weights(once)
    assert untimed(again) == untimed(once)
    assert again.summary["steps"] == num_steps
    assert not list((folder / "killed" / "checkpoints").glob(".*"))
    return killed


@pytest.mark.slow
def test_one_kill_changes_nothing(tmp_path: Path, once: Run) -> None:
    same_after_kills(tmp_path, 1, once)


@pytest.mark.slow
def test_one_kill_changes_no_draw_by_pass_rate_and_no_entropy_bonus(tmp_path: Path) -> None:
    more = ("--task-sampling", "learnability", "--entropy-target", "0.3", "--mask-truncated", "--flat-groups", "resample")
    once = succeeded(train(tmp_path / "once", *SAVED, "--num-steps", str(STEPS), *more))
    same_after_kills(tmp_path, 1, once, *more)
    assert once.metrics[-1]["tasks/tried"] > 0.05


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["muon", "adafactor", "adamw_8bit"])
def test_one_kill_changes_nothing_with_another_optimizer(tmp_path: Path, optimizer: str) -> None:
    if optimizer == "adamw_8bit":
        pytest.importorskip("bitsandbytes")
    more = ("--optimizer", optimizer, "--weight-decay", "0.1")
    once = succeeded(train(tmp_path / "once", *SAVED, "--num-steps", str(STEPS), *more))
    same_after_kills(tmp_path, 1, once, *more)


@pytest.mark.slow
@pytest.mark.parametrize("isolation", ["none", "process"])
def test_one_kill_changes_no_fork(tmp_path: Path, isolation: str) -> None:
    """Episodes go on from a turn of another one, and learn by what that turn was worth."""
    more = ("--agent", str(ENVS / "frozen_lake.py"), "--branch-at", "1", "--advantage-estimator", "turn_norm", "--max-turns", "4")
    more = (*more, "--env-isolation", isolation)
    once = succeeded(train(tmp_path / "once", *SAVED, "--num-steps", str(STEPS), *more))
    same_after_kills(tmp_path, 1, once, *more)
    assert once.metrics[-1]["ledger/forked"] > STEPS


def test_a_signal_saves_and_changes_nothing(tmp_path: Path, once: Run) -> None:
    arguments = (*LOCAL, "--num-steps", str(STEPS))
    process = start("train", "--run-dir", str(tmp_path / "stopped"), "--agent", str(ENVS / "arithmetic.py"), *arguments)
    metrics, deadline = tmp_path / "stopped" / "metrics.jsonl", time.monotonic() + 100
    while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.02)
    begin = time.monotonic()
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert f"continue with: agentrl train --resume {tmp_path / 'stopped'}" in output
    assert time.monotonic() - begin < 30
    done = len(metrics.read_text().splitlines())
    assert 1 <= done < STEPS
    assert [path.name for path in (tmp_path / "stopped" / "checkpoints").iterdir()] == [f"step-{done:08d}"]
    resumed = start("train", "--resume", str(tmp_path / "stopped"))
    output, _ = resumed.communicate(timeout=200)
    again = Run(resumed.returncode, output, tmp_path / "stopped")
    assert weights(succeeded(again)) == weights(once)
    assert untimed(again) == untimed(once)


@pytest.mark.faults
@pytest.mark.row(12, "10 times SIGKILL at random points of a synchronous run (real vLLM and DeepSpeed), resumed each time")
def test_ten_kills_change_nothing(tmp_path: Path, saw: Saw) -> None:
    killed = same_after_kills(tmp_path, 10, succeeded(train(tmp_path / "once", *SAVED, "--num-steps", "50")))
    saw(f"{len(killed)} of 10 kills hit the running process, after steps {', '.join(map(str, killed))} of 50")
    saw("weights and metrics of all 50 steps equal those of the uninterrupted run, byte for byte")

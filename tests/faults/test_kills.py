"""Killed with SIGKILL at awkward moments and resumed: nothing is skipped, repeated, or taken for complete that is not."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from agentrl.flow.checkpoint import latest_checkpoint, read_checkpoint
from tests.e2e.runs import ENVS, SMALL, succeeded, train
from tests.e2e.test_resume import weights
from tests.e2e.test_train import untimed
from tests.faults.report import Saw
from tests.faults.support import checkpoints, disturbed, kill, lines, until

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1200)]

EPOCH = """
from collections import Counter
from agentrl import AgentInstance, StepResult, Task

CALLS = Counter()

class Epoch(AgentInstance):
    '''48 tasks: of 8 in a row one always fails and one is worth nothing to learn from; in the others one of two members succeeds.'''

    @classmethod
    def tasks(cls):
        return [Task(f"Say {i}.", label=["train", "fail", "train", "dull", "train", "train", "train", "train"][i % 8]) for i in range(48)]

    def step(self, state):
        CALLS[state.task.id] += 1
        if state.label == "fail":
            raise ValueError("this one always fails")
        return StepResult(float(state.label == "train" and CALLS[state.task.id] % 2), terminated=True)
"""
KILLS = 10
STEPS = 26
STALENESS = 2
SIZES = ("--groups-per-step", "2", "--n-samples-per-prompt", "2", "--max-new-tokens", "8", "--max-staleness", str(STALENESS))
FULL = STALENESS * 2


def kinds(run_dir: Path) -> dict[int, str]:
    """Group id -> what its task is there for, of all groups that have been recorded."""
    return {record["group_id"]: record["task"]["label"] for record in lines(run_dir / "trajectories.jsonl")}


def trained(notes: Path) -> list[int]:
    """Ids of the groups of every step, in the order of the steps; what a killed step was given is replaced by its repetition."""
    steps = {note["step"]: note["groups"] for note in lines(notes / "training.jsonl")}
    return [group_id for step in sorted(steps) for group_id in steps[step]]


def waiting(run_dir: Path, notes: Path) -> int:
    """Accepted groups in the queue, seen from outside."""
    return len({group_id for group_id, kind in kinds(run_dir).items() if kind == "train"} - set(trained(notes)))


@pytest.mark.row(13, "10 times SIGKILL with the queue full (real vLLM and DeepSpeed), a slow learner, filtered and failing tasks")
def test_ten_kills_with_a_full_queue_skip_and_repeat_nothing(tmp_path: Path, saw: Saw) -> None:
    agent, run_dir = tmp_path / "epoch.py", tmp_path / "run"
    agent.write_text(EPOCH)
    words = ("--agent", str(agent), "--run-dir", str(run_dir), "--resume", "auto", "--runtime", "local", "--async", *SIZES)
    words += ("--num-steps", str(STEPS), "--save-every", "1", "--record", "all", "--flat-groups", "resample", "--max-failure-rate", "0.9")
    depths, steps = [], []
    for _ in range(KILLS):
        with disturbed(*words, faults="slow_train=1", folder=tmp_path) as process:
            begun = len(lines(tmp_path / "training.jsonl")) + random.randint(2, 3)  # the first of them is the one that was killed
            until(process, lambda begun=begun: len(lines(tmp_path / "training.jsonl")) >= begun)  # type: ignore[misc]
            moment = time.monotonic() + random.uniform(0.0, 1.0)
            until(process, lambda moment=moment: time.monotonic() >= moment and waiting(run_dir, tmp_path) >= FULL)  # type: ignore[misc]
            kill(process)
        depths.append(waiting(run_dir, tmp_path))
        steps.append(lines(tmp_path / "training.jsonl")[-1]["step"] + 1)
    run = succeeded(train(run_dir, *words[4:], agent=agent))
    records = lines(run_dir / "trajectories.jsonl")
    fates, done = kinds(run_dir), steps_trained(records, tmp_path)
    check_epoch(records, fates, done)
    ledger = run.summary["ledger"]
    expected = Counter(fates.values())
    assert (ledger["trained"], ledger["filtered"], ledger["dropped"]) == (expected["train"], expected["dull"], expected["fail"])
    assert (ledger["submitted"], ledger["in_flight"]) == (len(fates), 0)
    assert [row["step"] for row in run.metrics] == list(range(1, STEPS + 1))
    assert max(row["staleness/max"] for row in run.metrics) <= STALENESS
    saw(f"killed in steps {', '.join(map(str, steps))} of {STEPS}; queue at the kills: {', '.join(map(str, depths))} (full: {FULL})")
    saw(f"{len(fates)} groups: {ledger['trained']} trained, {ledger['filtered']} filtered, {ledger['dropped']} dropped, 0 skipped, 0 twice")


def steps_trained(records: list[dict[str, Any]], notes: Path) -> list[int]:
    """Ids that the finished run trained on; its last life had no notes, but every step is filled with the oldest groups."""
    noted = trained(notes)
    rest = sorted({record["group_id"] for record in records if record["task"]["label"] == "train"} - set(noted))
    return noted + rest


def check_epoch(records: list[dict[str, Any]], fates: dict[int, str], done: list[int]) -> None:
    assert sorted(fates) == list(range(len(fates)))
    assert done == sorted(set(done))
    assert done == [group_id for group_id in sorted(fates) if fates[group_id] == "train"]
    assert len(done) == STEPS * 2
    names = [record["trajectory_id"] for record in records]
    assert len(names) == len(set(names))
    places = {record["group_id"]: (record["task"]["epoch"], record["task"]["id"]) for record in records}
    assert len(set(places.values())) == len(places)
    assert Counter(epoch for epoch, _ in places.values())[0] == 48
    attempts = Counter((record["group_id"], record["attempt"]) for record in records)
    assert all(count == 2 for count in attempts.values())  # both members of every attempt
    assert all(attempts[group_id, 1] == (2 if kind == "fail" else 0) for group_id, kind in fates.items())


@pytest.mark.row(14, "SIGKILL while a checkpoint is written: at its first file, at its manifest, and at random (real stack, slow disk)")
def test_a_kill_during_a_save_leaves_the_checkpoints_before(tmp_path: Path, saw: Saw) -> None:
    words = ("--runtime", "local", "--save-every", "1", "--num-steps", "8", *SMALL)
    once = succeeded(train(tmp_path / "once", *words))
    run_dir = tmp_path / "killed"
    resume = ("--agent", str(ENVS / "arithmetic.py"), "--run-dir", str(run_dir), "--resume", "auto", *words)
    left = []
    for moment in ("*", "manifest.json", "random"):
        with disturbed(*resume, faults="slow_fsync=0.1", folder=tmp_path) as process:
            known = len(checkpoints(run_dir))
            until(process, lambda known=known: len(list((run_dir / "checkpoints").glob("step-*"))) > known)  # type: ignore[misc]
            until(process, lambda: bool(hidden(run_dir, "*" if moment == "random" else moment)))  # noqa: B023
            time.sleep(random.uniform(0.0, 1.0) if moment == "random" else 0.0)
            kill(process)
        left.append(len(hidden(run_dir, "*")))
        complete = checkpoints(run_dir)  # each is what its manifest says
        latest = latest_checkpoint(run_dir)
        assert latest == complete[-1].absolute()
        assert read_checkpoint(latest)[0].step == int(latest.name.removeprefix("step-"))
    assert left[0] > 0
    again = succeeded(train(run_dir, "--resume", "auto", *words))
    assert weights(again) == weights(once)
    assert untimed(again) == untimed(once)
    assert not list((run_dir / "checkpoints").glob(".*"))
    saw(f"files of the unfinished checkpoint left by the kills: {', '.join(map(str, left))}; none was taken for one")
    saw("resumed each time from the last complete checkpoint; weights and metrics equal those of the uninterrupted run")


def hidden(run_dir: Path, pattern: str) -> list[Path]:
    """Files of checkpoints under way."""
    return [path for folder in (run_dir / "checkpoints").glob(".*.partial") for path in folder.rglob(pattern)]


SAVER = """
import asyncio, sys
from pathlib import Path
from agentrl.core.manifest import flush_files
from agentrl.flow.saving import Checkpoints
from agentrl.flow.checkpoint import Progress

class Learner:
    async def save_checkpoint(self, path, step):
        for part in range(4):
            Path(path, f"part-{part}").write_bytes(step.to_bytes(4, "big") * 50_000)

    async def flush_checkpoint(self, path):
        return flush_files(Path(path), ["part-0", "part-1"])

async def main(folder, first):
    checkpoints = Checkpoints(Path(folder), Learner(), every=1, num_steps=10**6, keep=2, config="{}")
    for step in range(first, 10**6):
        async with checkpoints.saving(Progress(step=step)):
            pass
        print(step, flush=True)

asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


@pytest.mark.row(14, "30 times SIGKILL at a random moment of an endless series of checkpoints")
def test_the_latest_checkpoint_is_the_last_complete_one(tmp_path: Path, saw: Saw) -> None:
    step, torn = 0, 0
    for _ in range(30):
        with subprocess.Popen([sys.executable, "-c", SAVER, str(tmp_path), str(step + 1)], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            told = [process.stdout.readline()]
            time.sleep(random.uniform(0.0, 0.1))
            process.kill()
            told += process.stdout.readlines()
        acknowledged = int([line for line in told if line.endswith("\n")][-1])
        torn += bool(hidden(tmp_path, "*"))
        latest = latest_checkpoint(tmp_path)
        assert latest is not None
        step = read_checkpoint(latest)[0].step
        assert step in (acknowledged, acknowledged + 1)
        assert (latest / "learner" / "part-3").read_bytes() == step.to_bytes(4, "big") * 50_000
        assert len(checkpoints(tmp_path)) in (1, 2, 3)  # the oldest may not have been removed yet
    saw(f"{step} checkpoints, {torn} of 30 kills left an unfinished one behind; the latest complete one was found each time")

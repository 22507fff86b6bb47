"""Copies of checkpoints on the real stack: killed during a copy, damaged at the address, an address that fails; resumed elsewhere."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from agentrl.flow.uploads import find_copy, step_of
from tests.e2e.runs import ENVS, SMALL, Run, succeeded, train
from tests.e2e.test_resume import weights
from tests.e2e.test_train import untimed
from tests.faults.report import Saw
from tests.faults.support import checkpoints, disturbed, ended, kill, lines, until

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]

STEPS = 8
LOCAL = ("--runtime", "local", "--save-every", "1", "--num-steps", str(STEPS), *SMALL)


def fresh(run_dir: Path, address: Path, *more: str) -> tuple[str, ...]:
    return ("--agent", str(ENVS / "arithmetic.py"), "--run-dir", str(run_dir), "--checkpoint-upload", str(address), *LOCAL, *more)


def without_copies(run: Run) -> list[dict[str, object]]:
    return [{name: value for name, value in row.items() if not name.startswith("checkpoint/")} for row in untimed(run)]


@pytest.mark.row(14, "SIGKILL while a checkpoint is copied to --checkpoint-upload (real stack); resumed from the address in another folder")
def test_a_kill_during_a_copy_resumes_from_the_last_complete_one(tmp_path: Path, saw: Saw) -> None:
    once = succeeded(train(tmp_path / "once", *LOCAL))
    address = tmp_path / "copies"
    with disturbed(*fresh(tmp_path / "first", address), faults="upload_mb_per_s=20", folder=tmp_path) as process:
        until(process, lambda: find_copy(str(address)) is not None)
        complete = find_copy(str(address))
        assert complete is not None
        until(process, lambda: any(step_of(path) > complete.step for path in address.glob("step-*")))
        kill(process)
    torn = [path.name for path in address.glob("step-*") if not (path / "manifest.json").exists()]
    copy = find_copy(str(address))
    assert copy is not None
    shutil.rmtree(tmp_path / "first")  # the machine is gone
    words = ("--resume", str(address), "--run-dir", str(tmp_path / "second"))
    with disturbed(*words) as process:
        output = ended(process, 250)
    again = succeeded(Run(process.returncode, output, tmp_path / "second"))
    assert weights(again) == weights(once)
    rows = without_copies(again)
    assert [row["step"] for row in rows] == list(range(copy.step + 1, STEPS + 1))
    assert [{**row, "time_s": 0} for row in rows] == [{**row, "time_s": 0} for row in untimed(once)[copy.step :]]
    last = find_copy(str(address))
    assert last is not None
    assert last.step == STEPS
    assert all((path / "manifest.json").exists() for path in address.glob("step-*"))
    saw(f"killed with the copy of step {copy.step} complete and {', '.join(torn) or 'none'} begun; resumed from step {copy.step} elsewhere")
    saw("weights and metrics equal those of the uninterrupted run, byte for byte; the broken copy is gone at the end")


@pytest.mark.row(14, "one bit of a learner's file changed: in a copy, and in a checkpoint of the run's directory")
def test_a_flipped_bit_is_never_trained_on(tmp_path: Path, saw: Saw) -> None:
    address, run_dir = tmp_path / "copies", tmp_path / "run"
    once = succeeded(train(run_dir, "--checkpoint-upload", str(address), *LOCAL))
    expected = weights(once)
    file = flipped(address / f"step-{STEPS:08d}" / "learner")
    with disturbed("--resume", str(address), "--run-dir", str(tmp_path / "other"), "--num-steps", str(STEPS + 1)) as process:
        output = ended(process, 200)
    assert process.returncode == 1, output
    assert f"agentrl: CheckpointError: {file} is not what manifest.json says" in " ".join(output.split())
    assert not list((tmp_path / "other" / "checkpoints").iterdir())
    shutil.rmtree(address)
    flipped(run_dir / "checkpoints" / f"step-{STEPS:08d}" / "learner")
    (run_dir / "summary.json").unlink()  # as if it had been killed before its end
    with disturbed("--resume", str(run_dir)) as process:
        output = ended(process, 200)
    again = succeeded(Run(process.returncode, output, run_dir))
    assert "going on from the newest other one" in " ".join(output.split())
    assert weights(again) == expected
    names = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    assert names == [f"damaged-step-{STEPS:08d}", f"step-{STEPS - 1:08d}", f"step-{STEPS:08d}"]
    saw("the copy is refused with CheckpointError that names the file, nothing is left of it; with the damaged checkpoint in its own")
    saw("directory the run goes on from the one before, and ends with the same weights")


def flipped(folder: Path) -> Path:
    """Flip a bit in the middle of the largest file."""
    file = max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    with file.open("r+b") as content:
        content.seek(file.stat().st_size // 2)
        byte = content.read(1)[0]
        content.seek(-1, os.SEEK_CUR)
        content.write(bytes([byte ^ 1]))
    return file


@pytest.mark.row(16, "SIGTERM while copies to a slow address are behind")
def test_a_signal_does_not_wait_long_for_a_slow_address(tmp_path: Path, saw: Saw) -> None:
    address, run_dir = tmp_path / "copies", tmp_path / "run"
    words = (*fresh(run_dir, address), "--num-steps", "500")
    with disturbed(*words, faults="upload_mb_per_s=0.1", folder=tmp_path) as process:
        until(process, lambda: len(lines(run_dir / "metrics.jsonl")) >= 2)
        begin = time.monotonic()
        process.send_signal(signal.SIGTERM)
        output = ended(process, 60)
        took = time.monotonic() - begin
    assert process.returncode == 130, output
    assert took < 30
    assert "the last checkpoint could not be copied" in " ".join(output.split())
    assert find_copy(str(address)) is None
    assert step_of(checkpoints(run_dir)[-1]) == len(lines(run_dir / "metrics.jsonl"))
    steps = step_of(checkpoints(run_dir)[-1]) + 2
    with disturbed("--resume", str(run_dir), "--num-steps", str(steps)) as process:
        output = ended(process, 200)
    succeeded(Run(process.returncode, output, run_dir))
    copy = find_copy(str(address))
    assert copy is not None
    assert copy.step == steps
    saw(f"ended {took:.1f} s after SIGTERM, saved and resumable, with one line about the copy; resumed, the copies are complete")


@pytest.mark.row(16, "SIGTERM while a finished run waits for its last copy to a slow address")
def test_a_signal_ends_the_wait_for_the_last_copy(tmp_path: Path, saw: Saw) -> None:
    address, run_dir = tmp_path / "copies", tmp_path / "run"
    with disturbed(*fresh(run_dir, address), faults="upload_mb_per_s=0.1", folder=tmp_path) as process:
        until(process, lambda: (run_dir / "model").exists())
        time.sleep(0.5)  # the wait begins right after the model has its name
        begin = time.monotonic()
        process.send_signal(signal.SIGTERM)
        output = ended(process, 60)
        took = time.monotonic() - begin
    assert process.returncode == 1, output
    assert took < 30
    assert "agentrl: CheckpointError: the last checkpoint could not be copied to" in " ".join(output.split())
    with disturbed("--resume", str(run_dir)) as process:
        output = ended(process, 200)
    succeeded(Run(process.returncode, output, run_dir))
    copy = find_copy(str(address))
    assert copy is not None
    assert copy.step == STEPS
    saw(f"CheckpointError and exit code 1 after {took:.1f} s, everything else saved; resumed, the last checkpoint is copied")


@pytest.mark.row(15, "--checkpoint-upload on a file system that is full")
def test_a_full_address_costs_no_step_and_the_end_says_so(tmp_path: Path, saw: Saw) -> None:
    from tests.faults.test_disk_full import CAN_MOUNT, can_mount

    if not can_mount():
        pytest.skip("this system lets nobody mount a file system of his own")
    import subprocess

    from tests.e2e.runs import ROOT, command

    disk, run_dir = tmp_path / "disk", tmp_path / "run"
    disk.mkdir()
    script = f'mount -t tmpfs -o size=4m tmpfs {disk}; exec "$@"'
    words = command("train", *fresh(run_dir, disk / "copies"))
    done = subprocess.run(
        [*CAN_MOUNT, "sh", "-c", script, "sh", *words], capture_output=True, text=True, check=False, cwd=ROOT, timeout=400
    )
    said = " ".join(done.stderr.split())
    assert done.returncode == 1, done.stderr
    assert "agentrl: CheckpointError: the last checkpoint could not be copied to" in said
    assert "No space left on device" in said
    assert step_of(checkpoints(run_dir)[-1]) == STEPS
    assert (run_dir / "model" / "model.safetensors").exists()
    failures = lines(run_dir / "metrics.jsonl")[-1]["checkpoint/upload_failures"]
    saw(f"all {STEPS} steps done, model and checkpoints saved, {failures:.0f} failed copies told of; CheckpointError, exit code 1")

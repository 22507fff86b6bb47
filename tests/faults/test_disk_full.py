"""No room left for a checkpoint: a typed error, the older ones intact, nothing half written, and a run that can be resumed."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.flow.checkpoint import read_checkpoint
from tests.e2e.runs import ENVS, ROOT, SMALL, Run, command, succeeded
from tests.faults.report import Saw
from tests.faults.support import checkpoints, disturbed, ended

CAN_MOUNT = ["unshare", "--user", "--map-root-user", "--mount"]


def can_mount() -> bool:
    """Whether a small file system can be mounted for a process of one's own."""
    if shutil.which("unshare") is None:
        return False
    script = "mount -t tmpfs -o size=1m tmpfs /tmp"
    return subprocess.run([*CAN_MOUNT, "sh", "-c", script], capture_output=True, check=False).returncode == 0


FILL = """
import asyncio, os, sys
from pathlib import Path
from agentrl.core.errors import CheckpointError
from agentrl.flow.checkpoint import latest_checkpoint, read_checkpoint
from agentrl.flow.saving import Checkpoints
from agentrl.flow.checkpoint import Progress

class Learner:
    async def save_checkpoint(self, path, step):
        try:
            Path(path, "weights").write_bytes(bytes(900_000))
        except OSError as error:
            raise CheckpointError(str(error)) from error

    async def flush_checkpoint(self, path):
        return {}

async def main(folder):
    checkpoints = Checkpoints(folder, Learner(), every=1, num_steps=10**6, keep=5, config="{}")
    for step in range(1, 10):
        try:
            async with checkpoints.saving(Progress(step=step)):
                pass
        except CheckpointError as error:
            print(error)
            break
    print(read_checkpoint(latest_checkpoint(folder))[0].step, sorted(os.listdir(folder / "checkpoints")))

asyncio.run(main(Path(sys.argv[1])))
"""


@pytest.mark.row(15, "checkpoints of 0.9 MB on a file system of 3 MB")
def test_a_full_disk_leaves_the_checkpoints_before(tmp_path: Path, saw: Saw) -> None:
    if not can_mount():
        pytest.skip("this system lets nobody mount a file system of his own")
    script = f'mount -t tmpfs -o size=3m tmpfs {tmp_path} && exec "$@"'
    words = [*CAN_MOUNT, "sh", "-c", script, "sh", sys.executable, "-c", FILL, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT)
    error, left = done.stdout.splitlines()
    assert "No space left on device" in error
    assert re.search(r"the file system at \S+ is full: 0\.\d MiB of 3\.0 MiB are free, and 0\.9 MiB are needed", error), error
    assert left == "3 ['step-00000001', 'step-00000002', 'step-00000003']"
    saw("the fourth ended with CheckpointError: No space left on device; three complete ones, nothing else")


@pytest.mark.faults
@pytest.mark.timeout(600)
@pytest.mark.row(15, "a real run on a disk of {size} MiB, checkpoints of 14 MiB and --save-every 1; then resumed where there is room")
@pytest.mark.parametrize("size", [32, 40])
def test_a_run_on_a_full_disk_ends_with_a_typed_error(tmp_path: Path, size: int, saw: Saw) -> None:
    """The disk is full for the records of the steps too, so one of these may be the first to fail while the learner writes."""
    if not can_mount():
        pytest.skip("this system lets nobody mount a file system of his own")
    sizes = ("--runtime", "local", "--save-every", "1", "--keep-checkpoints", "9", "--no-tensorboard", *SMALL)
    disk, kept = tmp_path / "disk", tmp_path / "kept"
    disk.mkdir()
    words = command("train", "--agent", str(ENVS / "arithmetic.py"), "--run-dir", str(disk / "run"), "--num-steps", "20", *sizes)
    script = f'mount -t tmpfs -o size={size}m tmpfs {disk}; "$@"; code=$?; cp -a {disk}/run {kept}; exit $code'
    done = subprocess.run(
        [*CAN_MOUNT, "sh", "-c", script, "sh", *words], capture_output=True, text=True, check=False, cwd=ROOT, timeout=200
    )
    assert done.returncode == 1, done.stderr
    said = re.search(
        r"^agentrl: (StorageError|CheckpointError): .*(No space left on device|unexpected pos)", done.stderr, re.MULTILINE
    )  # torch's words
    assert said is not None, done.stderr
    assert re.search(rf"the file system at {disk} is full: \d+\.\d MiB of {size}\.0 MiB are free", done.stderr), done.stderr
    assert "warning: the disk will be full: 10 checkpoints of about " in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    complete = checkpoints(kept)
    step = read_checkpoint(complete[-1])[0].step
    assert len(complete) == step > 0
    assert not list((kept / "checkpoints").glob(".*"))
    with disturbed("--resume", str(kept), "--run-dir", str(kept), "--num-steps", str(step + 2)) as process:
        output = ended(process, 200)
    run = succeeded(Run(process.returncode, output, kept))
    assert run.summary["steps"] == step + 2
    saw(f"{said[1]} and exit code 1 after {step} checkpoints, all complete, nothing half written")
    saw(f"resumed from step {step} where there was room")


@pytest.mark.faults
@pytest.mark.timeout(600)
@pytest.mark.row(15, "the files of the third checkpoint may not grow beyond 64 KiB (RLIMIT_FSIZE)")
def test_a_file_that_cannot_be_written_whole(tmp_path: Path, saw: Saw) -> None:
    run_dir = tmp_path / "run"
    words = ("--runtime", "local", "--save-every", "1", "--num-steps", "6", *SMALL)
    begin = ("--agent", str(ENVS / "arithmetic.py"), "--run-dir", str(run_dir), *words)
    with disturbed(*begin, faults="full_disk_at=3", folder=tmp_path) as process:
        output = ended(process, 200)
    assert process.returncode == 1, output
    assert "agentrl: CheckpointError: " in output
    assert "File too large" in output or "file too large" in output.lower() or "unexpected pos" in output, output
    assert [path.name for path in checkpoints(run_dir)] == ["step-00000001", "step-00000002"]
    assert not list((run_dir / "checkpoints").glob(".*"))
    with disturbed("--resume", str(run_dir)) as process:
        output = ended(process, 200)
    assert succeeded(Run(process.returncode, output, run_dir)).summary["steps"] == 6
    saw("CheckpointError and exit code 1; steps 1 and 2 complete, nothing half written; resumed from step 2 to the end")

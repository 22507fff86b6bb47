"""A directory that one process at a time writes to."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.core.directories import LOCK, held_directory, held_new_directory
from agentrl.core.errors import ConfigError

HOLD = """
import sys, time
from pathlib import Path
from agentrl.core.directories import held_directory
with held_directory(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def hold(path: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_process_is_refused_until_the_first_is_killed(tmp_path: Path) -> None:
    process = hold(tmp_path / "run")
    try:
        told = rf"--resume = '.*run': is being written to by process {process.pid} on .+, since 2"
        with pytest.raises(ConfigError, match=told), held_directory(tmp_path / "run", "--resume"):
            pass
        assert (tmp_path / "run" / LOCK).is_file(), "who is refused must leave the lock alone"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    with held_directory(tmp_path / "run") as path:
        assert json.loads((path / LOCK).read_text())["pid"] == os.getpid()
        (path / "metrics.jsonl").write_text("")
    assert [file.name for file in path.iterdir()] == ["metrics.jsonl"]


def test_two_holders_in_one_process_are_two(tmp_path: Path) -> None:
    told = pytest.raises(ConfigError, match=f"process {os.getpid()} on ")
    with held_directory(tmp_path / "run"), told, held_directory(tmp_path / "run"):
        pass


def test_default_names_get_a_number(tmp_path: Path) -> None:
    with (
        held_new_directory(tmp_path / "x-20260101-000000") as first,
        held_new_directory(tmp_path / "x-20260101-000000") as second,
        held_new_directory(tmp_path / "x-20260101-000000") as third,
    ):
        assert [path.name for path in (first, second, third)] == ["x-20260101-000000", "x-20260101-000000-2", "x-20260101-000000-3"]
    assert not list(tmp_path.iterdir()), "directories that nothing was written to are removed"


def test_only_the_owner_may_read_it(tmp_path: Path) -> None:
    with held_directory(tmp_path / "a" / "run") as path:
        assert path.stat().st_mode & 0o777 == 0o700
    (tmp_path / "shared").mkdir(mode=0o755)
    with held_directory(tmp_path / "shared") as path:
        assert path.stat().st_mode & 0o777 == 0o755, "a directory of the user stays as it is"
    assert path.is_dir()


def test_paths_are_absolute_and_the_message_has_the_typed_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with held_directory(Path("runs/x")) as path:
        assert path == tmp_path / "runs" / "x"
        monkeypatch.chdir("/")
        with pytest.raises(ConfigError, match="--run-dir = 'runs/x'"), held_directory(path):
            pass

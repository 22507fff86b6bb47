"""Directories for temporary files, which the next call of another process removes when their own was killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from agentrl.core.files import scratch_directory


def test_what_a_killed_process_leaves_is_removed_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        with scratch_directory() as folder:
            (folder / "file").write_text("left")
            os.write(writing, b"1")
            signal.pause()
    os.read(reading, 1)
    with scratch_directory() as own:
        assert len(list(tmp_path.iterdir())) == 2  # that of a process that lives stays
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with scratch_directory() as own:
        assert list(tmp_path.iterdir()) == [own]
    assert not list(tmp_path.iterdir())

"""The room for checkpoints, judged before a run begins; and a full disk, named where a write fails."""

from __future__ import annotations

import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from agentrl.assets import tiny_model_path
from agentrl.config.schema import TrainConfig
from agentrl.config.sections import changed
from agentrl.core.disk import write_problem
from agentrl.core.errors import ConfigError
from agentrl.core.model_shape import find_shape
from agentrl.resolve.sizing.memory import checkpoint_bytes
from agentrl.resolve.storage import storage_sign

CONFIG = changed(TrainConfig(), model=str(tiny_model_path()), save_every=5)
ONE = checkpoint_bytes(CONFIG, find_shape(str(tiny_model_path())))
RUN = CONFIG.training


def free(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=10**9, used=10**9 - size, free=size))


def test_a_checkpoint_that_cannot_fit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, ONE // 2)
    with pytest.raises(ConfigError, match=r"--run-dir = .*: has no room for a checkpoint of about \d+\.\d MiB: the file system at .* free"):
        storage_sign(RUN, tmp_path / "new" / "run", ONE, 0.0)
    assert storage_sign(replace(RUN, save_every=0), tmp_path, ONE, 0.0) is None


def test_checkpoints_that_will_not_all_fit_are_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 2 * ONE)
    warning = storage_sign(RUN, tmp_path, ONE, 0.0)
    assert warning is not None
    assert "3 checkpoints of about" in warning.text
    free(monkeypatch, 10 * ONE)
    assert storage_sign(RUN, tmp_path, ONE, 0.0) is None


def test_only_a_full_disk_is_called_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 500)
    assert "is full: 0.0 MiB of 953.7 MiB are free, and 3.0 MiB are needed" in write_problem(
        RuntimeError("unexpected pos"), tmp_path, 3 << 20
    )
    free(monkeypatch, 10**9)
    assert write_problem(PermissionError("denied"), tmp_path) == "denied"
    assert "is full" in write_problem(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), tmp_path / "new")

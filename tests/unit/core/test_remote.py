"""Files at an address of fsspec: in memory, on a disk, and on a file system that fails."""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl.core import remote
from agentrl.core.errors import CheckpointError, ConfigError
from agentrl.core.manifest import flush_files, manifest_text
from tests.remote_support import FlakyFileSystem, fresh_flaky


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses that were made, none of which is waited for."""
    made: list[float] = []
    monkeypatch.setattr(remote.time, "sleep", made.append)
    monkeypatch.setattr(remote.random, "uniform", lambda low, high: high)
    return made


@pytest.fixture
def flaky() -> Iterator[type[FlakyFileSystem]]:
    yield fresh_flaky()
    fresh_flaky()


@pytest.fixture(params=["memory", "file", "path", "flaky"])
def address(request: pytest.FixtureRequest, tmp_path: Path, flaky: type[FlakyFileSystem]) -> str:
    name = uuid.uuid4().hex
    places = {"memory": f"memory://{name}", "file": f"file://{tmp_path}/{name}", "path": str(tmp_path / name), "flaky": f"flaky://{name}"}
    return places[request.param]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    (folder / "learner" / "deep").mkdir(parents=True)
    for name, size in (("learner/deep/one", 3000), ("learner/two", 0), ("three", 10)):
        (folder / name).write_bytes(random.Random(name).randbytes(size))
    return folder


NAMES = ("learner/deep/one", "learner/two", "three")


def test_files_go_there_and_come_back(address: str, source: Path, tmp_path: Path) -> None:
    files = flush_files(source, NAMES)
    target = f"{address}/step-1"
    assert remote.put_files(files, source, target) == 3010
    assert remote.manifest_at(target) is None
    remote.put_text(target, "manifest.json", manifest_text(files))
    assert remote.manifest_at(target) == files
    remote.get_files(files, target, tmp_path / "back")
    assert all((tmp_path / "back" / name).read_bytes() == (source / name).read_bytes() for name in NAMES)


def test_names_and_removal(address: str) -> None:
    assert remote.names_at(address, "step-") == []
    for step in (2, 10, 1):
        remote.put_text(f"{address}/step-{step:02d}", "manifest.json", "{}")
    remote.put_text(address, "other", "")
    assert remote.names_at(address, "step-") == ["step-10", "step-02", "step-01"]
    remote.remove_at(f"{address}/step-02")
    remote.remove_at(f"{address}/step-99")
    assert remote.names_at(address, "step-") == ["step-10", "step-01"]


def test_what_is_not_there_or_cut_off_is_no_manifest(address: str) -> None:
    assert remote.get_text(address, "manifest.json") is None
    remote.put_text(address, "manifest.json", '{"files": {"a": {"si')
    assert remote.manifest_at(address) is None


def test_the_probe_leaves_nothing(address: str) -> None:
    remote.check_reachable("--checkpoint-upload", address)
    assert remote.names_at(address, "") == []


def test_a_changed_copy_is_refused_and_named(source: Path, tmp_path: Path) -> None:
    address, files = str(tmp_path / "copy"), flush_files(source, NAMES)
    remote.put_files(files, source, address)
    damaged = bytearray((tmp_path / "copy" / "learner/deep/one").read_bytes())
    damaged[1234] ^= 1
    (tmp_path / "copy" / "learner/deep/one").write_bytes(damaged)
    with pytest.raises(CheckpointError, match=r"copy/learner/deep/one is not what manifest.json says.*remove this folder"):
        remote.get_files(files, address, tmp_path / "back")


def failing(times: int, kind: str, error: Exception) -> list[int]:
    """Let the next so many calls of a kind fail; the number that is left."""
    left = [times]

    def fault(called: str, path: str) -> None:
        if called == kind and left[0]:
            left[0] -= 1
            raise error

    FlakyFileSystem.fault = staticmethod(fault)
    return left


def test_failures_are_tried_again_after_growing_pauses(
    flaky: type[FlakyFileSystem], source: Path, pauses: list[float], tmp_path: Path
) -> None:
    files = flush_files(source, NAMES)
    left = failing(4, "put", ConnectionResetError("slow down"))
    remote.put_files(files, source, "flaky://run")
    assert (left, pauses) == ([0], [1.0, 2.0, 4.0, 8.0])
    failing(2, "get", TimeoutError("busy"))
    remote.get_files(files, "flaky://run", tmp_path / "back")
    assert (tmp_path / "back" / "three").read_bytes() == (source / "three").read_bytes()


def test_after_the_last_attempt_the_error_names_file_address_and_cause(flaky: type[FlakyFileSystem], source: Path) -> None:
    left = failing(99, "put", PermissionError("no such key"))
    with pytest.raises(CheckpointError, match="learner/deep/one cannot be copied to flaky://run: PermissionError: no such key"):
        remote.put_files(flush_files(source, NAMES), source, "flaky://run")
    assert left == [94]


def test_bytes_that_do_not_arrive_are_noticed(flaky: type[FlakyFileSystem], source: Path) -> None:
    flaky.cut = {"three"}
    with pytest.raises(CheckpointError, match=r"three cannot be copied .* 9 of 10 bytes arrived"):
        remote.put_files(flush_files(source, NAMES), source, "flaky://run")


def test_an_address_that_cannot_be_written_is_refused_with_the_flag(flaky: type[FlakyFileSystem]) -> None:
    failing(99, "pipe", PermissionError("read only"))
    with pytest.raises(ConfigError, match=r"--checkpoint-upload = 'flaky://run': cannot be used: .*read only"):
        remote.check_reachable("--checkpoint-upload", "flaky://run")


def test_a_manifest_is_removed_before_the_files(flaky: type[FlakyFileSystem], monkeypatch: pytest.MonkeyPatch) -> None:
    remote.put_text("flaky://run/step-1", "part", "x")
    remote.put_text("flaky://run/step-1", "manifest.json", "{}")

    def broken(self: FlakyFileSystem, *args: object, **options: object) -> None:
        raise OSError("gone")

    monkeypatch.setattr(FlakyFileSystem, "rm", broken)
    with pytest.raises(CheckpointError, match="cannot be removed"):
        remote.remove_at("flaky://run/step-1")
    assert remote.get_text("flaky://run/step-1", "manifest.json") is None
    assert remote.get_text("flaky://run/step-1", "part") == "x"


def test_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert remote.absolute("s3://bucket/run/") == "s3://bucket/run"
    assert remote.absolute("copies") == str(tmp_path / "copies")
    remote.check_address("--checkpoint-upload", "memory://run")
    remote.check_address("--checkpoint-upload", "copies")
    with pytest.raises(ConfigError, match="--checkpoint-upload = 'nowhere://x': is of a protocol that fsspec does not know"):
        remote.check_address("--checkpoint-upload", "nowhere://x")


def test_a_package_that_is_missing_is_named() -> None:
    pytest.importorskip("fsspec")
    try:
        import adlfs  # noqa: F401  # not one of our packages
    except ImportError:
        with pytest.raises(ConfigError, match=r"--resume = 'az://x/y': needs a package: .*adlfs"):
            remote.check_address("--resume", "az://x/y")

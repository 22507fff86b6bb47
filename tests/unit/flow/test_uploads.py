"""Copies of checkpoints: whole or not there, never in the way, kept as many as asked, found again, and refused when damaged."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agentrl.core import remote
from agentrl.core.errors import CheckpointError, DamagedCheckpointError
from agentrl.core.manifest import MANIFEST, FileEntry, flush_files, read_manifest
from agentrl.flow.checkpoint import Progress, check_learner_files, latest_checkpoint, read_checkpoint
from agentrl.flow.saving import Checkpoints
from agentrl.flow.uploads import Uploads, fetch_copy, find_copy, read_copy, send_copy
from tests.remote_support import FlakyFileSystem, fresh_flaky
from tests.unit.flow.fakes import ScriptedLearner

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "PAUSE_S", 0.0)


@pytest.fixture
def flaky() -> Iterator[type[FlakyFileSystem]]:
    yield fresh_flaky()
    fresh_flaky()


@pytest.fixture
def address(flaky: type[FlakyFileSystem]) -> str:
    return f"flaky://{uuid.uuid4().hex}"


def write_parts(path: str, step: int) -> None:
    for rank in range(2):
        Path(path, f"part-{rank}").write_bytes(bytes([step, rank]) * 5000)


class WritingLearner(ScriptedLearner):
    """Two ranks, each of which writes and hashes a file."""

    async def save_checkpoint(self, path: str, step: int) -> None:
        write_parts(path, step)

    async def flush_checkpoint(self, path: str) -> dict[str, FileEntry]:
        return {name: {**entry, "rank": int(name[-1])} for name, entry in flush_files(Path(path), ["part-0", "part-1"]).items()}


async def save(run_dir: Path, *steps: int, keep: int = 9, uploads: Uploads | None = None) -> Checkpoints:
    checkpoints = Checkpoints(run_dir, WritingLearner(), every=1, num_steps=99, keep=keep, config='{"a": 1}', uploads=uploads)
    for step in steps:
        async with checkpoints.saving(Progress(step=step)):
            pass
    return checkpoints


def path_of(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step-{step:08d}"


@asynccontextmanager
async def running(uploads: Uploads, after: Callable[[], None] = lambda: None) -> AsyncIterator[Uploads]:
    task = asyncio.ensure_future(uploads.run(after))
    try:
        yield uploads
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def made(address: str, *, keep: int = 9, timeout_s: float = 30.0, said: list[str] | None = None) -> Uploads:
    return Uploads(address, WritingLearner(), keep=keep, timeout_s=timeout_s, warn=(said if said is not None else []).append)


async def test_the_ranks_hash_what_they_wrote_and_the_driver_the_rest(tmp_path: Path) -> None:
    await save(tmp_path, 3)
    files = read_manifest(path_of(tmp_path, 3))
    assert {name: entry.get("rank") for name, entry in files.items()} == {
        "config.json": None,
        "inputs.json": None,
        "progress.json": None,
        "learner/part-0": 0,
        "learner/part-1": 1,
    }
    assert files == {**flush_files(path_of(tmp_path, 3), files)} | {
        name: {**flush_files(path_of(tmp_path, 3), [name])[name], "rank": rank}
        for rank, name in enumerate(("learner/part-0", "learner/part-1"))
    }


async def test_the_driver_leaves_hashes_of_the_learner_to_the_ranks_who_put_a_damaged_one_aside(tmp_path: Path) -> None:
    await save(tmp_path, 1, 2)
    (path_of(tmp_path, 2) / "learner" / "part-1").write_bytes(bytes([2, 1]) * 4999 + b"xx")
    assert latest_checkpoint(tmp_path) == path_of(tmp_path, 2)  # every size fits
    with pytest.raises(DamagedCheckpointError, match=r"step-00000002/learner/part-1 is not what manifest.json says.*damaged-step-00000002"):
        await check_learner_files(path_of(tmp_path, 2), WritingLearner())
    assert latest_checkpoint(tmp_path) == path_of(tmp_path, 1)
    await check_learner_files(path_of(tmp_path, 1), WritingLearner())
    (path_of(tmp_path, 1) / "learner" / "part-0").unlink()
    assert latest_checkpoint(tmp_path) is None


async def test_a_copy_is_found_and_fetched_into_another_run(tmp_path: Path, address: str) -> None:
    await save(tmp_path / "run", 1, 2)
    assert find_copy(address) is None
    for step in (1, 2):
        await send_copy(path_of(tmp_path / "run", step), address, WritingLearner(), keep=9)
    copy = find_copy(address)
    assert copy is not None
    assert copy.step == 2
    progress, config, _ = read_copy(copy)
    assert (progress, config) == (Progress(step=2), {"a": 1})
    fetched = await fetch_copy(copy, tmp_path / "other", WritingLearner())
    assert fetched == latest_checkpoint(tmp_path / "other") == path_of(tmp_path / "other", 2)
    assert read_checkpoint(fetched)[0].step == 2
    assert read_manifest(fetched) == read_manifest(path_of(tmp_path / "run", 2))
    assert (fetched / "learner" / "part-1").read_bytes() == bytes([2, 1]) * 5000
    older = find_copy(f"{address}/step-00000001")
    assert older is not None
    assert older.step == 1


async def test_the_manifest_arrives_last_and_whatever_stops_a_copy_leaves_the_one_before(tmp_path: Path, address: str) -> None:
    await save(tmp_path, 1, 2)
    await send_copy(path_of(tmp_path, 1), address, WritingLearner(), keep=9)
    writes = [path.rpartition("/")[2] for kind, path in FlakyFileSystem.calls if kind in ("put", "pipe")]
    assert sorted(writes[:-1]) == ["config.json", "inputs.json", "part-0", "part-1", "progress.json"]
    assert writes[-1] == MANIFEST
    for allowed in range(6):
        left = [allowed]

        def fault(kind: str, path: str, left: list[int] = left) -> None:
            if kind in ("put", "pipe"):
                if not left[0]:
                    raise OSError("broken off")
                left[0] -= 1

        FlakyFileSystem.fault = staticmethod(fault)
        with pytest.raises(CheckpointError, match="broken off"):
            await send_copy(path_of(tmp_path, 2), address, WritingLearner(), keep=9)
        found = find_copy(address)
        assert found is not None
        assert found.step == 1
    FlakyFileSystem.fault = staticmethod(lambda kind, path: None)
    await send_copy(path_of(tmp_path, 2), address, WritingLearner(), keep=9)
    found = find_copy(address)
    assert found is not None
    assert found.step == 2


async def test_one_that_is_there_is_not_copied_again(tmp_path: Path, address: str) -> None:
    await save(tmp_path, 1)
    assert await send_copy(path_of(tmp_path, 1), address, WritingLearner(), keep=9) > 20_000
    FlakyFileSystem.calls.clear()
    assert await send_copy(path_of(tmp_path, 1), address, WritingLearner(), keep=9) == 0
    assert not [path for kind, path in FlakyFileSystem.calls if kind in ("put", "pipe")]


async def test_as_many_copies_are_kept_as_asked_and_broken_ones_go(tmp_path: Path, address: str) -> None:
    await save(tmp_path, 1, 2, 3, 4)
    remote.put_text(f"{address}/step-00000000", "part", "left by a killed run")
    for step in (1, 2, 3):
        await send_copy(path_of(tmp_path, step), address, WritingLearner(), keep=2)
    assert remote.names_at(address, "") == ["step-00000003", "step-00000002"]
    remote.put_text(f"{address}/step-00000009", "part", "newer, and not complete")
    await send_copy(path_of(tmp_path, 4), address, WritingLearner(), keep=2)
    assert remote.names_at(address, "") == ["step-00000009", "step-00000004", "step-00000003"]
    found = find_copy(address)
    assert found is not None
    assert found.step == 4


@pytest.mark.parametrize("name", ["learner/part-1", "progress.json"])
async def test_a_bit_that_flipped_at_the_address_is_refused(tmp_path: Path, address: str, name: str) -> None:
    await save(tmp_path / "run", 1)
    await send_copy(path_of(tmp_path / "run", 1), address, WritingLearner(), keep=9)
    (stored,) = [file for path, file in FlakyFileSystem.store.items() if path.endswith(name)]
    content = bytearray(stored.getvalue())
    content[7] ^= 1
    stored.seek(0)
    stored.write(content)
    copy = find_copy(address)
    assert copy is not None
    with pytest.raises(CheckpointError, match=f"{name} is not what manifest.json says"):
        await fetch_copy(copy, tmp_path / "other", WritingLearner())
    assert list((tmp_path / "other" / "checkpoints").iterdir()) == []


class Gate:
    """Holds every write back until it is opened; `reached` when one waits."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        FlakyFileSystem.fault = staticmethod(self)

    def __call__(self, kind: str, path: str) -> None:
        if kind == "put":
            self.reached.set()
            assert self.opened.wait(20)


async def test_a_slow_address_delays_nothing_and_only_the_newest_waits(tmp_path: Path, address: str) -> None:
    gate, uploads = Gate(), made(address)
    checkpoints = await save(tmp_path, uploads=uploads, keep=1)
    async with running(uploads, checkpoints.remove_old):
        await save(tmp_path, 1, uploads=uploads, keep=1)
        assert await asyncio.to_thread(gate.reached.wait, 20)
        await save(tmp_path, 2, 3, 4, uploads=uploads, keep=1)  # none of these waits for the address
        assert uploads.held == (path_of(tmp_path, 1), path_of(tmp_path, 4))
        assert sorted(path.name[-1] for path in (tmp_path / "checkpoints").iterdir()) == ["1", "4"]  # 1 is being read
        gate.opened.set()
        await uploads.finish(20)
    assert uploads.metrics() | {"checkpoint/upload_s": 0.0, "checkpoint/upload_gb": 0.0} == {
        "checkpoint/uploaded_step": 4.0,
        "checkpoint/upload_s": 0.0,
        "checkpoint/upload_gb": 0.0,
        "checkpoint/upload_failures": 0.0,
        "checkpoint/uploads_skipped": 2.0,
    }
    assert remote.names_at(address, "") == ["step-00000004", "step-00000001"]
    checkpoints.remove_old()
    assert sorted(path.name[-1] for path in (tmp_path / "checkpoints").iterdir()) == ["4"]


async def test_a_failure_is_said_and_counted_and_the_next_one_makes_up_for_it(tmp_path: Path, address: str) -> None:
    said: list[str] = []
    uploads = made(address, said=said)

    def fault(kind: str, path: str) -> None:
        if kind == "put" and "step-00000001" in path:
            raise PermissionError("quota")

    FlakyFileSystem.fault = staticmethod(fault)
    async with running(uploads):
        await save(tmp_path, 1, uploads=uploads)
        with pytest.raises(CheckpointError, match=rf"last checkpoint .* to {address}: .*quota.*complete in {path_of(tmp_path, 1)}"):
            await uploads.finish(20)
        await save(tmp_path, 2, uploads=uploads)
        await uploads.finish(20)
    assert len(said) == 1
    assert f"the checkpoint of step 1 was not copied to {address}: " in said[0]
    assert (uploads.metrics()["checkpoint/upload_failures"], uploads.metrics()["checkpoint/uploaded_step"]) == (1.0, 2.0)


async def test_the_end_does_not_wait_for_ever(tmp_path: Path, address: str) -> None:
    gate, uploads = Gate(), made(address)
    async with running(uploads):
        await save(tmp_path, 1, uploads=uploads)
        assert await asyncio.to_thread(gate.reached.wait, 20)
        with pytest.raises(CheckpointError, match="it took longer than 0 s"):
            await uploads.finish(0.05)
    gate.opened.set()


async def test_a_copy_that_takes_too_long_is_given_up(tmp_path: Path, address: str) -> None:
    said: list[str] = []
    gate, uploads = Gate(), made(address, timeout_s=0.05, said=said)
    async with running(uploads):
        await save(tmp_path, 1, uploads=uploads)
        with pytest.raises(CheckpointError, match=r"longer than 0.05 s"):
            await uploads.finish(20)
    gate.opened.set()
    assert "longer than 0.05 s" in said[0]


async def test_nothing_to_copy_is_no_failure(address: str) -> None:
    uploads = made(address)
    async with running(uploads):
        await uploads.finish(0.1)


async def test_whatever_a_file_system_raises_training_goes_on(tmp_path: Path, address: str) -> None:
    class Odd(WritingLearner):
        async def map_files(self, *args: Any) -> list[Any]:
            raise KeyError("odd")

    said: list[str] = []
    uploads = Uploads(address, Odd(), keep=2, timeout_s=5, warn=said.append)
    async with running(uploads):
        await save(tmp_path, 1, uploads=uploads)
        with pytest.raises(CheckpointError, match="KeyError"):
            await uploads.finish(20)
    assert len(said) == 1

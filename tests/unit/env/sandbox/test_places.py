"""Places of sandboxes: how many start, and how many run at a time."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import pytest

from agentrl.env.sandbox import in_container, place_files
from agentrl.env.sandbox.place_files import folder_of, remove_abandoned_places, take_place
from agentrl.env.sandbox.places import starting
from agentrl.env.sandbox.sandbox import Sandbox
from agentrl.env.sandbox.spec import SandboxChoice, SandboxSpec, use_choice
from agentrl.env.timing import Stopwatch, use_stopwatch

pytestmark = pytest.mark.anyio

NONE = SandboxSpec(kind="none")


class Meter:
    """The largest number of things that went on at a time."""

    def __init__(self) -> None:
        self.now = self.most = 0

    async def during(self) -> None:
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0.02)
        self.now -= 1


async def test_so_many_sandboxes_run_at_a_time() -> None:
    meter, watch = Meter(), Stopwatch()

    async def episode() -> None:
        use_choice(SandboxChoice(kind="none", max_running=2))
        use_stopwatch(watch)
        async with Sandbox(NONE):
            await meter.during()

    await asyncio.gather(*(episode() for _ in range(7)))
    assert meter.most == 2
    waits = [span.seconds for span in watch.take() if span.name == "tool:sandbox wait"]
    assert len(waits) == 7
    assert max(waits) > 0.05


async def test_an_episode_with_a_sandbox_gets_another_without_a_wait() -> None:
    meter = Meter()

    async def episode() -> None:
        use_choice(SandboxChoice(kind="none", max_running=1))
        for _ in range(2):
            async with Sandbox(NONE), Sandbox(NONE):
                await meter.during()

    async with asyncio.timeout(10):
        await asyncio.gather(*(episode() for _ in range(3)))
    assert meter.most == 1


async def test_a_sandbox_that_cannot_be_opened_gives_its_place_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError("no disk")

    async def episode() -> None:
        use_choice(SandboxChoice(kind="none", max_running=1))
        async with Sandbox(NONE):
            pass

    monkeypatch.setattr("agentrl.env.sandbox.in_folder.make_folder", fail)
    for _ in range(3):
        with pytest.raises(OSError, match="no disk"):
            await asyncio.wait_for(episode(), 5)
    waiting = asyncio.create_task(episode())
    await asyncio.sleep(0)
    waiting.cancel()
    monkeypatch.undo()
    await asyncio.wait_for(episode(), 5)


async def test_places_to_start_are_apart_from_those_to_run() -> None:
    meter = Meter()

    async def start() -> None:
        use_choice(SandboxChoice(max_starting=3, max_running=1))
        async with starting():
            await meter.during()

    await asyncio.gather(*(start() for _ in range(9)))
    assert meter.most == 3


async def test_containers_that_only_give_or_take_files_start_in_such_places_too(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = Meter()

    class Made:
        async def start(self) -> None:
            await meter.during()

        async def read(self, name: str, limit: int) -> bytes:
            return name.encode()

        async def remove(self) -> None:
            return

    async def made(*_: object) -> Made:
        return Made()

    async def ready(*_: object) -> str:
        return "image"

    for name, value in {"find_engine": lambda: None, "begin_watch": bool, "end_watch": lambda: None, "ready_image": ready}.items():
        monkeypatch.setattr(in_container, name, value)
    monkeypatch.setattr(in_container.Container, "make", made)

    async def read() -> bytes:
        use_choice(SandboxChoice(max_starting=2))
        async with Sandbox(SandboxSpec(kind="container")) as sandbox:
            return await sandbox.read("/etc/x")

    assert await asyncio.gather(*(read() for _ in range(6))) == [b"/etc/x"] * 6
    assert meter.most == 2


def forked(work: Callable[[], None]) -> int:
    """Do some work in a process of its own, and return its id."""
    pid = os.fork()
    if not pid:
        try:
            work()
        finally:
            os._exit(0)
    return pid


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files, empty."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_the_workers_of_a_run_share_its_places(temporary: Path) -> None:
    log = os.open(temporary / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    async def episode(run: str) -> None:
        use_choice(SandboxChoice(kind="none", max_running=3, places=run))
        async with Sandbox(NONE):
            os.write(log, b"+")
            await asyncio.sleep(0.03)
            os.write(log, b"-")

    async def worker(run: str) -> None:
        await asyncio.gather(*(episode(run) for _ in range(6)))

    children = [forked(lambda: asyncio.run(worker("runs/one"))) for _ in range(3)]
    codes = [os.waitpid(pid, 0)[1] for pid in children]
    running = list(accumulate(1 if sign == "+" else -1 for sign in (temporary / "log").read_text()))
    assert (codes, len(running), max(running)) == ([0, 0, 0], 36, 3)
    assert not list(temporary.glob(f"{place_files.PREFIX}*"))


def test_places_of_runs_are_apart_and_those_of_a_killed_worker_are_free(temporary: Path) -> None:
    read, write = os.pipe()

    def hold() -> None:
        kept = take_place(folder_of("one"), 1)
        os.write(write, b"1" if kept else b"0")
        time.sleep(60)

    pid = forked(hold)
    assert os.read(read, 1) == b"1"
    assert take_place(folder_of("one"), 1) is None
    other = take_place(folder_of("two"), 1)
    assert other is not None
    other.give_back()
    second = take_place(folder_of("one"), 2)
    assert second is not None
    assert second.path.name == "1"
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    first = take_place(folder_of("one"), 1)
    assert first is not None
    remove_abandoned_places()
    assert sorted(path.name for path in folder_of("one").iterdir()) == ["0", "1"]  # they are held
    for place in (first, second):
        place.give_back()
    assert not folder_of("one").exists()


def test_files_of_processes_that_are_gone_are_removed(temporary: Path) -> None:
    kept = []
    os.waitpid(forked(lambda: kept.append(take_place(folder_of("one"), 1))), 0)
    assert folder_of("one").exists()
    remove_abandoned_places()
    assert not folder_of("one").exists()


def test_a_file_that_its_last_owner_has_removed_is_no_place(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = take_place(folder_of("one"), 1)
    assert held is not None
    lock = place_files.fcntl.flock

    def given_back_first(descriptor: int, how: int) -> None:
        held.give_back()
        lock(descriptor, how)

    monkeypatch.setattr(place_files.fcntl, "flock", given_back_first)
    assert take_place(folder_of("one"), 1) is None
    monkeypatch.undo()


async def test_a_place_that_another_process_gives_back_is_found(temporary: Path) -> None:
    held = take_place(folder_of("one"), 1)
    assert held is not None
    asyncio.get_running_loop().call_later(0.1, held.give_back)
    use_choice(SandboxChoice(kind="none", max_running=1, places="one"))
    async with asyncio.timeout(10), Sandbox(NONE):
        assert take_place(folder_of("one"), 1) is None

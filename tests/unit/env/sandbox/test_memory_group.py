"""Memory of local sandboxes that the system limits: what belongs to no process counts, and no group is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from agentrl.env.isolation.launcher import MIB
from agentrl.env.sandbox import memory_group
from agentrl.env.sandbox.memory_group import MemoryGroup, remove_abandoned_groups, take_group
from agentrl.env.sandbox.sandbox import Sandbox
from agentrl.env.sandbox.spec import SandboxSpec
from tests.sandboxes import needs_sandbox

HOLDS = """
import os
held = []
for _ in range(20):
    held.append(os.memfd_create("held"))
    os.write(held[-1], bytes(10 * 2**20))
print("held")
"""


@pytest.fixture
def group() -> MemoryGroup:
    found = take_group(64 * MIB)
    if found is None:
        pytest.skip("this process may not make control groups of memory")
    return found


@needs_sandbox
@pytest.mark.anyio
async def test_memory_that_belongs_to_no_process_counts(group: MemoryGroup) -> None:
    group.give_back()
    async with Sandbox(SandboxSpec(kind="local", memory_mib=64)) as sandbox:
        assert (await sandbox.exec("sh", "-c", "exit 3")).ended == "exit"
        for again in range(2):  # also after the system has ended one
            result = await sandbox.exec(sandbox.python, "-S", "-c", HOLDS)
            assert (result.ended, result.code, result.output) == ("memory", -signal.SIGKILL, ""), again
        assert (await sandbox.exec("sh", "-c", "exit 3")).ended == "exit"
    async with Sandbox(SandboxSpec(kind="local", memory_mib=512)) as sandbox:
        assert (await sandbox.exec(sandbox.python, "-S", "-c", HOLDS)).output == "held\n"


def test_a_group_is_used_again_with_another_limit(group: MemoryGroup) -> None:
    limits = []
    for mib in (8, 900):
        group.give_back()
        again = take_group(mib * MIB)
        assert again is not None
        assert again.folder == group.folder
        files = [again.folder / name for names in memory_group.FILES for name in names[:1]]
        limits.append(next(int(file.read_text()) for file in files if file.exists()) // MIB)
    assert limits == [8, 900]
    group.give_back()


def forked(work: Callable[[], object]) -> int:
    pid = os.fork()
    if not pid:
        try:
            work()
            signal.pause()
        finally:
            os._exit(0)
    return pid


def test_groups_of_processes_that_are_gone_are_removed(group: MemoryGroup) -> None:
    spare = take_group(8 * MIB)
    assert spare is not None
    spare.give_back()
    reading, writing = os.pipe()
    pid = forked(lambda: os.write(writing, str(take_group(8 * MIB).folder).encode()))  # type: ignore[union-attr]
    other = Path(os.read(reading, 1000).decode())
    remove_abandoned_groups()
    assert other not in (group.folder, spare.folder)
    assert other.exists()
    assert group.folder.exists()
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    remove_abandoned_groups()
    assert not other.exists()
    assert group.folder.exists()
    group.give_back()


def test_a_process_removes_its_groups_at_its_end(group: MemoryGroup) -> None:
    group.give_back()
    text = "from agentrl.env.sandbox.memory_group import take_group; group = take_group(2**23); print(group.folder); group.give_back()"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert not Path(done.stdout.strip()).exists()


@pytest.mark.parametrize(
    ("names", "values"),
    [
        (("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"), ["5", "5"]),
        (("memory.limit_in_bytes",), ["5"]),
        (("memory.max", "memory.swap.max"), ["5", "0"]),
        (("memory.max",), ["5"]),
    ],
)
def test_both_versions_of_control_groups_are_told_the_limit(names: tuple[str, ...], values: list[str], tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).write_text("max")
    assert MemoryGroup(tmp_path, -1).limit(5)
    assert [(tmp_path / name).read_text() for name in names] == values


def test_without_the_controller_of_memory_there_is_no_group(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memory_group, "_free", [])
    monkeypatch.setattr(memory_group, "_places", lambda: iter([tmp_path, tmp_path / "nowhere"]))
    assert take_group(5) is None
    assert not list(tmp_path.iterdir())

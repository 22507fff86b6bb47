"""A process of an episode is copied: the copies cannot be told from it, or there are none."""

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from agentrl.core.errors import EnvError
from agentrl.env.boundary import EnvLimits
from agentrl.env.isolation import system
from agentrl.env.isolation.fork_server import ForkServer
from agentrl.env.isolation.pool import ProcessPool
from agentrl.env.isolation.system import ProcessInfo, ProcessLimits
from agentrl.env.session import Session
from agentrl.suites.load import load_agent
from tests.unit.env.isolation.support import state, survivors, task

pytestmark = pytest.mark.anyio

FILE = Path(__file__).with_name("copied.py")
LIMITS = EnvLimits(process=ProcessLimits(memory_mib=300, processes=8), step_timeout_s=5.0, close_timeout_s=2.0, copied=True)


@asynccontextmanager
async def pool(name: str = "Everything", limits: EnvLimits = LIMITS) -> AsyncIterator[ProcessPool]:
    """A pool that leaves no process."""
    processes = ProcessPool(load_agent(f"{FILE}:{name}"), limits)
    try:
        await processes.start()
        yield processes
    finally:
        await processes.close()
        assert survivors(processes) == []


async def say(session: Session, label: str, *words: str) -> list[Any]:
    """What the environment answers."""
    results = [await session.step(state(word, task=task(label=label), turn=number)) for number, word in enumerate(words)]
    return [(result.reward, result.observation, result.terminated) for result in results]


async def test_the_original_may_read_on_before_its_copies_begin() -> None:
    async with pool("Everything") as processes:
        first = processes.session()
        await first.reset(task(label="late"), 7)
        (snapshot,) = await first.snapshot(1)
        told = await say(first, "late", "a", "end")
        copy = processes.session()
        await copy.restore(snapshot, task(label="late"))
        assert await say(copy, "late", "a", "end") == told
        for session in (first, copy):
            await session.close()


@pytest.mark.parametrize("name", ["Everything", "Asynchronous"])
@pytest.mark.parametrize("label", ["nothing", "file"])
async def test_copies_go_on_as_the_original_would(name: str, label: str) -> None:
    async with pool(name) as processes:
        first = processes.session()
        await first.reset(task(label=label), 7)
        await say(first, label, "a", "b")
        snapshots = await first.snapshot(3)
        others = [processes.session() for _ in snapshots]
        for other, snapshot in zip(others, snapshots, strict=True):
            await other.restore(snapshot, task(label=label))
        # Before the original, which has not read on; the others may begin later than it does, and none sees what another does.
        early = await say(others[0], label, "c", "d", "end")
        told = await say(first, label, "c", "d", "end")
        assert [early, *[await say(other, label, "c", "d", "end") for other in others[1:]]] == [told] * 3
        assert told[0][0] == 3.0
        for session in (first, *others):
            await session.close()
        assert await say_alone(processes, label) == told


async def say_alone(processes: ProcessPool, label: str) -> list[Any]:
    """What a process says that was never copied."""
    session = processes.session()
    await session.reset(task(label=label), 7)
    told = await say(session, label, "a", "b", "c", "d", "end")
    await session.close()
    return told[2:]


@pytest.mark.parametrize(
    ("name", "label", "problem"),
    [
        ("Everything", "written_file", "log.txt, open for writing"),
        ("Everything", "socket", "a socket"),
        ("Everything", "pipe", "a pipe, a pipe"),
        ("Everything", "program", "a program or process that it started"),
        ("Everything", "thread", "the thread watcher"),
        ("Everything", "shared", "memory that is shared with other processes"),
        ("Asynchronous", "task", "the task heartbeat"),
    ],
)
async def test_what_a_copy_would_share_or_lose_is_refused_by_name(name: str, label: str, problem: str) -> None:
    async with pool(name) as processes:
        session = processes.session()
        await session.reset(task(label=label), 7)
        with pytest.raises(EnvError) as caught:
            await session.snapshot(2)
        assert f"copied.py: {name}.snapshot: it holds" in str(caught.value)
        assert problem in str(caught.value)
        assert (await say(session, label, "a"))[0][0] == 1.0  # it goes on
        await session.close()
        await until_idle(processes)


async def test_copies_are_ended_that_nobody_takes() -> None:
    async with pool() as processes:
        session = processes.session()
        await session.reset(task(), 7)
        snapshots = await session.snapshot(2)
        assert len(episodes(processes)) >= 3
        for snapshot in snapshots:
            snapshot.discard()
        await session.close()
        await until_idle(processes)


async def test_a_copy_has_limits_and_an_end_of_its_own() -> None:
    async with pool() as processes:
        session = processes.session()
        await session.reset(task(), 7)
        others = [processes.session(), processes.session()]
        for other, snapshot in zip(others, await session.snapshot(2), strict=True):
            await other.restore(snapshot, task())
        with pytest.raises(EnvError, match="--env-limits memory_mib"):
            await others[0].step(state("big"))
        with pytest.raises(EnvError, match="exited with code 3"):
            await others[1].step(state("crash"))
        assert (await say(session, "label", "a"))[0][0] == 1.0
        for each in (session, *others):
            await each.close()
        await until_idle(processes)


async def test_a_copy_survives_the_original() -> None:
    async with pool() as processes:
        session, other = processes.session(), processes.session()
        await session.reset(task(), 7)
        (snapshot,) = await session.snapshot(1)
        with pytest.raises(EnvError, match="exited with code 3"):
            await session.step(state("crash"))
        await session.close()
        await asyncio.sleep(0.3)  # the fork server looks for what was left behind
        await other.restore(snapshot, task())
        assert (await say(other, "label", "a"))[0][0] == 1.0
        await other.close()


async def test_processes_that_may_not_be_copied_say_so() -> None:
    async with pool(limits=EnvLimits(process=ProcessLimits())) as processes:
        session = processes.session()
        await session.reset(task(), 7)
        with pytest.raises(EnvError, match="were not started to be copied"):
            await session.snapshot(1)
        await session.close()


def episodes(processes: ProcessPool) -> list[psutil.Process]:
    return survivors(processes, "agentrl-env")


async def until_idle(processes: ProcessPool) -> None:
    """Wait until there are only processes that wait for an episode."""
    for _ in range(100):
        if len(episodes(processes)) <= len(processes._spares) and processes._used == 0:
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"{len(episodes(processes))} processes, {len(processes._spares)} of them wait, {processes._used} are used")


@pytest.mark.parametrize("known_after", ["it was collected", "it is still to be collected"])
def test_the_end_of_a_copy_that_is_not_known_yet_is_its_own(monkeypatch: pytest.MonkeyPatch, known_after: str) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        server = ForkServer(theirs, parent=0, limits=EnvLimits())
        ended, table = {4001: 3}, {4001: ProcessInfo(os.getpid(), "Z", 0)}
        monkeypatch.setattr(system, "collect", lambda: {pid: ended.pop(pid) for pid in list(ended)})
        monkeypatch.setattr(system, "processes", lambda: table)
        for order in (b"+", b"=7 4001", b"-"):
            ours.send(order)
        assert server._obey()
        if known_after == "it was collected":
            server._collect()
            table.clear()
        assert server._obey()
        server._collect()
        assert json.loads(ours.recv(1000)) == {"died": 7, "code": 3, "why": ""}

"""Environments that harm the process they are in: their episode ends with a reason, another goes on, and nothing survives."""

import asyncio
import subprocess
import sys
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from agentrl.core.errors import EnvError, EnvResultError, EnvTimeoutError
from tests.unit.env.isolation.support import SMALL, act, environments, gone, marked, noted_pids, pool, survivors, task

pytestmark = pytest.mark.anyio

DEFECTS: dict[str, dict[str, tuple[type[EnvError], str]]] = {
    "hangs": {
        "hang": (EnvTimeoutError, r"^defects.py: Defects.step did not return within 1 s; its process is ended$"),
        "stubborn": (EnvTimeoutError, r"Defects.step did not return within 1 s"),
        "spin_in_c": (EnvTimeoutError, r"^defects.py: Defects.step did not return within 1 s; its process was killed$"),
    },
    "ends": {
        "exit_now 0": (EnvError, r"^defects.py: Defects.step: its process exited with code 0$"),
        "exit_now 3": (EnvError, r"Defects.step: its process exited with code 3"),
        "exit_now 173": (EnvError, r"Defects.step: its process has ended"),
        "sys_exit": (EnvError, r"Defects.step raised SystemExit: 3"),
        "segfault": (EnvError, r"^defects.py: Defects.step: its process was ended by SIGSEGV$"),
        "daemon_exit {path}": (EnvError, r"its process exited with code 1"),
    },
    "excesses": {
        "allocate_numpy": (EnvError, r"Defects.step raised \w*MemoryError.* \(--env-limits memory_mib=200\)"),
        "huge_file {path}": (EnvError, r"Defects.step raised OSError: \[Errno 27\].* \(--env-limits file_mib=1\)\n"),
        "files": (EnvError, r"Defects.step raised OSError: \[Errno 24\].* \(--env-limits open_files=64\)\n"),
        "huge_result": (EnvError, r"Defects.step (returned observation = .* is longer than|raised MemoryError)"),
    },
    "answers": {
        "raises": (EnvError, r"(?s)^defects.py: Defects.step raised KeyError: 'missing'\nTraceback.*return {}\[.missing.\]"),
        "nan": (EnvResultError, r"^defects.py: Defects.step returned reward = nan: must be finite$"),
        "garbage ffffffff00000001": (EnvError, r"Defects.step: its process sent 4294967295 bytes, more than"),
        "garbage 0000000200000002": (EnvError, r"Defects.step: its process sent something that is no answer"),
        "garbage 0000000200000009": (EnvTimeoutError, r"Defects.step did not return"),
    },
}


@pytest.mark.parametrize("kind", DEFECTS)
async def test_a_defect_ends_its_own_episode_and_no_other(kind: str, tmp_path: Path) -> None:
    async def caught(number: int, action: str) -> str:
        error, message = DEFECTS[kind][action]
        session = processes.session()
        await session.reset(task(), 7)
        start = time.monotonic()
        with pytest.raises(error, match=message) as info:
            await act(session, action.format(path=tmp_path / str(number)))
        assert time.monotonic() - start < 1.0 + 2.0
        await session.close()
        return "" if type(info.value) is error else f"{action}: {info.value!r}"

    async with pool(step_s=1.0) as processes:
        sibling, alone = processes.session(), processes.session()
        for session in (sibling, alone):
            await session.reset(task(), 7)
        undisturbed = (await act(alone, "draw", "draw", "draw")).info
        await act(sibling, "draw", "draw")
        wrong = await asyncio.gather(*(caught(number, action) for number, action in enumerate(DEFECTS[kind])))
        assert not any(wrong)
        assert (await act(sibling, "draw")).info == undisturbed
        for session in (sibling, alone):
            await session.close()
        assert all(map(gone, noted_pids(tmp_path)))


@pytest.mark.parametrize(
    ("action", "message"),
    [
        ("allocate", r"raised MemoryError.*--env-limits memory_mib=200|ran out of memory"),
        ("shared_memory", r"it used \d+ MiB, more than --env-limits memory_mib=200"),
        ("fork_bomb", r"it had \d+ processes, more than --env-limits processes=8"),
        ("spin", r"it used more than 0.3 s of CPU time \(--env-limits cpu_s\)"),
    ],
)
async def test_what_grows_without_end_meets_a_limit(action: str, message: str) -> None:
    limits = SMALL if action == "spin" else replace(SMALL, cpu_s=20.0)  # the limit that is meant must be the one that is met first
    async with pool(step_s=20.0, limits=limits) as processes:
        sibling, bad = processes.session(), processes.session()
        await sibling.reset(task(), 7)
        await bad.reset(task(), 7)
        with pytest.raises(EnvError, match=message):
            await act(bad, action)
        await bad.close()
        assert (await act(sibling, "draw")).reward == 0.0
        await sibling.close()


@pytest.mark.parametrize("action", ["daemon", "child"])
async def test_what_an_episode_started_ends_with_it(action: str, tmp_path: Path) -> None:
    async with pool(step_s=5.0) as processes:
        session = processes.session()
        await session.reset(task(), 7)
        await act(session, f"{action} {tmp_path / 'pid'}")
        pid = int((tmp_path / "pid").read_text())
        assert not gone(pid, within_s=0.1)
        await session.close()
        assert gone(pid)


async def test_closing_the_pool_ends_what_is_under_way(tmp_path: Path) -> None:
    async with pool(step_s=30.0) as processes:
        sessions = [processes.session() for _ in range(4)]
        for session in sessions:
            await session.reset(task(), 7)
        running = [
            asyncio.create_task(act(session, action))
            for session, action in zip(sessions, ["hang", f"daemon {tmp_path / 'a'}", "stubborn", "draw"], strict=True)
        ]
        await asyncio.sleep(0.3)
        start = time.monotonic()
        await processes.close()
        assert time.monotonic() - start < 3.0
        assert survivors(processes) == []
        results = await asyncio.gather(*running, return_exceptions=True)
        assert [type(result) for result in results[::2]] == [EnvError, EnvError]
        for session in sessions:
            await session.close()
        with pytest.raises(EnvError, match="have been ended"):
            await processes.session().reset(task(), 7)


async def test_a_cancelled_step_is_cancelled_there_and_the_environment_closed(tmp_path: Path) -> None:
    label = str(tmp_path / "mark")
    async with pool("Async", step_s=30.0) as processes:
        session = processes.session()
        await session.reset(task(label=label), 7)
        running = asyncio.create_task(act(session, "wait"))
        await asyncio.sleep(0.2)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await session.close()
        assert (tmp_path / "mark").read_text() == "ended"
        assert (tmp_path / "mark.closed").read_text() == "closed"


@pytest.mark.parametrize(("action", "end"), [("wait", "within 0.3 s$"), ("block", "was killed$")])
async def test_an_asynchronous_step_is_given_up_at_its_deadline(action: str, end: str, tmp_path: Path) -> None:
    label = str(tmp_path / "mark")
    async with pool("Async") as processes:
        session = processes.session()
        await session.reset(task(label=label), 7)
        with pytest.raises(EnvTimeoutError, match=end):
            await act(session, action)
        await session.close()
        assert (tmp_path / "mark.closed").exists() == (action == "wait")


async def test_generators_begin_with_the_task_whichever_process_plays_it() -> None:
    async with pool(limits=replace(SMALL, reuse=100)) as processes:
        draws: list[Any] = []
        for actions in (("draw",), ("reseed", "draw"), ("draw",), ("draw", "draw"), ("draw",)):
            session = processes.session()
            await session.reset(task(), 11)
            draws.append(dict((await act(session, *actions)).info))
            await session.close()
    assert {entry.pop("episodes") for entry in draws} != {1.0}  # some of them were played by the same process
    assert draws[0] == draws[2] == draws[4]
    assert draws[1] != draws[0]
    assert draws[3] != draws[0]


async def test_every_episode_begins_in_the_state_that_loading_left() -> None:
    async with pool() as processes:
        for _ in range(6):
            session = processes.session()
            await session.reset(task(), 11)
            assert (await act(session, "draw")).info["episodes"] == 1.0
            await session.close()


async def test_secrets_stay_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CANARY_API_KEY", "canary")
    monkeypatch.setenv("WANTED", "yes")
    async with pool(limits=replace(SMALL, passed=("WANTED",))) as processes:
        session = processes.session()
        await session.reset(task(), 7)
        assert [(await act(session, f"environment {name}")).reward for name in ("CANARY_API_KEY", "WANTED", "PATH")] == [0.0, 1.0, 1.0]
        started = environments(processes)  # before the process of the session ends
        await session.close()
        assert len(started) > 1
        assert not any("canary" in environment.values() for environment in started)


@pytest.mark.skipif(find_spec("uvloop") is None, reason="uvloop is not installed")
@pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": True})], ids=["uvloop"])
async def test_ray_has_another_event_loop() -> None:
    async with pool(step_s=0.5) as processes:
        good, bad = processes.session(), processes.session()
        for session in (good, bad):
            await session.reset(task(), 7)
        with pytest.raises(EnvTimeoutError, match="its process was killed"):
            await act(bad, "spin_in_c")
        assert (await act(good, "draw")).reward == 0.0
        await good.close()
        await bad.close()


async def test_a_fork_server_that_is_killed_is_replaced() -> None:
    async with pool(step_s=5.0) as processes:
        session = processes.session()
        await session.reset(task(), 7)
        server = processes._fork_server
        assert server is not None
        server.kill()
        with pytest.raises(EnvError, match="the process that starts environments has ended"):
            await act(session, "hang")
        await session.close()
        again = processes.session()
        await again.reset(task(), 7)
        assert (await act(again, "draw")).reward == 0.0
        await again.close()


async def test_a_failing_close_is_logged_where_the_run_is(caplog: pytest.LogCaptureFixture) -> None:
    async with pool("BadClose") as processes:
        session = processes.session()
        await session.reset(task(), 7)
        await act(session, "x")
        await session.close()
    assert "BadClose.close raised OSError: cannot close" in caplog.text


OWNER = """
import asyncio, sys
from tests.unit.env.isolation.support import act, pool, task

async def main():
    async with pool(step_s=60.0) as processes:
        sessions = [processes.session() for _ in range(3)]
        for session in sessions:
            await session.reset(task(), 7)
        running = [asyncio.create_task(act(session, action)) for session, action in zip(sessions, sys.argv[1:])]
        await asyncio.sleep(0.5)
        print(processes._mark, flush=True)
        await asyncio.gather(*running, return_exceptions=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


def test_nothing_outlives_a_rollout_worker_that_is_killed(tmp_path: Path) -> None:
    actions = ("stubborn", "spin_in_c", f"daemon {tmp_path / 'pid'}")
    with subprocess.Popen([sys.executable, "-c", OWNER, *actions], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        mark = owner.stdout.readline().strip()
        assert len(marked(mark)) > 5
        owner.kill()
    pids = [process.pid for process in marked(mark)] + noted_pids(tmp_path)
    assert all(gone(pid) for pid in pids)
    assert marked(mark) == []

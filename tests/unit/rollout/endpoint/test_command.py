"""Programs as agents: told the task and the address, judged afterwards, and ended with everything they started."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from agentrl.core.errors import EnvLoadError
from agentrl.core.types import Status, Trajectory
from agentrl.env.isolation.system import ProcessLimits, processes
from agentrl.suites.load import load_agent
from tests.sandboxes import IMAGE, container_engine, needs_sandbox
from tests.unit.rollout.endpoint.support import TASK, Stage, play_one

pytestmark = [pytest.mark.anyio, needs_sandbox]

ASK = """
import json, os, sys, urllib.request
body = {"model": "m", "messages": [{"role": "user", "content": sys.argv[1]}]}
headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(), headers)
answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
open("answer.txt", "w").write(answer)
print(answer)
"""
JUDGE = """
import os
print("judging", sorted(os.listdir()))
print(float(open("answer.txt").read() == os.environ["AGENTRL_LABEL"]))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "ask.py").write_text(ASK)
    (tmp_path / "judge.py").write_text(JUDGE)
    return tmp_path


async def run(spec: str, *texts: str, **changes: Any) -> tuple[Stage, Trajectory]:
    return await play_one(load_agent(spec).load(), *texts, **changes)


async def test_a_program_is_told_the_task_and_judged_by_another(folder: Path) -> None:
    (folder / "files" / "part" / ".git").mkdir(parents=True)
    (folder / "files" / "notes.txt").write_text("hello")
    (folder / "ask.py").write_text(
        ASK + 'assert sorted(os.listdir()) == ["answer.txt", "notes.txt", "part"]\nassert not os.listdir("part")\n'
    )
    python = f"{sys.executable} -S"
    stage, trajectory = await run(
        f"command:{python} {folder}/ask.py {{prompt}}#judge={python} {folder}/judge.py#files={folder}/files", "three"
    )
    assert (trajectory.error, trajectory.reward, len(trajectory.turns)) == (None, 1.0, 1)
    assert str(TASK.prompt) in stage.codec.decode(stage.engine.requests[0].prompt_ids.tolist())


ELSEWHERE = """
import socket
try:
    socket.create_connection(("127.0.0.1", PORT), 5)
except OSError:
    pass
else:
    open("reached", "w")
"""


@pytest.mark.parametrize(
    ("python", "values"),
    [
        (sys.executable, {}),
        (sys.executable, {"sandbox_network": "all"}),
        pytest.param("env python3", {"sandbox": "container", "sandbox_image": IMAGE}, marks=pytest.mark.slow),
    ],
)
async def test_a_program_reaches_the_endpoint_and_nothing_else(folder: Path, python: str, values: dict[str, str]) -> None:
    if "sandbox" in values:
        container_engine()
    with socket.create_server(("127.0.0.1", 0)) as other:
        (folder / "ask.py").write_text(ELSEWHERE.replace("PORT", str(other.getsockname()[1])) + ASK)
        _, trajectory = await run(f"command:{python} {folder}/ask.py {{prompt}}#judge=sh -c 'ls | wc -l'", "three", **values)
    number = 2.0 if values.get("sandbox_network") == "all" else 1.0
    assert (trajectory.error, trajectory.reward, len(trajectory.turns)) == (None, number, 1)


async def test_a_reward_function_judges_what_it_printed(folder: Path) -> None:
    (folder / "reward.py").write_text("def reward(completion, label):\n    return float(completion.strip() == label) / 2\n")
    _, trajectory = await run(f"command:{sys.executable} -S {folder}/ask.py {{prompt}}#reward={folder}/reward.py", "three")
    assert (trajectory.error, trajectory.reward) == (None, 0.5)


async def test_a_program_that_fails_is_a_failure_with_its_last_words(folder: Path) -> None:
    (folder / "bad.py").write_text("import sys; print('no such luck'); sys.exit(3)")
    _, trajectory = await run(f"command:{sys.executable} {folder}/bad.py {{prompt}}#judge=true", "three")
    assert (trajectory.status, trajectory.reward) == (Status.ENV_ERROR, None)
    assert "exited with code 3. It printed last:\nno such luck" in (trajectory.error or "")


async def test_a_judge_that_prints_no_number_is_a_failure(folder: Path) -> None:
    _, trajectory = await run(f"command:{sys.executable} -S {folder}/ask.py {{prompt}}#judge=echo fine", "three")
    assert trajectory.status is Status.ENV_ERROR
    assert "the last line that it printed is 'fine'" in (trajectory.error or "")


async def test_nothing_of_a_program_is_left_and_no_secret_is_passed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SECRET", "x")
    (folder / "daemon.py").write_text(
        "import os, subprocess, sys\n"
        "assert 'MY_SECRET' not in os.environ and os.environ['HOME'] != os.path.expanduser('~root')\n"
        "subprocess.Popen(['sleep', '3571'], start_new_session=True, stdout=subprocess.DEVNULL)\n"
        "if sys.argv[1] == 'wait': subprocess.run(['sleep', '3572'])\n" + ASK
    )
    _, trajectory = await run(f"command:{sys.executable} -S {folder}/daemon.py {{prompt}}#judge=echo 1", "three")
    assert (trajectory.error, trajectory.reward, _sleeping()) == (None, 1.0, [])
    _, trajectory = await run(
        f"command:{sys.executable} -S {folder}/daemon.py wait {{prompt}}#judge=echo 1", "three", episode_timeout_s=4.0
    )
    assert (trajectory.status, _sleeping()) == (Status.TIMEOUT, [])


def _sleeping() -> list[str]:
    found = []
    for pid in processes():
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        found += [str(pid)] * (words[:2] in ([b"sleep", b"3571"], [b"sleep", b"3572"]))
    return found


async def test_limits_hold(folder: Path) -> None:
    (folder / "big.py").write_text("x = bytearray(600 * 2**20); print(len(x))")
    cls: Any = type("Limited", (load_agent(f"command:{sys.executable} -S {folder}/big.py {{prompt}}#judge=echo 1").load(),), {})
    cls.process_limits = ProcessLimits(memory_mib=200)
    _, trajectory = await play_one(cls, "three")
    assert trajectory.status is Status.ENV_ERROR
    assert "MemoryError" in (trajectory.error or "")


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("command:echo hi#judge=true", "is not told its task"),
        ("command:echo {prompt}", "needs either a judge or a reward"),
        ("command:no-such-program {prompt}#judge=true", "there is no program 'no-such-program'"),
        ("command:echo {prompt}#judge=true#files=/nowhere", "there is no folder"),
        ("command:echo '{prompt}#judge=true", "cannot be split into words"),
    ],
)
def test_what_cannot_run_is_refused_at_once(spec: str, problem: str) -> None:
    with pytest.raises(EnvLoadError, match=problem):
        load_agent(spec)


def test_relative_files_are_those_of_the_folder_where_it_was_started(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    spec = load_agent(f"command:{sys.executable} ask.py {{prompt}}#judge={sys.executable} judge.py")
    monkeypatch.chdir(os.sep)
    again: Any = load_agent(spec.spec).load()  # as another process would, in another folder
    assert again.command == (sys.executable, str(folder / "ask.py"), "{prompt}")
    assert again.judge == (sys.executable, str(folder / "judge.py"))

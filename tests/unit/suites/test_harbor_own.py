"""Task folders of Harbor played by Harbor itself: its configuration, its outcomes, and agreement with our own way on five tasks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.core.errors import EnvLoadError
from agentrl.core.types import Status
from agentrl.env.isolation.system import ProcessLimits
from agentrl.env.sandbox.engine import Answer, Engine
from agentrl.suites.harbor import own, program
from agentrl.suites.load import load_agent
from tests.harbor_tasks import tasks_with_images
from tests.sandboxes import container_engine
from tests.unit.examples.test_agents import play_class

pytestmark = pytest.mark.anyio

PYTHON = os.environ.get("AGENTRL_TEST_HARBOR", "")
AGENT = Path(__file__).parents[2] / "clients" / "programs" / "harbor_agent.py"
ASKS = """import json, os, sys, urllib.request
headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
body = json.dumps({"model": "m", "messages": [{"role": "user", "content": sys.argv[-1]}]}).encode()
if "oracle" not in sys.argv[-2]:
    urllib.request.urlopen(urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)).read()
print("noise")
inside = os.environ["TMPDIR"].startswith(os.path.dirname(os.getcwd()))
print(json.dumps({"rewards": {"reward": 0.5, "is_there": int(inside)}, "truncated": "slow" in sys.argv[-2]}))
"""


def interpreter(folder: Path, text: str = ASKS) -> Path:
    """Write a program that stands in for an interpreter with Harbor."""
    path = folder / "python"
    path.write_text(f"#!{sys.executable} -S\n{text}")
    path.chmod(0o755)
    return path


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Calls of podman, which has one container of every trial."""
    made: list[tuple[str, ...]] = []

    async def call(self: Engine, *words: str, **_: Any) -> Answer:
        made.append(words)
        return Answer(0, b"c1\n", "")

    monkeypatch.setattr(Engine, "call", call)
    monkeypatch.setattr(own, "begin_watch", lambda engine: made.append(("begin", *engine.program)))
    monkeypatch.setattr(own, "end_watch", lambda: made.append(("end",)))
    monkeypatch.setattr("shutil.which", lambda name: name)
    return made


def one_task(folder: Path, instruction: str = "Do it.") -> Path:
    (folder / "one").mkdir()
    (folder / "one" / "task.toml").write_text("")
    if instruction:
        (folder / "one" / "instruction.md").write_text(instruction)
    return folder / "one"


def loaded(task: Path, python: Path, options: str = "") -> Any:
    return load_agent(f"harbor:{task}?python={python}{options}").load()


async def test_a_trial_of_harbor_is_an_episode(tmp_path: Path, calls: list[tuple[str, ...]]) -> None:
    cls = loaded(one_task(tmp_path), interpreter(tmp_path), "&environment=docker")
    (task,) = cls.tasks()
    (done,) = await play_class(cls, task, "Yes.")
    assert (done.error, done.reward, done.status, done.metrics["is_there"]) == (None, 0.5, Status.FINISHED, 1.0)
    assert "reward" not in done.metrics
    assert done.turns[0].prompt_text.count(str(tmp_path / "one")) == 1
    assert [words[0] for words in calls] == ["begin", "ps", "rm", "end"]
    assert (calls[0][1], calls[2][1:]) == ("docker", ("--force", "--volumes", "c1"))
    slow = loaded(tmp_path / "one", tmp_path / "python", "&agent=slow")
    (late,) = await play_class(slow, task, "Yes.")
    assert (late.error, late.reward, late.status) == (None, 0.5, Status.TRUNCATED)
    assert await cls.try_solution(task, solved=True) == 0.5


async def test_a_trial_that_fails_is_a_failed_episode(tmp_path: Path, calls: list[tuple[str, ...]]) -> None:
    cls = loaded(one_task(tmp_path), interpreter(tmp_path, "raise SystemExit('RuntimeError: no image')"))
    (failed,) = await play_class(cls, next(iter(cls.tasks())), "Yes.")
    assert (failed.status, failed.reward) == (Status.ENV_ERROR, None)
    assert "RuntimeError: no image" in (failed.error or "")
    assert [words[0] for words in calls] == ["begin", "ps", "rm", "end"]


def test_a_task_of_several_steps_is_told_by_its_name(tmp_path: Path, calls: list[tuple[str, ...]]) -> None:
    assert [task.prompt for task in loaded(one_task(tmp_path, ""), interpreter(tmp_path)).tasks()] == ["one"]


def test_harbor_is_told_agent_labels_and_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_MODEL", "policy")
    monkeypatch.setattr(sys, "path", list(sys.path))
    told = {"agent": f"{AGENT}:Commands", "environment": "podman", "labels": {"a": "b"}}
    config = program.configured(told, "/tasks/one", tmp_path)
    assert config["agent"] == {"import_path": "harbor_agent:Commands", "model_name": "openai/policy"}
    assert sys.path[0] == str(AGENT.parent)
    assert (config["task"], config["environment"]["type"]) == ({"path": "/tasks/one"}, "podman")
    (overlay,) = config["environment"]["extra_docker_compose"]
    assert json.loads(Path(overlay).read_text()) == {"services": {"main": {"labels": {"a": "b"}}}}
    assert program.agent_of("codex") == {"name": "codex"}


def result(rewards: dict[str, float] | None, failure: str = "") -> Any:
    verified = SimpleNamespace(rewards=rewards) if rewards is not None else None
    return SimpleNamespace(
        verifier_result=verified,
        exception_info=SimpleNamespace(exception_type=failure, exception_message="why") if failure else None,
    )


def test_only_a_late_agent_is_judged_in_spite_of_its_failure() -> None:
    assert program.outcome(result({"reward": 1.0})) == {"rewards": {"reward": 1.0}, "truncated": False}
    assert program.outcome(result({"reward": 1.0}, "AgentTimeoutError"))["truncated"] is True
    for found, problem in (
        (result({"reward": 0.0}, "NonZeroAgentExitCodeError"), "NonZeroAgentExitCodeError: why"),
        (result(None), "gave no reward"),
        (result({}), "gave no reward"),
    ):
        with pytest.raises(SystemExit, match=problem):
            program.outcome(found)


def test_a_specification_says_all_and_is_read_again(tmp_path: Path, calls: list[tuple[str, ...]]) -> None:
    agent = load_agent(f"harbor:{one_task(tmp_path)}?agent={AGENT}:Commands&python=py&environment=docker")
    assert agent.spec == f"harbor:{tmp_path / 'one'}?python=py&agent={AGENT}:Commands&environment=docker&reward="
    assert load_agent(agent.spec).spec == agent.spec


def test_the_file_of_an_agent_is_found_from_other_folders(
    tmp_path: Path, calls: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text("")
    monkeypatch.chdir(tmp_path)
    agent = load_agent(f"harbor:{one_task(tmp_path)}?agent=mine.py:Mine&python=py")
    assert f"&agent={tmp_path / 'mine.py'}:Mine&" in agent.spec


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ("python=/nowhere/python", "there is no interpreter '/nowhere/python'"),
        ("python=sh&agent=nothing.py:A", "there is no file '.*nothing.py'"),
        ("python=sh&environment=daytona", "environment = 'daytona' is unknown"),
        ("python=sh&network=True", "there is no option 'network'"),
    ],
)
def test_what_cannot_be_played_is_refused(options: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(EnvLoadError, match=problem):
        load_agent(f"harbor:{one_task(tmp_path)}?{options}")


def test_without_podman_and_docker_the_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: name if name == "py" else None)
    with pytest.raises(EnvLoadError, match="there is no podman or docker"):
        load_agent(f"harbor:{one_task(tmp_path)}?python=py")


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The ten tasks."""
    yield from tasks_with_images(tmp_path_factory.mktemp("harbor"))


FIVE = ("count-lines", "sort-words", "fix-script", "parts", "own-verifier")


@pytest.fixture
def harbor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes the class of a task for Harbor itself, where podman works as it does for sandboxes."""
    if not PYTHON:
        pytest.skip("set AGENTRL_TEST_HARBOR to the bin/python of an environment with harbor and podman-compose, which need Python 3.12")
    engine = container_engine()
    settings = ["[containers]", 'default_ulimits = ["nofile=1024:1024", "nproc=2048:2048"]']
    settings += ["[engine]", f'runtime = "{engine.program[-1]}"'] if "--runtime" in engine.program else []
    (tmp_path / "containers.conf").write_text("\n".join(settings))
    monkeypatch.setenv("CONTAINERS_CONF", str(tmp_path / "containers.conf"))

    def make(task: Path, options: str = "") -> Any:
        cls = loaded(task, Path(PYTHON), options)
        cls.process_limits = ProcessLimits(passed=("CONTAINERS_CONF",))
        return cls

    return make


def trials() -> list[str]:
    """Return the containers of all trials."""
    words = [*container_engine().program, "ps", "--all", "--quiet", "--filter", "label=agentrl.trial"]
    listed = subprocess.run(words, capture_output=True, text=True, check=True)
    return listed.stdout.split()


@pytest.mark.slow
@pytest.mark.timeout(1500)
async def test_both_ways_agree_on_five_tasks(harbor: Any, tasks: Path) -> None:
    for name in FIVE:
        own, ours = harbor(tasks / name), load_agent(f"harbor:{tasks / name}").load()
        ours.prepare()  # type: ignore[attr-defined]
        (task,) = own.tasks()
        for solved in (True, False):
            rewards = [await cls.try_solution(task, solved=solved) for cls in (own, ours)]  # type: ignore[attr-defined]
            assert rewards == [float(solved)] * 2, (name, solved)
    assert trials() == []


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_an_agent_of_harbors_is_trained_at_our_endpoint(harbor: Any, tasks: Path) -> None:
    cls = harbor(tasks / "count-lines", f"&agent={AGENT}:Commands")
    (right,) = await play_class(cls, next(iter(cls.tasks())), "wc -l < /srv/numbers.txt > /app/count.txt; echo told", "DONE")
    assert (right.error, right.reward, right.status, len(right.turns)) == (None, 1.0, Status.FINISHED, 2)
    assert "told" in right.turns[1].prompt_text
    assert trials() == []

"""Schemes of ``--agent`` that installed packages add by entry points."""

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl import Task
from agentrl.core.errors import EnvLoadError
from agentrl.core.plugins import kept_environment
from agentrl.env.boundary import EnvLimits
from agentrl.env.isolation.pool import open_sessions
from agentrl.env.isolation.system import ProcessLimits
from agentrl.suites.load import keep_environment, load_agent
from tests.unit.env.isolation.support import state
from tests.unit.suites.packages import install

SUITE = """
from agentrl import AgentInstance, EnvLoadError, StepResult, Task

class Echo(AgentInstance):
    word = ""

    @classmethod
    def tasks(cls):
        return [Task(f"Say {cls.word}.", label=cls.word)]

    def step(self, state):
        return StepResult(float(state.label in state.action_text), terminated=True)

def make(text):
    if text == "none":
        raise EnvLoadError("--agent", "echo:none", "there is no such word", "Give another.")
    return type("Say", (Echo,), {"word": text, "__module__": __name__})

def named(text):
    return f"echo_suite:{text}"

def judged(text):
    def reward(completion, label):
        return float(completion == text)
    return reward

def fails(text):
    raise KeyError(text)

def number(text):
    return 3
"""


@pytest.fixture
def suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    schemes = {name: f"echo_suite:{name}" for name in ("named", "judged", "fails", "number", "absent")}
    install(tmp_path, "echo-suite", {"echo_suite": SUITE}, schemes | {"echo": "echo_suite:make"})
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "echo_suite", raising=False)
    return tmp_path


def failure(spec: str) -> EnvLoadError:
    with pytest.raises(EnvLoadError) as caught:
        load_agent(spec)
    assert caught.value.field == "--agent"
    return caught.value


@pytest.mark.usefixtures("suite")
def test_the_function_gets_the_text_behind_the_scheme() -> None:
    agent = load_agent("echo:a:b?c=1#d")
    assert (agent.spec, agent.name, agent.load().word) == ("echo:a:b?c=1#d", "Say", "a:b?c=1#d")


@pytest.mark.usefixtures("suite")
def test_what_the_function_returns_is_whatever_agent_may_name() -> None:
    assert load_agent("named:Echo").name == "Echo"
    assert load_agent("judged:yes").load() is load_agent("judged:yes").load()
    assert "no 'Ecko' in it" in failure("named:Ecko").problem


def test_another_process_loads_it_by_its_specification(suite: Path) -> None:
    data = pickle.dumps(load_agent("echo:four"))
    code = f"import sys, pickle; sys.path.insert(0, {str(suite)!r}); print(pickle.loads({data!r}).load().word)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "four\n"


@pytest.mark.anyio
@pytest.mark.usefixtures("suite")
@pytest.mark.parametrize("process", [None, ProcessLimits()], ids=["here", "isolated"])
async def test_it_is_played_here_and_in_a_process_of_its_own(process: ProcessLimits | None) -> None:
    sessions = open_sessions(load_agent("echo:four"), EnvLimits(process=process))
    await sessions.start()
    session = sessions.session()
    try:
        task = Task("Say four.", label="four")
        await session.reset(task, 1)
        assert (await session.step(state("It is four.", task=task))).reward == 1.0
    finally:
        await session.close()
        await sessions.close()


@pytest.mark.usefixtures("suite")
def test_a_run_keeps_no_file_of_it(tmp_path: Path) -> None:
    keep_environment("echo:four", tmp_path)
    assert kept_environment("echo:four", tmp_path) == "echo:four"


@pytest.mark.usefixtures("suite")
@pytest.mark.parametrize(
    ("spec", "entry", "problem"),
    [
        ("fails:x", "echo_suite:fails", "raised KeyError: 'x'"),
        ("absent:x", "echo_suite:absent", "raised AttributeError: module 'echo_suite' has no attribute 'absent'"),
        ("number:x", "echo_suite:number", "returned a int: 3"),
    ],
)
def test_a_broken_entry_point_is_named_with_its_package(spec: str, entry: str, problem: str) -> None:
    scheme = spec.partition(":")[0]
    shown = failure(spec).problem
    assert shown.startswith(f"the entry point {scheme} = {entry} (agentrl.suites) of the package echo-suite {problem}")


@pytest.mark.usefixtures("suite")
def test_an_error_of_the_suite_itself_passes_unchanged() -> None:
    assert str(failure("echo:none")) == "--agent = 'echo:none': there is no such word. Give another."


def test_a_package_that_cannot_be_imported_is_named(suite: Path) -> None:
    install(suite, "broken-suite", {"broken_suite": "import no_such_package_at_all\n"}, {"broken": "broken_suite:make"})
    sys.path.append(str(suite / "elsewhere"))  # as if it had been installed before this process began
    try:
        error = failure("broken:x")
    finally:
        sys.path.pop()
    assert "the entry point broken = broken_suite:make (agentrl.suites) of the package broken-suite raised" in error.problem
    assert "ModuleNotFoundError: No module named 'no_such_package_at_all'" in error.problem


def test_a_scheme_of_two_packages_is_refused(suite: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = suite / "other"
    other.mkdir()
    install(other, "second-suite", {"second_suite": SUITE}, {"echo": "second_suite:make"})
    monkeypatch.syspath_prepend(str(other))
    assert "several packages declare the scheme echo: second-suite, echo-suite" in failure("echo:x").problem


def test_a_built_in_scheme_stays_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "thief", {"thief": SUITE}, {"gym": "thief:fails"})
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load_agent("gym:FrozenLake-v1").name == "FrozenLake"


@pytest.mark.usefixtures("suite")
@pytest.mark.parametrize(("spec", "similar"), [("gymm:FrozenLake-v1", "gym:FrozenLake-v1"), ("ecko:four", "echo:four")])
def test_an_unknown_scheme_lists_all_and_offers_the_most_similar(spec: str, similar: str) -> None:
    remedy = failure(spec).remedy
    assert remedy.startswith(f"Did you mean {similar}? Give file.py, ")
    assert "Built-in schemes are gym, command, harness, reward, answer, reasoning-gym, textarena, gem, nemo-gym, openenv, harbor" in remedy
    assert "of installed packages absent, echo, fails, judged, named, number." in remedy

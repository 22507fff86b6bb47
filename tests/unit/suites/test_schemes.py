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
from agentrl.suites.registry import BUILT_IN, NO_SCHEME, scheme_of
from agentrl.suites.scheme import Programs
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


FACTS = """
from agentrl.suites.scheme import Scheme, in_sandbox

def load(spec):
    import heavy_suite
    return heavy_suite.make(spec.partition(":")[2])

HEAVY = Scheme(name="heavy", load=load, programs=in_sandbox, is_remote=True)
NOTHING = 3
"""


@pytest.fixture
def heavy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that declares a scheme with facts, whose suite is another module."""
    schemes = {"heavy": "heavy_schemes:HEAVY", "nothing": "heavy_schemes:NOTHING", "missing": "no_schemes:HEAVY"}
    install(tmp_path, "heavy-suite", {"heavy_schemes": FACTS, "heavy_suite": SUITE}, schemes, "agentrl.schemes")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("heavy_schemes", "heavy_suite"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.usefixtures("heavy")
def test_facts_of_an_installed_scheme_are_known_before_its_suite_is_imported() -> None:
    scheme = scheme_of("heavy:four")
    assert (scheme.is_remote, scheme.takes_reward, scheme.programs("heavy:four")) == (True, False, Programs())
    assert "heavy_suite" not in sys.modules
    assert load_agent("heavy:four").load().word == "four"


@pytest.mark.usefixtures("heavy")
@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("nothing:x", "the entry point nothing = heavy_schemes:NOTHING (agentrl.schemes) of the package heavy-suite is a int"),
        ("missing:x", "the entry point missing = no_schemes:HEAVY (agentrl.schemes) of the package heavy-suite raised ModuleNotFoundError"),
        ("heavy:none", "there is no such word"),
    ],
)
def test_a_broken_scheme_is_named_with_its_package(spec: str, problem: str) -> None:
    assert failure(spec).problem.startswith(problem)


@pytest.mark.usefixtures("suite")
def test_a_function_has_the_usual_facts_and_is_not_imported_for_them() -> None:
    scheme = scheme_of("echo:four")
    assert (scheme.name, scheme.programs("echo:four"), scheme.is_remote, scheme.takes_reward) == ("echo", None, False, False)
    assert "echo_suite" not in sys.modules


@pytest.mark.parametrize("spec", ["env.py", "env.py:Name", "package.module:Name", "python:Name", "", "./gym:x"])
def test_what_is_no_scheme_has_the_usual_facts(spec: str) -> None:
    assert scheme_of(spec) is NO_SCHEME


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_registry_names_each_scheme_as_it_names_itself(name: str) -> None:
    assert scheme_of(f"{name}:").name == name


def test_facts_of_all_schemes_are_known_without_any_suite() -> None:
    suites = ("reasoning_gym", "textarena", "gem", "verifiers", "inspect_ai", "harbor", "websockets", "torch")
    code = f"""
import sys
from agentrl.suites.registry import BUILT_IN, scheme_of
for name in BUILT_IN:
    scheme_of(f"{{name}}:")
print([name for name in {suites!r} if name in sys.modules])
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize(
    ("spec", "programs"),
    [
        ("gym:FrozenLake-v1", None),
        ("command:solve {prompt}", Programs()),
        ("harness:codex", Programs()),
        ("harbor:tasks", Programs(needs_container=True, calls_model=False)),
        ("harbor:tasks#harness=codex", Programs(needs_container=True)),
        ("harbor:tasks#agent=solve {prompt}", Programs()),
    ],
)
def test_programs_of_a_specification(spec: str, programs: Programs | None) -> None:
    assert scheme_of(spec).programs(spec) == programs

"""Finding the user's class, and saying plainly why it cannot be found."""

import pickle
import sys
from pathlib import Path

import pytest

from agentrl.core.errors import ConfigError, EnvLoadError
from agentrl.core.plugins import kept_environment
from agentrl.suites import load, registry
from agentrl.suites.load import keep_environment, load_agent
from agentrl.suites.scheme import Scheme

GOOD = """
from agentrl import AgentInstance, StepResult

class Echo(AgentInstance):
    def step(self, state):
        return StepResult(1.0, terminated=True)
"""


def write(folder: Path, text: str, name: str = "envfile.py") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def failure(spec: object) -> EnvLoadError:
    with pytest.raises(EnvLoadError) as caught:
        load_agent(str(spec))
    assert isinstance(caught.value, ConfigError)
    assert caught.value.field == "--agent"
    return caught.value


def test_the_only_class_of_a_file_is_taken(tmp_path: Path) -> None:
    spec = load_agent(str(write(tmp_path, GOOD)))
    assert spec.name == "Echo"
    assert spec.load().__name__ == "Echo"
    assert spec.source.endswith("envfile.py")


def test_a_spec_survives_pickling_and_a_change_of_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, GOOD)
    monkeypatch.chdir(tmp_path)
    spec = load_agent("envfile.py")
    monkeypatch.chdir("/")
    load._load_named.cache_clear()
    assert pickle.loads(pickle.dumps(spec)).load().__name__ == "Echo"
    assert spec.spec == f"{tmp_path}/envfile.py:Echo"


def test_a_file_that_changes_the_folder_when_it_is_imported_is_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "import os\nos.chdir('/')\n" + GOOD)
    monkeypatch.chdir(tmp_path)
    agent = load_agent("envfile.py")
    assert Path.cwd() == Path("/")
    assert agent.spec == f"{tmp_path}/envfile.py:Echo"


def test_a_class_is_named_after_a_colon(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD + "class Other(Echo):\n    pass\nclass Third(Echo):\n    pass\n")
    assert load_agent(f"{path}:Third").name == "Third"
    error = failure(path)
    assert "several environments: Other, Third" in error.problem
    assert failure(f"{path}:Thrid").remedy == "Did you mean Third?"


def test_a_base_class_in_the_same_file_is_no_second_candidate(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD + "class Special(Echo):\n    pass\n")
    assert load_agent(str(path)).name == "Special"


def test_a_class_without_our_base_class_is_accepted(tmp_path: Path) -> None:
    path = write(tmp_path, "class Plain:\n    def reset(self, s): ...\n    def step(self, s): ...\n")
    assert load_agent(str(path)).name == "Plain"


def test_a_class_from_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "envpackage").mkdir()
    write(tmp_path / "envpackage", GOOD, "inner.py")
    monkeypatch.chdir(tmp_path)
    assert load_agent("envpackage.inner:Echo").name == "Echo"
    assert "no module 'envpackage.outer'" in failure("envpackage.outer:Echo").problem
    assert failure("envpackage.inner:Ecko").remedy == "Did you mean Echo?"


def test_neighbours_of_the_file_can_be_imported_also_later(tmp_path: Path) -> None:
    write(tmp_path, "ANSWER = 42\n", "neighbour_of_env.py")
    write(tmp_path, "LATE = 43\n", "late_neighbour_of_env.py")
    late = "    def late(self):\n        import late_neighbour_of_env\n        return late_neighbour_of_env.LATE\n"
    cls = load_agent(str(write(tmp_path, "from neighbour_of_env import ANSWER\n" + GOOD + late))).load()
    assert cls().late() == 43
    assert sys.path[0] != str(tmp_path)


def test_a_missing_file_suggests_the_nearest_name(tmp_path: Path) -> None:
    write(tmp_path, GOOD, "calculator.py")
    error = failure(tmp_path / "calculater.py")
    assert error.problem == "there is no such file"
    assert error.remedy == "Did you mean calculator.py?"
    assert "is a folder" in failure(tmp_path).problem


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def f(:\n", "line 1"),
        ("x = 1\ny = 1 / 0\n", "ZeroDivisionError: division by zero"),
        ("import no_such_package_at_all\n", "No module named 'no_such_package_at_all'"),
        ("import sys\nsys.exit(3)\n", "SystemExit: 3"),
        ("x = 1\n", "defines no environment"),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in failure(write(tmp_path, text)).problem


def test_the_line_of_an_error_on_import_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, "x = 1\ny = 1 / 0\n")
    assert f"{path}, line 2" in failure(path).problem


def test_a_class_without_step_is_refused_by_name(tmp_path: Path) -> None:
    text = "from agentrl import AgentInstance\nclass Env(AgentInstance):\n    def stepp(self, state): ...\n"
    path = write(tmp_path, text)
    for spec in (path, f"{path}:Env"):
        error = failure(spec)
        assert error.problem == "class Env has no method step"
        assert error.remedy == "Did you mean stepp?"


def test_what_is_not_a_class_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD + "def make(): ...\n")
    assert "make is a function, not a class" in failure(f"{path}:make").problem


@pytest.mark.parametrize("spec", ["", "  ", "calculator", "no-module:Name", ":Name"])
def test_a_specification_that_names_nothing(spec: str) -> None:
    assert "file.py" in failure(spec).remedy


def test_a_scheme_has_its_own_loader(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cls = load_agent(str(write(tmp_path, GOOD))).load()
    monkeypatch.setitem(registry.BUILT_IN, "suite", f"{__name__}:SUITE")  # type: ignore[index]
    monkeypatch.setattr(sys.modules[__name__], "SUITE", Scheme(name="suite", load=lambda spec: cls), raising=False)
    assert load_agent("suite:Some-v1").name == "Echo"


@pytest.mark.parametrize("name", ["", ":Echo"])
def test_a_run_keeps_the_file_of_its_environment_for_other_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    write(tmp_path, GOOD)
    monkeypatch.chdir(tmp_path)
    spec = f"envfile.py{name}"
    keep_environment(spec, run_dir)
    assert kept_environment(spec, run_dir) == spec
    monkeypatch.chdir("/")
    assert kept_environment(spec, run_dir) == f"{run_dir}/environment/envfile.py{name}"
    assert load_agent(kept_environment(spec, run_dir)).name == "Echo"
    keep_environment(kept_environment(spec, run_dir), run_dir)
    for other in ("gym:FrozenLake-v1", "package.module:Name", "elsewhere.py"):
        keep_environment(other, run_dir)
        assert kept_environment(other, run_dir) == other

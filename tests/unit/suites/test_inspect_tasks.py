"""Specifications of Inspect's tasks; tests/clients runs the tasks themselves."""

from pathlib import Path
from typing import Any

import pytest

from agentrl.core.errors import EnvLoadError
from agentrl.suites.load import load_agent
from tests.unit.examples.test_agents import play_class


def test_a_missing_file_and_a_missing_name_are_refused() -> None:
    with pytest.raises(EnvLoadError, match=r"there is no file 'nothing\.py'"):
        load_agent("inspect:nothing.py@sums")
    with pytest.raises(EnvLoadError, match="names no task"):
        load_agent("inspect:")


def test_a_file_is_named_with_its_folder_for_other_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sums.py").touch()
    monkeypatch.chdir(tmp_path)
    agent = load_agent("inspect:sums.py@sums?last=2")
    assert agent.spec == f"inspect:{tmp_path / 'sums.py'}@sums?last=2"
    assert agent.name == "sums"


def test_a_missing_package_is_told(tmp_path: Path) -> None:
    (tmp_path / "sums.py").touch()
    with pytest.raises(EnvLoadError, match="pip install inspect-ai"):
        load_agent(f"inspect:{tmp_path / 'sums.py'}").load().tasks()


def test_the_package_of_an_installed_task_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inspect_ai" / "_eval").mkdir(parents=True)
    for name in ("__init__.py", "_eval/__init__.py"):
        (tmp_path / "inspect_ai" / name).touch()
    (tmp_path / "inspect_ai" / "_eval" / "loader.py").write_text("def load_tasks(*args): return []")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(EnvLoadError, match=r"package inspect_evals, in which .* not installed.*pip install inspect-ai inspect-evals"):
        load_agent("inspect:inspect_evals/gsm8k").load().tasks()


PROGRAM = """
import json, sys
what, spec, target = sys.argv[1:4]
if what == "list":
    json.dump([{"id": "a", "input": [{"role": "user", "content": "Say 3."}], "target": "3"}], open(target, "w"))
else:
    print("noise")
    print("nothing to see")
"""


@pytest.mark.anyio
async def test_an_outcome_that_cannot_be_read_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    monkeypatch.setattr("agentrl.suites.inspect_tasks.InspectAgent.program", str(program))
    cls: Any = load_agent("inspect:installed/task").load()
    (task,) = cls.tasks()
    assert 0 < cls.start_s < 60
    assert (task.id, task.label, task.prompt) == ("a", "3", [{"role": "user", "content": "Say 3."}])
    (trajectory,) = await play_class(cls, task, "3")
    assert trajectory.reward is None
    assert "Inspect ended without a score; it printed last: 'nothing to see'" in (trajectory.error or "")

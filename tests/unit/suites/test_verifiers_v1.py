"""Specifications of task sets of verifiers 0.4; tests/clients runs the task sets themselves."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import pytest

from agentrl.core.errors import EnvLoadError
from agentrl.suites.load import load_agent

SPEC = f"verifiers:owner/my-set?python={sys.executable}&last=3&task.tools.x=1&env.agent.harness.id=null&num_tasks=5"


def test_options_are_settings_of_the_task_set_or_of_the_environment() -> None:
    cls = load_agent(SPEC).load()
    assert (cls.__name__, cls.python) == ("my_set", sys.executable)
    assert json.loads(cls.task) == {
        "env": {"taskset": {"id": "owner/my-set", "last": 3, "task": {"tools": {"x": 1}}}, "agent": {"harness": {"id": "null"}}},
        "num_tasks": 5,
    }


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("verifiers:x?python=/no/such/python", "there is no interpreter '/no/such/python'"),
        (f"verifiers:?python={sys.executable}", "names no task set"),
        (f"verifiers:x?python={sys.executable}&num_tasks=0", "num_tasks = 0 is out of range"),
    ],
)
def test_specifications_that_cannot_be_used(spec: str, problem: str) -> None:
    with pytest.raises(EnvLoadError, match=problem):
        load_agent(spec)


def test_an_interpreter_without_verifiers_is_told() -> None:
    with pytest.raises(EnvLoadError, match=r"could not be listed: ModuleNotFoundError: .*verifiers.*\?python=INTERPRETER"):
        load_agent(f"verifiers:x?python={sys.executable}").load().tasks()


def test_a_version_from_0_4_that_is_installed_here_has_task_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", types.ModuleType("verifiers"))
    cls = load_agent("verifiers:from-here").load()
    assert (cls.suite, Path(cls.program).name, cls.python) == ("verifiers", "verifiers_program.py", sys.executable)

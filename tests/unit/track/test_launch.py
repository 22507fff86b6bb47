"""The line that a run writes of its start."""

import sys
from pathlib import Path

import pytest

import agentrl
from agentrl.track.recorders import launch


@pytest.mark.parametrize(("program", "said"), [("/usr/bin/agentrl", "agentrl"), ("/home/a/script.py", "script.py")])
def test_the_command_is_what_a_person_typed(program: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [program, "train", "--agent", "a file.py"])
    assert launch()["command"] == f"{said} train --agent 'a file.py'"


def test_the_module_is_called_by_the_name_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [str(Path(agentrl.__file__).with_name("__main__.py")), "train"])
    assert launch()["command"] == "agentrl train"

"""Ctrl-C while the command is being imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

INTERRUPTING = """
import os, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["INTERRUPT_AT"]:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder())
"""
COMMANDS = {"the script": [str(Path(sys.executable).with_name("agentrl"))], "the module": [sys.executable, "-m", "agentrl"]}


def interrupted(folder: Path, command: list[str], at: str) -> subprocess.CompletedProcess[str]:
    """The end of a command that gets the signal when it begins to import the module `at`."""
    (folder / "sitecustomize.py").write_text(INTERRUPTING)
    path = ":".join([str(folder), *filter(None, sys.path)])
    variables = {**os.environ, "PYTHONPATH": path, "INTERRUPT_AT": at}
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env=variables, check=False)


@pytest.mark.parametrize("at", ["agentrl.algo.advantages", "agentrl.cli.main", "agentrl.cli.train", "agentrl.api.training"])
@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_it_is_one_line_and_exit_code_130(tmp_path: Path, command: list[str], at: str) -> None:
    done = interrupted(tmp_path, [*command, "train", "envs/calculator.py", "--dry-run"], at)
    assert (done.returncode, done.stderr, done.stdout) == (130, "\nagentrl: interrupted\n", "")


@pytest.mark.parametrize("words", [("-c", "import agentrl"), ("script.py", "agentrl")])
def test_a_program_that_imports_the_package_is_interrupted_as_ever(tmp_path: Path, words: tuple[str, ...]) -> None:
    (tmp_path / "script.py").write_text("import agentrl\n")
    done = interrupted(
        tmp_path, [sys.executable, *(str(tmp_path / word) if word.endswith(".py") else word for word in words)], "agentrl.algo"
    )
    assert done.returncode != 130
    assert done.stderr.endswith("KeyboardInterrupt\n")


def test_the_module_is_the_command() -> None:
    texts = {
        name: subprocess.run([*command, "--help"], capture_output=True, text=True, check=True).stdout for name, command in COMMANDS.items()
    }
    assert "agentrl train" in texts["the module"]
    assert texts["the script"] == texts["the module"]

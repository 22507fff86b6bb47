"""Completion of commands and flags in bash."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.cli.main import COMMANDS, main

TRY = """
complete_words() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=(); _agentrl; echo "${COMPREPLY[*]}"; }
complete_words agentrl prof
complete_words agentrl trian --x
complete_words agentrl inspect --st
complete_words agentrl inspect runs/x --min
complete_words agentrl get-model --de
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_commands_and_their_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--completion"]) == 0
    script = capsys.readouterr().out
    assert all(name in script for name in COMMANDS)
    program = tmp_path / "agentrl"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m agentrl "$@"\n')
    program.chmod(0o755)
    path = {"PATH": f"{tmp_path}:{Path(sys.executable).parent}:/usr/bin:/bin", "PYTHONPATH": ":".join(filter(None, sys.path))}
    done = subprocess.run(["bash", "-c", script + TRY], capture_output=True, text=True, timeout=100, env=path, check=True)
    assert done.stdout.splitlines() == ["profile", "", "--status --step", "--min-reward", "--debug"]
    assert not done.stderr

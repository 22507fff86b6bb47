"""Missing packages are named before one of them is imported."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

from agentrl.core.requirements import missing
from tests.e2e.runs import ROOT


def test_nothing_is_missing_here() -> None:
    assert missing() == []


def test_the_command_alone_says_what_to_install(tmp_path: Path) -> None:
    metadata = tmp_path / "agentrl-0.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    asked = requires("agentrl") or []
    header = "Metadata-Version: 2.1\nName: agentrl\nVersion: 0.0\n"
    metadata.write_text(header + "".join(f"Requires-Dist: {line}\n" for line in asked))
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "env")], check=True)
    python = tmp_path / "env" / "bin" / "python"
    (tmp_path / "agentrl").symlink_to(ROOT / "agentrl")
    words = [str(python), "-m", "agentrl", "--help"]
    done = subprocess.run(words, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    for line in asked:
        assert (f'"{line}"' in done.stderr) is ("extra ==" not in line)
    assert "Traceback" not in done.stderr
    assert f"{python} -m pip install" in done.stderr

"""The wheel, installed in an environment of its own, makes an environment and trains it in a folder outside the repository."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.e2e.runs import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SHORT = ("--num-steps", "2", "--groups-per-step", "4", "--n-samples-per-prompt", "4", "--max-new-tokens", "24")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that ``make wheel`` has built, else one of our own."""
    if given := os.environ.get("AGENTRL_WHEEL"):
        return ROOT / given
    out = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out)], cwd=ROOT, check=True, capture_output=True)
    (found,) = out.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command of an environment that has the wheel, and the pinned packages of this one without its link to the repository."""
    folder = tmp_path_factory.mktemp("fresh") / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "-qq", "--no-deps", str(wheel)]
    subprocess.run(pip, check=True, env=alone())
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "pinned.pth").write_text(sysconfig.get_path("purelib"))  # as a path only: links inside it are not followed
    return folder / "bin" / "agentrl"


def alone() -> dict[str, str]:
    """The environment variables without the path that may lead to the repository."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def run(command: Path, *words: str, cwd: Path) -> str:
    done = subprocess.run([str(command), *words], cwd=cwd, env=alone(), capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_holds_what_is_read_at_run_time(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    for folder in ("agentrl", "envs"):
        for path in (ROOT / folder).rglob("*"):
            inside = (
                path.relative_to(ROOT).as_posix().replace("envs/", "agentrl/assets/envs/", 1)
                if folder == "envs"
                else path.relative_to(ROOT).as_posix()
            )
            if path.is_file() and "__pycache__" not in path.parts:
                assert inside in names, inside
    assert not any(name.startswith(("tests/", "envs/", "examples/", "docs/")) for name in names)


def test_a_copied_environment_is_checked_and_trained_outside_the_repository(installed: Path, tmp_path: Path) -> None:
    where = run(installed.with_name("python"), "-c", "import agentrl; print(agentrl.__file__)", cwd=tmp_path)
    assert where.startswith(str(installed.parents[1]))
    assert "a copy of calculator" in run(installed, "new", "mine.py", cwd=tmp_path)
    assert "0 errors" in run(installed, "check", "mine.py", cwd=tmp_path)
    run(installed, "train", "--agent", "mine.py", "--async", *SHORT, "--run-dir", "out", cwd=tmp_path)
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["ledger"]["trained"] >= 8
    assert (tmp_path / "out" / "model" / "config.json").exists()

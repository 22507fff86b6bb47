"""A process that the run depends on is killed: a typed error within seconds, and nothing left."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest

from tests.e2e.runs import ENVS, SMALL, start
from tests.e2e.test_endings import family, running, wait_for_a_step


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("actor", "error"), [("RolloutActor", "EngineDeadError"), ("LearnerActor", "LearnerError")])
def test_a_killed_actor_ends_the_run(tmp_path: Path, actor: str, error: str) -> None:
    words = ("--async", "--num-steps", "10000", *SMALL)
    process = start("train", "--agent", str(ENVS / "calculator.py"), "--run-dir", str(tmp_path / "run"), *words)
    try:
        wait_for_a_step(process, tmp_path / "run")
        children = family(process.pid)
        (victim,) = [child for child in children if actor in " ".join(child.cmdline())]
        begin = time.monotonic()
        victim.kill()
        output, _ = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    assert process.returncode == 1, output
    assert f"agentrl: {error}: " in output
    assert "Traceback" not in output
    assert time.monotonic() - begin < 30
    psutil.wait_procs(children, timeout=10)
    assert not running(children)

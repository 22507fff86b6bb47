"""Self-play on the real stack: the pool grows, and a resumed run plays against the same weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.runs import ENVS, Run, start, succeeded, train
from tests.faults.support import kill, killed_at_the_end, lines, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

WORDS = (
    *("--runtime", "local", "--engine", "transformers", "--num-steps", "7", "--groups-per-step", "2", "--n-samples-per-prompt", "4"),
    *("--max-new-tokens", "6", "--partner", "bob=past#every=2&pool=2", "--save-every", "2"),
)


def weights(run: Run) -> bytes:
    return (run.directory / "model" / "model.safetensors").read_bytes()


def test_a_run_that_was_killed_ends_as_one_that_was_not(tmp_path: Path) -> None:
    once = succeeded(train(tmp_path / "once", *WORDS, agent=ENVS / "negotiation.py", timeout_s=300))
    assert sorted(folder.name for folder in (tmp_path / "once" / "partners").iterdir()) == [f"step-{step:08d}" for step in (2, 4, 6)]
    played = [row["env/partner_step"] for row in once.metrics]
    assert played[:2] == [0.0, 0.0]
    assert max(played) >= 2.0

    killed = tmp_path / "killed"
    with killed_at_the_end(start("train", "--agent", str(ENVS / "negotiation.py"), "--run-dir", str(killed), *WORDS)) as process:
        until(process, lambda: len(lines(killed / "metrics.jsonl")) >= 5)
        kill(process)
    again = succeeded(train(killed, "--resume", "auto", *WORDS, agent=ENVS / "negotiation.py", timeout_s=300))
    assert [row["env/partner_step"] for row in again.metrics] == played
    assert weights(again) == weights(once)

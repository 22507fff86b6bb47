"""Training on given data, killed with SIGKILL at awkward moments and resumed, ends bit for bit as if nothing had happened."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from tests.faults.killed_tune import MOMENTS, run
from tests.faults.report import Saw
from tests.learner_support import untimed, write_shifted

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]

DATA = Path(__file__).parents[2] / "examples" / "tune"
METHODS = {
    "sft": "chats",
    "dpo": "pairs",
    "kto": "labelled",
    "orpo": "pairs",
    "distill": "chats",
    "reward-model": "helpful",
    "process-reward-model": "steps",
}
STEPS = 6
WORDS = ["--num-steps", str(STEPS), "--batch-size", "4", "--max-length", "96", "--eval-size", "6", "--eval-every", "2", "--seed", "7"]
WORDS += ["--save-every", "2", "--keep-checkpoints", "1", "--keep-best", "loss", "--record-rows", "4", "--learning-rate", "2e-4"]
WORDS += ["--no-tensorboard"]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_shifted(tmp_path_factory.mktemp("teacher"))


def hashes(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def summary(run_dir: Path) -> dict[str, Any]:
    found = json.loads((run_dir / "summary.json").read_text())
    for evaluation in found["eval"].values():
        evaluation.pop("seconds", None)
    return {name: found[name] for name in ("status", "steps", "train", "eval", "data")}


def succeeded(code: int | None, output: str) -> None:
    assert code == 0, output


@pytest.mark.row(12, f"SIGKILL at {len(MOMENTS)} moments of one run on given data, for each method, from its directory to its summary")
@pytest.mark.parametrize("method", METHODS)
def test_a_run_that_is_killed_again_and_again_ends_bit_for_bit(method: str, tmp_path: Path, teacher: str, saw: Saw) -> None:
    words = [method, "--data", str(DATA / f"{METHODS[method]}.jsonl"), *WORDS]
    words += ["--teacher", teacher] if method == "distill" else []
    once, killed = tmp_path / "once", tmp_path / "killed"
    succeeded(*run([*words, "--run-dir", str(once)], "", 120))
    words += ["--run-dir", str(killed), "--resume", "auto"]
    for moment in MOMENTS:
        code, output = run(words, moment, 120)
        assert code == -9, f"{moment}: {output}"
    succeeded(*run(words, "", 120))
    assert untimed(killed) == untimed(once)
    assert [row["step"] for row in untimed(once)] == list(range(STEPS + 1))
    for name in ("model", "best"):
        assert hashes(killed / name) == hashes(once / name)
    assert (killed / "rows.jsonl").read_text() == (once / "rows.jsonl").read_text()
    assert summary(killed) == summary(once)
    names = [{path.name for path in folder.iterdir()} for folder in (killed, killed / "checkpoints")]
    assert names == [{path.name for path in folder.iterdir()} for folder in (once, once / "checkpoints")]
    saw(f"{method}: killed {', '.join(MOMENTS)}; files, weights and metrics equal those of the undisturbed run")

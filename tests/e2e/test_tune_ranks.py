"""Two gloo ranks with DeepSpeed ZeRO 2 and 3 give the losses of one process."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from agentrl.track.jsonl import read_lines
from agentrl.tune import tune
from tests.e2e.runs import ROOT, command
from tests.learner_support import write_shifted

DATA = ROOT / "examples" / "tune"
METHODS = [("sft", "chats"), ("dpo", "pairs"), ("reward-model", "helpful"), ("distill", "chats")]
COMMON: dict[str, Any] = {"num_steps": 5, "batch_size": 8, "eval_size": 8, "tensorboard": False, "seed": 1}
pytestmark = pytest.mark.slow


def rows_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The bundled model with other weights."""
    return write_shifted(tmp_path_factory.mktemp("teacher"))


@pytest.mark.parametrize(("method", "data"), METHODS, ids=[method for method, _ in METHODS])
def test_two_ranks_give_the_losses_of_one(method: str, data: str, tmp_path: Path, teacher: str):
    path = str(DATA / f"{data}.jsonl")
    own = {"teacher": teacher} if method == "distill" else {}
    alone = tune(method, data=path, run_dir=tmp_path / "alone", **COMMON, **own)
    expected = rows_of(alone.run_dir)
    flags = [
        word for name, value in {**COMMON, **own}.items() if name != "tensorboard" for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    for stage in ("2", "3"):
        run = tmp_path / f"zero-{stage}"
        words = [method, "--data", path, *flags, "--no-tensorboard", "--zero-stage", stage, "--num-ranks", "2", "--run-dir", str(run)]
        done = subprocess.run(command(*words), cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, timeout=900)
        assert done.returncode == 0, done.stderr.decode()[-3000:]
        found = rows_of(run)
        assert [row["step"] for row in found] == [row["step"] for row in expected]
        for mine, theirs in zip(found, expected, strict=True):
            for name in ("loss", "eval/loss"):
                if name in theirs and theirs[name] is not None:
                    assert mine[name] == pytest.approx(theirs[name], abs=1e-3), (stage, mine["step"], name)
        recorded, whole = (read_lines(path / "rows.jsonl") for path in (run, alone.run_dir))
        assert len(recorded) == len(whole) == 16 * 3  # rows, and their figures before and after
        assert [line.get("loss") for line in recorded[16:]] == pytest.approx([line["loss"] for line in whole[16:]], abs=1e-3)
        weights, other = (load_file(path / "model" / "model.safetensors") for path in (run, alone.run_dir))
        assert other.keys() <= weights.keys()  # a tied output layer is written twice by DeepSpeed
        assert all(np.allclose(weights[name], other[name], atol=1e-3) for name in other)

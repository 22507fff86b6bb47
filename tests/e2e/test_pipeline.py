"""The commands of docs/pipeline.md on the bundled model: pairs, a reward model, and training with it."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.runs import ROOT, start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ENV = str(ROOT / "examples" / "pipeline" / "calls.py")
SHORT = ("--max-new-tokens", "32")
RL = ("--num-steps", "8", "--groups-per-step", "16", "--init-kl-coef", "0.2", "--learning-rate", "2e-4", "--runtime", "local", *SHORT)


def run(*words: str) -> str:
    process = start(*words)
    output, _ = process.communicate(timeout=900)
    assert process.returncode == 0, output
    return output


def rewards(model: Path, output: Path) -> tuple[float, float]:
    """The environment's reward of a model and of the bundled one, on tasks that nothing is trained on."""
    words = ("--model", str(model), "--baseline", "start", "--eval-samples", "8", "--output", str(output))
    run("eval", ENV, *words, *SHORT)
    found = json.loads((output / "eval.json").read_text())
    return tuple(found[name]["overall"]["reward"]["value"] for name in ("model", "baseline"))  # type: ignore[return-value]


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A reward model trained on pairs that the bundled model sampled, and its accuracy on held-out pairs."""
    folder = tmp_path_factory.mktemp("pipeline")
    pairs = ("--n-samples-per-prompt", "16", "--select", "pairs", "--keep", "6", "--min-margin", "0.6", "--output", str(folder / "pairs"))
    run("sample", ENV, *pairs, *SHORT)
    sizes = ("--eval-size", "120", "--eval-every", "40", "--num-steps", "120", "--batch-size", "16", "--learning-rate", "1e-3")
    run("reward-model", "--data", str(folder / "pairs" / "data.jsonl"), *sizes, "--run-dir", str(folder / "rm"))
    rows = [json.loads(line) for line in (folder / "rm" / "metrics.jsonl").read_text().splitlines()]
    return {"model": folder / "rm" / "model", "accuracy": [row["eval/accuracy"] for row in rows if "eval/accuracy" in row][-1]}


def test_the_reward_model_knows_held_out_pairs(judge: dict[str, Any]) -> None:
    assert judge["accuracy"] >= 0.9


def test_training_with_it_raises_the_true_reward(judge: dict[str, Any], tmp_path: Path) -> None:
    learned = ("--reward-model", str(judge["model"]), "--environment-reward-weight", "0", "--normalize-reward")
    run("train", ENV, *learned, *RL, "--run-dir", str(tmp_path / "rl"))
    after, before = rewards(tmp_path / "rl" / "model", tmp_path / "eval")
    assert after >= before + 0.05


def test_each_of_three_rounds_of_dpo_improves(tmp_path: Path) -> None:
    words = ("--sample.n-samples-per-prompt", "8", "--train.num-steps", "10", "--train.batch-size", "16", "--train.learning-rate", "5e-5")
    words += ("--sample.max-new-tokens", "32", "--eval.max-new-tokens", "32", "--eval.eval-samples", "16")
    run("iterate", "dpo", ENV, "--rounds", "3", "--run-dir", str(tmp_path / "rounds"), *words)
    rows = [json.loads(line) for line in (tmp_path / "rounds" / "rounds.jsonl").read_text().splitlines()]
    curve = [row["metrics"]["reward"] for row in rows]
    assert len(curve) == 4
    assert all(later > earlier for earlier, later in pairwise(curve)), curve

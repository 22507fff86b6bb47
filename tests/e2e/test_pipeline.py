"""The commands of docs/pipeline.md on the bundled model: demonstrations, pairs, a reward model, training with it, DPO beside it."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.runs import ROOT, start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

FOLDER = ROOT / "examples" / "pipeline"
ENV, QUESTIONS, HELD_OUT = (str(FOLDER / name) for name in ("calls.py", "questions.jsonl", "held_out.jsonl"))
SHORT = ("--max-new-tokens", "16")
PAIRS = ("--n-samples-per-prompt", "32", "--select", "pairs", *SHORT)
RL = ("--num-steps", "30", "--groups-per-step", "16", "--learning-rate", "3e-4", "--init-kl-coef", "0.05", "--runtime", "local", *SHORT)


def run(*words: str | Path) -> str:
    process = start(*map(str, words))
    output, _ = process.communicate(timeout=900)
    assert process.returncode == 0, output
    return output


def reward_of(model: Path | None, output: Path) -> float:
    """The environment's own reward of a model, on questions that nothing is trained on."""
    named = ("--model", model) if model else ()
    run("eval", ENV, *named, "--eval-samples", "16", "--output", output, *SHORT)
    found: float = json.loads((output / "eval.json").read_text())["model"]["overall"]["reward"]["value"]
    return found


def last(run_dir: Path, figure: str) -> float:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    found: float = [row[figure] for row in rows if figure in row][-1]
    return found


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model after supervised training on demonstrations of which half are mistaken."""
    folder = tmp_path_factory.mktemp("warm") / "sft"
    run("sft", "--data", FOLDER / "demonstrations.jsonl", "--num-steps", "150", "--run-dir", folder)
    return folder / "model"


@pytest.fixture(scope="module")
def start_reward(warm: Path, tmp_path_factory: pytest.TempPathFactory) -> float:
    return reward_of(warm, tmp_path_factory.mktemp("start") / "eval")


@pytest.fixture(scope="module")
def judge(warm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of a reward model, measured on pairs of held-out questions."""
    folder = tmp_path_factory.mktemp("judge")
    run("sample", ENV, "--model", warm, "--keep", "12", "--output", folder / "pairs", *PAIRS)
    run("sample", ENV, "--model", warm, "--keep", "12", "--prompts", HELD_OUT, "--output", folder / "held-out", *PAIRS)
    data = ("--data", folder / "pairs" / "data.jsonl", "--eval-data", folder / "held-out" / "data.jsonl")
    sizes = ("--num-steps", "1000", "--batch-size", "16", "--learning-rate", "7e-4")
    run("reward-model", "--model", warm, *data, *sizes, "--run-dir", folder / "rm")
    rows = [json.loads(line) for line in (folder / "held-out" / "data.jsonl").read_text().splitlines()]
    kinds = {(row["chosen_reward"], row["rejected_reward"]) for row in rows}
    assert {(1.0, 0.5), (1.0, 0.0)} <= kinds  # another call, and none at all
    return folder / "rm"


def test_the_base_model_knows_nothing_of_the_task_and_demonstrations_teach_it(start_reward: float, tmp_path: Path) -> None:
    assert reward_of(None, tmp_path / "eval") < 0.05
    assert 0.4 < start_reward < 0.75


def test_the_reward_model_knows_pairs_of_held_out_questions(judge: Path) -> None:
    assert last(judge, "eval/accuracy") >= 0.9


def test_training_with_it_raises_the_true_reward(warm: Path, start_reward: float, judge: Path, tmp_path: Path) -> None:
    learned = ("--reward-model", judge / "model", "--environment-reward-weight", "0", "--normalize-reward")
    run("train", ENV, "--model", warm, *learned, *RL, "--run-dir", tmp_path / "rl")
    assert reward_of(tmp_path / "rl" / "model", tmp_path / "eval") >= start_reward + 0.15


@contextmanager
def served(model: Path) -> Iterator[str]:
    """The address of a reward model that ``agentrl serve-reward-model`` serves."""
    process = start("serve-reward-model", str(model), "--port", "0")
    try:
        assert process.stdout is not None
        lines: list[str] = []
        while not (found := re.search(r"^serving .* at (http://\S+)", lines[-1] if lines else "")):
            lines.append(process.stdout.readline())
            assert lines[-1], lines
        yield found[1]
    finally:
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert re.search(r"\d texts scored, 0 requests refused, 0 failed", output)


def test_a_served_reward_model_raises_it_too(warm: Path, start_reward: float, judge: Path, tmp_path: Path) -> None:
    with served(judge / "model") as url:
        run("train", "--model", warm, "--remote-rm-url", url, "--prompts", QUESTIONS, *RL, "--run-dir", tmp_path / "rl")
    assert reward_of(tmp_path / "rl" / "model", tmp_path / "eval") >= start_reward + 0.15


def test_each_of_three_rounds_of_dpo_improves(warm: Path, start_reward: float, tmp_path: Path) -> None:
    words = ("--sample.n-samples-per-prompt", "8", "--train.num-steps", "16", "--train.batch-size", "16", "--train.learning-rate", "1e-4")
    words += ("--sample.max-new-tokens", "16", "--eval.max-new-tokens", "16", "--eval.eval-samples", "16")
    run("iterate", "dpo", ENV, "--model", warm, "--rounds", "3", "--run-dir", tmp_path / "rounds", *words)
    rows: list[dict[str, Any]] = [json.loads(line) for line in (tmp_path / "rounds" / "rounds.jsonl").read_text().splitlines()]
    curve = [row["metrics"]["reward"] for row in rows]
    assert len(curve) == 4
    assert all(later > earlier for earlier, later in pairwise(curve)), curve
    assert curve[0] == pytest.approx(start_reward, abs=0.05)

"""Data and reward functions of other systems train as they are."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from agentrl.cli.main import main

SMALL = ("--num-steps", "1", "--groups-per-step", "2", "--n-samples-per-prompt", "2", "--max-new-tokens", "4", "--runtime", "local")
TRL = """
def accuracy_reward(completions, answer, **kw):
    assert set(answer) <= {"yes", "no"}
    return [float(wanted in str(text)) + len(str(text)) % 7 for text, wanted in zip(completions, answer)]
"""
VERL = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert (data_source, ground_truth, extra_info["split"]) == ("openai/gsm8k", "72", "train")
    return float(ground_truth in solution_str) + len(solution_str) % 7
"""
GSM8K = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "48 + 24?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "72"},
    "extra_info": {"split": "train", "index": 0, "answer": "#### 72", "question": "48 + 24?"},
}


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"Is {number} even?", "answer": "no" if number % 2 else "yes"} for number in range(4)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    parquet.write_table(pa.Table.from_pylist([GSM8K] * 4), "train.parquet")
    Path("trl.py").write_text(TRL)
    Path("verl.py").write_text(VERL)
    return tmp_path


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "words",
    [
        ("trl.py:accuracy_reward", "--prompts", "rows.jsonl"),
        ("trl.py:accuracy_reward", "--prompts", "rows.jsonl", "--label-key", "answer"),
        ("verl.py:compute_score", "--prompts", "train.parquet", "--label-key", "reward_model.ground_truth"),
    ],
)
def test_a_run_on_data_of_another_system(data: Path, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *words, *SMALL, "--engine", "transformers", "--run-dir", "run"]) == 0, capsys.readouterr().err
    assert json.loads((data / "run" / "summary.json").read_text())["ledger"]["trained"] == 2

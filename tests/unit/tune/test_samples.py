"""The rows that a run records: which ones, and the figures of their tokens, which are those of the run's own evaluations."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from agentrl.core.annotations import unpack
from agentrl.tune.learner_rows import MAX_TOKENS, chosen_rows, sequence_line, sequences_of
from agentrl.tune.row_text import IGNORED
from agentrl.tune.run import tune

DATA = Path(__file__).parents[3] / "examples" / "tune"
HELD_OUT, STEPS = 8, 2
METHODS = [
    ("sft", "chats"),
    ("reward-model", "helpful"),
    ("process-reward-model", "steps"),
    ("dpo", "pairs"),
    ("kto", "labelled"),
    pytest.param("orpo", "pairs", marks=pytest.mark.slow),
    pytest.param("distill", "chats", marks=pytest.mark.slow),
]


def recorded(folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The rows of a run, and their figures."""
    lines = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    return [line for line in lines if "step" not in line], [line for line in lines if "step" in line]


def losses_of(row: dict[str, Any], figures: dict[str, Any]) -> list[float]:
    """The losses that an evaluation counts: of single tokens, else of the row."""
    values = figures["sequences"][0]
    return unpack(values["loss"], len(row["sequences"][0]["trained"])).tolist() if "loss" in values else [figures["loss"]]


def short(method: str, data: str, folder: Path, **settings: Any) -> Path:
    rest = {"num_steps": STEPS, "batch_size": 8, "eval_size": HELD_OUT, "learning_rate": 1e-3, "tensorboard": False, **settings}
    return tune(method, data=str(DATA / f"{data}.jsonl"), run_dir=folder, **rest).run_dir


@pytest.mark.parametrize(("method", "data"), METHODS)
def test_figures_of_the_held_out_rows_are_those_of_the_evaluations(method: str, data: str, tmp_path: Path):
    teacher = {"teacher": str(short("sft", "chats", tmp_path / "teacher") / "model")} if method == "distill" else {}
    folder = short(method, data, tmp_path / "run", **teacher)
    rows, figures = recorded(folder)
    assert [row["part"] for row in rows] == ["training"] * 8 + ["held out"] * HELD_OUT
    evaluated = [row for line in (folder / "metrics.jsonl").read_text().splitlines() if "eval/loss" in (row := json.loads(line))]
    assert [row["step"] for row in evaluated] == [0, STEPS]
    for row in evaluated:
        here = [line for line in figures if line["step"] == row["step"]]
        assert [line["row"] for line in here] == list(range(16))
        losses = [loss for line in here[8:] for loss in losses_of(rows[line["row"]], line)]
        assert sum(losses) / len(losses) == pytest.approx(row["eval/loss"], rel=1e-4)
        if "eval/reward/chosen" in row and method != "kto":
            rewards = [line["sequences"][0]["reward"] for line in here[8:]]
            assert sum(rewards) / HELD_OUT == pytest.approx(row["eval/reward/chosen"], rel=1e-4, abs=1e-6)
    assert figures[0]["sequences"] != figures[16]["sequences"]


def test_recording_changes_nothing_and_can_be_left_out(tmp_path: Path):
    weights = []
    for count in (0, 4):
        folder = short("sft", "chats", tmp_path / str(count), record_rows=count, optimizer="adamw")
        assert (folder / "rows.jsonl").exists() == bool(count)
        weights.append((folder / "model" / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]
    assert [row["part"] for row in recorded(tmp_path / "4")[0]] == ["training", "training", "held out", "held out"]


def test_a_run_that_goes_on_keeps_the_figures_of_its_beginning(tmp_path: Path):
    short("sft", "chats", tmp_path / "run", save_every=1, num_steps=3)
    before = recorded(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "checkpoint-3")
    short("sft", "chats", tmp_path / "run", save_every=1, num_steps=3, resume="auto")
    assert recorded(tmp_path / "run") == before
    assert [line["step"] for line in before[1]] == [0] * 16 + [3] * 16


def test_a_run_that_was_killed_before_its_last_figures_gets_them_and_no_model_of_a_killed_process_stays(tmp_path: Path):
    run = tmp_path / "run"
    short("sft", "chats", run, save_every=1)
    before = recorded(run)
    (run / "rows.jsonl").write_text("".join((run / "rows.jsonl").read_text().splitlines(keepends=True)[:32]))
    left = run / ".model.1.tmp"
    (run / "model").rename(left)
    short("sft", "chats", run, save_every=1, resume="auto")
    assert recorded(run) == before
    assert (run / "model").is_dir()
    assert not left.exists()


def test_other_rows_are_recorded_anew(tmp_path: Path):
    short("sft", "chats", tmp_path / "run", save_every=1, record_rows=4)
    short("sft", "chats", tmp_path / "run", save_every=1, record_rows=8, resume="auto")
    rows, figures = recorded(tmp_path / "run")
    assert (len(rows), [line["step"] for line in figures]) == (8, [STEPS] * 8)


def test_figures_are_those_without_dropout(tmp_path: Path):
    line = (DATA / "chats.jsonl").read_text().splitlines()[0]
    (tmp_path / "same.jsonl").write_text(f"{line}\n" * 8)
    dropout = {"lora_rank": 4, "lora_dropout": 0.5, "learning_rate": 1e-1, "eval_size": 0}
    _, figures = recorded(short("sft", str(tmp_path / "same"), tmp_path / "run", **dropout))
    assert len({round(line["loss"], 4) for line in figures[:8]}) == len({round(line["loss"], 4) for line in figures[8:]}) == 1


def text(length: int, first: int = 1) -> dict[str, Any]:
    ids = list(range(first, first + length))
    return {"input_ids": ids, "labels": [IGNORED, *ids[1:]]}


def test_recorded_rows_are_few_and_short_but_for_the_first():
    assert len(chosen_rows([text(3)] * 40, [text(3)] * 40, 16)) == 16
    assert len(chosen_rows([text(MAX_TOKENS + 1), text(3)], [], 16)) == 1
    assert len(chosen_rows([text(MAX_TOKENS - 4), text(9), text(4)], [], 16)) == 1
    pair = {"prompt_ids": [1], "chosen_ids": [2, 3], "rejected_ids": [4]}
    assert sequences_of(pair) == [("chosen", [1, 2, 3], [IGNORED, 2, 3]), ("rejected", [1, 4], [IGNORED, 4])]
    assert sequence_line("", [7, 8, 9], [7, IGNORED, 9]) == {"name": "", "ids": [7, 8, 9], "trained": [2]}  # nothing predicts the first

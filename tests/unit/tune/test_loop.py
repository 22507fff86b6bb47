"""The steps of a run: what follows each, how it ends, and that it goes on as if it had never been interrupted."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.config.methods import METHODS
from agentrl.resolve.tune import load_given
from agentrl.tune import tune
from agentrl.tune.directory import RunDirectory
from agentrl.tune.follow import Best, Rows, Stop
from agentrl.tune.loop import Loop
from agentrl.tune.row_table import Prepared

DATA = Path(__file__).parents[3] / "examples" / "tune"
OF = {"sft": "chats", "dpo": "pairs", "kto": "labelled", "orpo": "pairs", "reward-model": "helpful", "process-reward-model": "steps"}
ROW: dict[str, Any] = {"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}


class State:
    """A learner that computes nothing: its evaluations have given losses."""

    def __init__(self, losses: list[float] | None = None) -> None:
        self.ranks = SimpleNamespace(first=True, barrier=lambda: None, sum=lambda flag: flag, device="cpu")
        self.losses, self.trained, self.saved = losses or [], 0, 0
        self.policy = SimpleNamespace(can_generate=lambda: False)

    def train_rows(self, step: int, rows: Any) -> dict[str, float]:
        self.trained += rows.num_rows
        return {"loss": 1.0}

    def evaluate_rows(self, step: int, blocks: Any) -> dict[str, float]:
        assert sum(rows.num_rows for rows in blocks) == 3
        return {"loss": self.losses.pop(0) if self.losses else 0.5}

    def save(self, path: str) -> None:
        self.saved += 1


def followed(
    folder: Path, steps: int, state: State, *, stop: Stop | None = None, held_out: int = 3, keep: str = "", **settings: Any
) -> tuple[str, dict[int, str]]:
    """How a run ends, and what follows each step: an evaluation, a checkpoint."""
    plan = load_given(METHODS["sft"], {"data": str(DATA / "chats.jsonl"), "run_dir": folder, "batch_size": 2, "eval_size": 3, **settings})
    found: dict[int, str] = {}
    rows = Rows(plan.method, [], epoch_rows=2, batch_size=2)
    prepared = Prepared(([ROW],), [ROW] * held_out, {}, ())
    loop = Loop(plan, prepared, RunDirectory(folder, None, ()), state, rows, Best(keep, folder / "best"), stop or Stop(), lambda: 1.0)  # type: ignore[arg-type]
    evaluate = loop._evaluate

    def note(letter: str, call: Any) -> Any:
        def noted(step: int) -> None:
            found[step] = found.get(step, "") + letter
            call(step)

        return noted

    loop._evaluate = note("e", evaluate)  # type: ignore[method-assign]
    loop._save_checkpoint = note("s", lambda step: None)  # type: ignore[method-assign]
    return loop.train([ROW] * (2 * steps), steps), found


def test_checkpoints_and_evaluations_come_as_often_as_asked_and_at_the_end(tmp_path: Path) -> None:
    state = State()
    assert followed(tmp_path, 5, state, save_every=2, eval_every=3) == ("finished", {0: "e", 2: "s", 3: "e", 4: "s", 5: "es"})
    assert state.trained == 10
    assert followed(tmp_path, 2, State()) == ("finished", {0: "e", 2: "e"})
    assert followed(tmp_path, 2, State(), held_out=0) == ("finished", {})


def test_a_request_to_stop_saves_and_ends_but_not_after_the_last_step(tmp_path: Path) -> None:
    stop = Stop()
    stop.asked = True
    assert followed(tmp_path, 1, State(), stop=stop) == ("finished", {0: "e", 1: "e"})
    assert followed(tmp_path, 2, State(), stop=stop) == ("interrupted", {0: "e", 1: "s"})


def test_evaluations_that_are_no_better_end_the_run(tmp_path: Path) -> None:
    state = State([0.9, 0.7, 0.5, 0.6, 0.4, 0.4, 0.6])
    status, found = followed(tmp_path, 9, state, keep="loss", save_every=5, eval_every=1, early_stopping=2)
    assert status == "settled"
    assert found == {0: "e", 1: "e", 2: "e", 3: "e", 4: "e", 5: "es", 6: "es"}
    assert state.saved == 4


def test_a_run_that_was_killed_when_it_had_settled_trains_no_further(tmp_path: Path) -> None:
    plan = load_given(METHODS["sft"], {"data": str(DATA / "chats.jsonl"), "run_dir": tmp_path, "eval_every": 1, "early_stopping": 2})
    lines = [{"step": step, "eval/loss": loss, "tokens": 9.0} for step, loss in enumerate((0.5, 0.4, 0.6, 0.45))]
    directory, state = RunDirectory(tmp_path, tmp_path / "checkpoint-3", tuple(lines)), State()
    for rows, end in ((lines, "settled"), (lines[:3], "finished")):
        best = Best("loss", tmp_path / "best", rows)
        events = Rows(plan.method, [], epoch_rows=2, batch_size=2)
        prepared = Prepared(([ROW],), (), {}, ())
        loop = Loop(plan, prepared, directory, state, events, best, Stop(), lambda: 1.0)  # type: ignore[arg-type]
        assert loop.train([ROW] * 160, 5) == end
        assert state.trained == (0 if end == "settled" else 64)


def test_the_last_evaluation_ends_nothing_early(tmp_path: Path) -> None:
    status, _ = followed(tmp_path, 1, State([0.1, 0.2]), keep="loss", eval_every=1, early_stopping=1)
    assert status == "finished"


def rows_of(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if not name.startswith(("time", "memory/", "eval/seconds"))} for row in lines]


@pytest.mark.parametrize("command", OF)
@pytest.mark.parametrize("lora_rank", [0, 4])
def test_a_run_goes_on_bit_for_bit(command: str, lora_rank: int, tmp_path: Path) -> None:
    """The weights and all metrics are those of a run that was never interrupted."""
    rest: dict[str, Any] = {"lora_rank": lora_rank, "lora_dropout": 0.1 if lora_rank else 0.0, "tensorboard": False}
    settings: dict[str, Any] = {
        "batch_size": 4,
        "num_steps": 4,
        "save_every": 2,
        "eval_size": 4,
        "record_rows": 0,
        "tensorboard": False,
        **rest,
    }
    data = str(DATA / f"{OF[command]}.jsonl")
    whole = tune(command, data=data, run_dir=tmp_path / "run", **settings)
    expected, file = rows_of(whole.run_dir), "adapter_model.safetensors" if lora_rank else "model.safetensors"
    weights = (whole.model / file).read_bytes()
    shutil.rmtree(whole.run_dir / "checkpoints" / "checkpoint-4")
    shutil.rmtree(whole.model)
    again = tune(command, resume=str(whole.run_dir))
    assert (again.status, again.steps) == ("finished", 4)
    assert rows_of(again.run_dir) == expected
    assert (again.model / file).read_bytes() == weights

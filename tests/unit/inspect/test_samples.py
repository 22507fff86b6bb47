"""The recorded rows of a run on given data, as the viewer shows them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl.cli.doctor import main as doctor_command
from agentrl.cli.inspect import main as inspect_command
from agentrl.core.annotations import pack
from agentrl.core.errors import ConfigError
from agentrl.core.paths import near_path
from agentrl.core.types import floats
from agentrl.inspect.listing import run_answer
from agentrl.inspect.reader import RunReader
from agentrl.inspect.samples import num_samples, sample_answer, sample_list


def packed(*values: float) -> Any:
    return pack(floats(np.array(values, np.float32)))


def run_of(folder: Path, lines: list[dict[str, Any]], command: str = "sft") -> RunReader:
    folder.mkdir()
    settings: dict[str, Any] = {"command": command, "run": {"num_steps": 4}, "data": {"data": "chats.jsonl"}, "model": {"model": ""}}
    settings["lora"] = {"lora_rank": 8}
    (folder / "config.json").write_text(json.dumps(settings))
    rows = [{"step": step, "loss": 2.0 / step, "epoch": step / 4, "eval/loss": 1.0} for step in range(1, 5)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return RunReader(folder).open()


def chat(number: int = 0) -> dict[str, Any]:
    return {"row": number, "part": "held out", "images": 0, "sequences": [{"name": "", "ids": [4, 21, 4, 22, 23], "trained": [1, 3, 4]}]}


def figures(step: int, *losses: float, number: int = 0) -> dict[str, Any]:
    return {"row": number, "step": step, "loss": sum(losses) / len(losses), "sequences": [{"loss": packed(*losses)}]}


def test_figures_stand_at_their_tokens_and_their_change_is_after_less_before(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", [chat(), figures(0, 1.0, 2.0, 3.0), figures(4, 0.5, 2.5, 0.0)])
    answer = sample_answer(run, 0)
    [turn] = answer["turns"]
    assert turn["tokens"]["mask"] == ["context", "trained", "context", "trained", "trained"]
    assert turn["tokens"]["loss_before"] == [None, 1.0, None, 2.0, 3.0]
    assert turn["tokens"]["loss_after"] == [None, 0.5, None, 2.5, 0.0]
    assert turn["tokens"]["loss_change"] == [None, -0.5, None, 0.5, -3.0]
    assert answer["fields"] == ["loss_before", "loss_after", "loss_change"]
    assert answer["ranges"]["loss_before"] == answer["ranges"]["loss_after"] == [0.0, 3.0]  # one scale for both
    assert (answer["loss_before"], answer["loss_after"], answer["steps"]) == (2.0, 1.0, [0, 4])
    [row] = sample_list(run)["rows"]
    assert (row["tokens"], row["trained"], row["loss_before"], row["loss_after"]) == (5, 3, 2.0, 1.0)
    assert row["answers"][0]["text"].count(" … ") == 1  # two answers of one chat


def test_a_run_under_way_has_the_figures_of_its_beginning_only(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", [chat(), figures(0, 1.0, 2.0, 3.0)])
    answer = sample_answer(run, 0)
    assert (answer["loss_before"], answer["loss_after"], answer["fields"]) == (2.0, None, ["loss_before"])


def test_pairs_have_the_rewards_of_both_answers_and_judged_steps_their_labels(tmp_path: Path) -> None:
    both = [{"name": name, "ids": [4, 21], "trained": [1]} for name in ("chosen", "rejected")]
    measured = [{"logprob": packed(-1.0), "reward": 0.5}, {"logprob": packed(-2.0), "reward": -0.5}]
    steps = {"row": 1, "part": "training", "sequences": [{"name": "", "ids": [4, 21, 22], "trained": [1, 2], "labels": [1.0, 0.0]}]}
    lines = [{"row": 0, "part": "training", "sequences": both}, steps, {"row": 0, "step": 0, "loss": 0.7, "sequences": measured}]
    run = run_of(tmp_path / "run", lines, "dpo")
    answer = sample_answer(run, 0)
    assert [(turn["name"], turn["rewards"]["before"]) for turn in answer["turns"]] == [("chosen", 0.5), ("rejected", -0.5)]
    assert answer["ranges"]["logprob_before"] == [-2.0, -1.0]
    assert (answer["previous"], answer["next"]) == (None, 1)
    assert sample_answer(run, 1)["turns"][0]["tokens"]["label"] == [None, 1.0, 0.0]
    assert sample_list(run)["rows"][1]["answers"][0]["text"] == "steps: 1 0"


def test_lines_that_are_none_of_rows_are_left_out(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", [{"row": "x", "sequences": []}, {"row": 3}, chat(2), figures(0, 1.0, 2.0, number=2)])
    assert num_samples(run) == 1
    assert sample_answer(run, 2)["turns"][0]["tokens"]["loss_before"] is None  # of another number of tokens
    with pytest.raises(ConfigError, match="not among the recorded rows"):
        sample_answer(run, 0)


@pytest.mark.parametrize("command", [inspect_command, doctor_command], ids=["inspect", "doctor"])
def test_commands_about_episodes_name_a_run_that_has_none(command: Callable[[list[str]], int], tmp_path: Path) -> None:
    run_of(tmp_path / "run", [chat()], "orpo")
    with pytest.raises(ConfigError, match="is a run of `agentrl orpo`, which plays no episodes"):
        command([str(tmp_path / "run")])


def test_a_run_on_given_data_is_told_from_a_run_of_train(tmp_path: Path) -> None:
    answer = run_answer(run_of(tmp_path / "run", [chat()], "kto"), "run")
    assert (answer["kind"], answer["tags"], answer["measure"], answer["samples"]) == ("tune", ["kto", "LoRA"], "loss", 1)
    assert (answer["reward"]["best"], answer["data"], answer["num_steps"], answer["warnings"]) == (0.5, "chats.jsonl", 4, [])


def test_a_path_below_the_working_directory_is_shown_as_it_is_typed_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert near_path(f"{tmp_path}/envs/own.py:Own") == "envs/own.py:Own"
    assert [near_path(path) for path in ("/elsewhere/own.py", "gym:CartPole-v1")] == ["/elsewhere/own.py", "gym:CartPole-v1"]

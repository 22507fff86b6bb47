"""`agentrl profile` on the files of simulated runs, whose times are known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentrl.cli.main import main
from agentrl.config.mapping import to_json
from agentrl.config.schema import TrainConfig
from agentrl.config.sections import changed
from agentrl.profile.report import _bound
from tests.simulation import simulate
from tests.unit.profile.recordings import STEADY, plan


def write_run(path: Path, *, num_steps: int = 12, max_staleness: int = 0, **more: Any) -> Path:
    run = simulate(plan(episodes=STEADY, num_steps=num_steps, max_staleness=max_staleness))
    config = changed(
        TrainConfig(),
        agent="envs/calculator.py",
        num_steps=num_steps,
        groups_per_step=8,
        n_samples_per_prompt=4,
        **{"max_staleness": max_staleness, **more},
    )
    path.mkdir()
    (path / "config.json").write_text(to_json(config))
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in run.steps))
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("profile") / "steady")


def test_a_run_of_constant_durations_is_explained_exactly(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", str(run), "--json"]) == 0
    profile = json.loads(capsys.readouterr().out)
    decode_s, train_s = 80 * (0.010 + 32 * 0.0005), 0.5 + 0.0001 * 32 * 80
    step_s = decode_s + 0.6 + train_s + 0.05 + 0.17
    assert profile["measured"]["step_s"] == pytest.approx(step_s)
    assert profile["bound"]["ideal_s"] == pytest.approx(decode_s + 0.6)
    assert profile["bound"]["reached"] == pytest.approx((decode_s + 0.6) / step_s)
    assert profile["time"]["learner"]["train_s"] == pytest.approx(train_s)
    assert profile["sizes"] == {
        "num_engines": 1,
        "num_learners": 1,
        "groups_per_step": 8,
        "n_samples_per_prompt": 4,
        "oversampled_groups": 0,
        "max_staleness": 0,
    }


def test_people_are_told_the_same(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", str(run)]) == 0
    text = capsys.readouterr().out
    for part in (
        "1 engine, 1 learner rank, steps of 8 groups of 4 episodes, synchronous",
        "3.66 s per step, 8.8 episodes/s, over 11 steps",
        "training 756 ms (21%), handing groups over 50 ms (1%), exporting 20 ms (1%), waiting for groups 2.83 s (77%)",
        "2.68 s: engine 78%, environment 22%",
        "generation takes 2.68 s, its training 806 ms, publication 170 ms: side by side 2.68 s at best, of which this run is at 73%",
        "generation is the longer side: more engines (--num-engines)",
        "--async hides at most 806 ms of a step",
    ):
        assert part in text


def test_an_asynchronous_run_hides_nothing_more(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", str(write_run(tmp_path / "ahead", max_staleness=1, num_steps=20)), "--json"]) == 0
    profile = json.loads(capsys.readouterr().out)
    assert profile["notes"] == []
    assert profile["bound"]["generate_s"] == pytest.approx(profile["time"]["engine"]["decoding"] * profile["measured"]["step_s"])
    assert 0.5 < profile["bound"]["reached"] <= 1.0


def test_turns_on_shared_devices_cannot_be_hidden(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", str(write_run(tmp_path / "shared", colocate=True)), "--json"]) == 0
    assert "take turns on the devices" in json.loads(capsys.readouterr().out)["notes"][0]


def test_the_longer_side_is_named() -> None:
    for generate_s, train_s, side in ((1.0, 2.0, "training"), (2.0, 1.0, "generation"), (1.0, 1.2, ""), (1.2, 1.0, "")):
        lines = _bound({"generate_s": generate_s, "train_s": train_s, "publish_s": 0.0, "ideal_s": 2.0, "reached": 1.0})
        assert [text.partition(" ")[0] for _, text in lines[1:]] == ([side] if side else [])


def test_a_run_that_tells_too_little_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", str(write_run(tmp_path / "short", num_steps=2))]) == 2
    assert "at least 3 steady steps" in capsys.readouterr().err
    assert main(["profile", str(tmp_path / "nowhere")]) == 2
    assert "no such directory" in capsys.readouterr().err

"""`agentrl profile` on the files of simulated runs, whose times are known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentrl.algo.plan import AlgoConfig
from agentrl.cli.main import main
from agentrl.cluster.plan import RunConfig
from agentrl.config.mapping import to_json
from agentrl.config.schema import TrainConfig
from agentrl.engine.plan import EngineConfig
from agentrl.flow.plan import FlowConfig, TrainingConfig
from agentrl.profile.simulation import constant, episodes_of, simulate
from agentrl.rollout.plan import SamplingConfig
from tests.unit.profile.recordings import plan, records_of

STEADY = episodes_of(tokens=constant(40), env_s=constant(0.3), turns=2)


def write_run(path: Path, *, records: bool = True, num_steps: int = 12, **engine: int) -> Path:
    run = simulate(plan(episodes=STEADY, num_steps=num_steps), keep_groups=True)
    config = TrainConfig(
        run=RunConfig(agent="envs/calculator.py"),
        training=TrainingConfig(num_steps=num_steps),
        flow=FlowConfig(groups_per_step=8, max_staleness=0),
        sampling=SamplingConfig(n_samples_per_prompt=4),
        engine=EngineConfig(**engine),
        algo=AlgoConfig(),
    )
    path.mkdir()
    (path / "config.json").write_text(to_json(config))
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in run.steps))
    if records:
        (path / "trajectories.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records_of(run)))
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("profile") / "steady")


def test_a_run_of_constant_durations_is_explained_exactly(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", str(run), "--json", "--max-staleness", "1", "--groups-per-step", "4"]) == 0
    profile = json.loads(capsys.readouterr().out)
    decode_s, train_s = 80 * (0.010 + 32 * 0.0005), 0.5 + 0.0001 * 32 * 80
    step_s = decode_s + 0.6 + train_s + 0.05 + 0.17
    assert profile["measured"]["step_s"] == pytest.approx(step_s)
    assert profile["itself"]["step_s"] == pytest.approx(step_s)
    assert profile["error"] == pytest.approx(0.0, abs=1e-6)
    assert profile["bound"]["ideal_s"] == pytest.approx(decode_s + 0.6)
    assert profile["bound"]["reached"] == pytest.approx((decode_s + 0.6) / step_s)
    assert profile["time"]["learner"]["train_s"] == pytest.approx(train_s)
    assert profile["sizes"] == {
        "devices": 2,
        "num_engines": 1,
        "num_learners": 1,
        "groups_per_step": 8,
        "n_samples_per_prompt": 4,
        "oversampled_groups": 0,
        "max_staleness": 0,
    }
    assert [(split["num_engines"], split["num_learners"]) for split in profile["splits"]] == [(1, 1)]
    assert [row["max_staleness"] for row in profile["staleness"]] == [0, 1, 2, 4, 8]
    assert [row["groups_per_step"] for row in profile["groups_per_step"]] == [4, 8, 16]
    assert (profile["asked"]["max_staleness"], profile["asked"]["groups_per_step"]) == (1, 4)
    assert profile["best"]["episodes_per_s"] > profile["itself"]["episodes_per_s"]


def test_people_are_told_the_same(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", str(run), "--devices", "4"]) == 0
    text = capsys.readouterr().out
    for part in (
        "1 engine, 1 learner rank, steps of 8 groups of 4 episodes, synchronous",
        "3.66 s per step, 8.8 episodes/s, over 11 steps",
        "training 756 ms (21%), handing groups over 50 ms (1%), exporting 20 ms (1%), waiting for groups 2.83 s (77%)",
        "2.68 s: engine 78%, environment 22%",
        "in turns 3.66 s, side by side 2.68 s at best, 1.30 times as fast",
        "without taking turns (synchronous)",
        "engines and learner ranks on 4 devices",
        "3 engines, 1 learner rank",
        "training is taken to divide evenly over learner ranks",
        "as it was",
    ):
        assert part in text
    assert "recommended" in text
    rows = [line.split()[0] for line in text.partition("(--oversample)")[2].splitlines()[2:5]]
    assert rows == ["0", "0.25", "0.5"]  # shares, as the flag takes them


def test_a_run_without_recordings_is_profiled_from_its_metrics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", str(write_run(tmp_path / "bare", records=False)), "--json"]) == 0
    profile = json.loads(capsys.readouterr().out)
    assert abs(profile["error"]) < 0.02
    assert "train with --record all" in profile["notes"][0]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--devices", "1"], "--devices = 1: is too few"),
        (["--max-staleness", "-1"], "--max-staleness = -1: is too low"),
        (["--oversample", "-0.5"], "--oversample = -0.5: is too low"),
    ],
)
def test_impossible_sizes_are_refused(run: Path, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", str(run), *flags]) == 2
    assert message in capsys.readouterr().err


def test_a_run_that_tells_too_little_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", str(write_run(tmp_path / "short", num_steps=2))]) == 2
    assert "at least 3 steady steps" in capsys.readouterr().err
    assert main(["profile", str(tmp_path / "nowhere")]) == 2
    assert "no such directory" in capsys.readouterr().err

"""``agentrl replay`` and ``agentrl inspect`` on one real training run that recorded every episode."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl.cli.main import main
from tests.e2e.runs import ENVS, ROOT, SMALL, Run, command, succeeded, train
from tests.e2e.test_demo import demo_command

pytestmark = pytest.mark.timeout(300)

EPISODES = 3 * 4 * 4

Command = Callable[..., tuple[int, str]]


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Run:
    words = ("--runtime", "local", "--record", "all", "--num-steps", "3", "--groups-per-step", "4", "--n-samples-per-prompt", "4")
    more = ("--max-new-tokens", "32", "--no-tensorboard")
    return succeeded(train(tmp_path_factory.mktemp("recorded") / "run", *words, *more, agent="envs/calculator.py"))


@pytest.fixture
def agentrl(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """Runs a command in this process; returns its exit code and what it said."""
    monkeypatch.chdir(ROOT)

    def run(*words: str) -> tuple[int, str]:
        code = main(list(words))
        out, err = capfd.readouterr()
        return code, out + err

    return run


def records(run: Run) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.directory / "trajectories.jsonl").read_text().splitlines()]


def changed(folder: Path, old: str, new: str) -> str:
    """A calculator in which one thing is otherwise."""
    source = (ENVS / "calculator.py").read_text()
    assert source.count(old) == 1
    (folder / "calculator.py").write_text(source.replace(old, new))
    return str(folder / "calculator.py")


def test_every_recorded_episode_replays(recorded: Run) -> None:
    done = subprocess.run(command("replay", str(recorded.directory), "--all"), cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    turns = sum(len(record["turns"]) for record in records(recorded))
    assert done.stdout.startswith(f"100% of the episodes replay: {EPISODES} of {EPISODES}, {turns} turns, in ")
    assert turns > EPISODES


@pytest.mark.slow
def test_a_run_of_two_agents_in_processes_of_their_own_replays(agentrl: Command, tmp_path: Path) -> None:
    words = ("--runtime", "local", "--env-isolation", "process", "--record", "all", "--num-steps", "2", *SMALL, "--no-tensorboard")
    run = succeeded(train(tmp_path / "run", *words, agent="envs/negotiation.py"))
    code, shown = agentrl("replay", str(run.directory), "--all")
    assert code == 0, shown
    assert shown.startswith("100% of the episodes replay: 32 of 32, ")
    assert {record["agent"] for record in records(run)} == {"ann", "bob"}
    agent = tmp_path / "negotiation.py"
    agent.write_text((ENVS / "negotiation.py").read_text().replace("StepResult(NO_DEMAND", "StepResult(NO_DEMAND / 2"))
    code, shown = agentrl("replay", str(run.directory), "--all", "--agent", str(agent))
    assert code == 1, shown


def test_one_episode_and_one_group_replay(recorded: Run, agentrl: Command) -> None:
    code, shown = agentrl("replay", str(recorded.directory), "2-0-1")
    assert (code, shown.count("replays:")) == (0, 1)
    assert shown.startswith("episode 2-0-1  task ")
    code, shown = agentrl("replay", str(recorded.directory), "5")
    assert (code, shown.count("replays:")) == (0, 4)


def test_a_changed_observation_is_found_at_its_turn(recorded: Run, agentrl: Command, tmp_path: Path) -> None:
    agent = changed(tmp_path, "content=str(TOOLS[tool](*args)))", "content=str(TOOLS[tool](*args) + 1))")
    two = next(record for record in records(recorded) if len(record["turns"]) == 2)
    code, shown = agentrl("replay", str(recorded.directory), two["episode_id"], "--agent", agent)
    assert code == 1
    assert "differs at turn 2 of 2: observation" in shown
    assert "first different token: number" in shown
    answer = int(two["turns"][1]["prompt_text"].removeprefix("<|tool|>").partition("<")[0])
    assert f"-<|tool|>{answer}<|end|>" in shown
    assert f"+<|tool|>{answer + 1}<|end|>" in shown


def test_a_changed_reward_and_score_are_found_in_every_episode_they_concern(recorded: Run, agentrl: Command, tmp_path: Path) -> None:
    agent = changed(tmp_path, "0.2 if self.called_right", "0.25 if self.called_right")
    right = [record for record in records(recorded) if record["turns"][0]["reward"] == 0.2]
    assert right
    code, shown = agentrl("replay", str(recorded.directory), "--all", "--agent", agent, "--show", "3")
    assert code == 1
    assert f"{EPISODES - len(right)} of {EPISODES}" in shown
    assert f"{len(right)} differ: the same difference each time" in shown
    assert "0.25" in shown
    agent = changed(tmp_path, "score=float(right and self.called_right)", "score=0.0")
    last = next(record for record in records(recorded) if record["score"] == 1)
    shutil.copy(agent, tmp_path / "other.py")
    code, shown = agentrl("replay", str(recorded.directory), last["episode_id"], "--agent", str(tmp_path / "other.py"))
    assert code == 1
    assert "differs at turn 2 of 2: score" in shown


def test_wrong_requests_for_a_replay(recorded: Run, agentrl: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = str(recorded.directory)
    for words, told in (
        ((run,), "no episode is named"),
        ((run, "99-0-0"), "is not among the recorded episodes"),
        ((str(tmp_path), "--all"), "holds no run"),
        ((str(tmp_path / "none"), "--all"), "there is no such directory"),
        ((run, "--all", "--agent", "nothing.py"), "there is no such file"),
    ):
        code, shown = agentrl("replay", *words)
        assert code == 2
        assert told in shown
    for name in ("config.json", "metrics.jsonl"):
        shutil.copy(recorded.directory / name, tmp_path / name)
    code, shown = agentrl("replay", str(tmp_path), "--all")
    assert code == 2
    assert "--record all" in shown
    monkeypatch.chdir(tmp_path)
    code, shown = agentrl("replay", run, "--all")
    assert code == 0, shown  # in the copy of the environment that the run keeps
    assert f"{EPISODES} of {EPISODES}" in shown


def test_the_run_and_its_episodes_are_shown(recorded: Run, agentrl: Command) -> None:
    done = subprocess.run(command("inspect", str(recorded.directory)), cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "envs/calculator.py with the bundled tiny model" in done.stdout
    assert f"{EPISODES} episodes: {EPISODES} finished" in done.stdout
    assert "12 submitted = 12 trained" in done.stdout
    assert f"20 of {EPISODES} shown" in done.stdout
    best = max(records(recorded), key=lambda record: record["reward"])["reward"]
    code, shown = agentrl("inspect", str(recorded.directory), "--sort", "-reward", "--limit", "1")
    assert code == 0
    assert f"{best:.3f}" in shown
    wanted = [record for record in records(recorded) if record["version"] == 1 and record["reward"] >= 0.2]
    code, shown = agentrl("inspect", str(recorded.directory), "--step", "2", "--min-reward", "0.2", "--limit", "0")
    assert sum(line.split()[:1] == [record["episode_id"]] for line in shown.splitlines() for record in wanted) == len(wanted) > 0


def test_one_episode_is_shown_turn_by_turn(recorded: Run, agentrl: Command) -> None:
    record = next(record for record in records(recorded) if len(record["turns"]) == 2)
    code, shown = agentrl("inspect", str(recorded.directory), record["episode_id"], "--logprobs")
    assert code == 0
    for index, turn in enumerate(record["turns"], start=1):
        assert f"turn {index}  {len(turn['prompt_ids'])} tokens read, {len(turn['token_ids'])} sampled by version" in shown
        assert turn["text"] in shown
        assert turn["prompt_text"] in shown
        assert all(f"{value:.3f}" in shown for value in turn["logprobs"])
    assert shown.count("reward ") == 3


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_an_export_is_loaded_by_datasets(
    recorded: Run, agentrl: Command, tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    path = tmp_path / f"episodes.{suffix}"
    code, shown = agentrl("inspect", str(recorded.directory), "--min-reward", "0.2", "--export", str(path))
    assert code == 0, shown
    wanted = [record for record in records(recorded) if record["reward"] >= 0.2]
    builder = "json" if suffix == "jsonl" else "parquet"
    loaded = datasets.load_dataset(builder, data_files=str(path), split="train", cache_dir=str(tmp_path / "cache"))
    assert len(loaded) == len(wanted) > 0
    for row, record in zip(loaded, wanted, strict=True):
        assert row["episode_id"] == record["episode_id"]
        assert row["reward"] == record["reward"]
        assert row["prompt"][1]["content"] == record["task"]["prompt"][1]["content"]
        assert json.loads(row["label"]) == record["task"]["label"]
        assert [turn["token_ids"] for turn in row["turns"]] == [turn["token_ids"] for turn in record["turns"]]
        assert [turn["logprobs"] for turn in row["turns"]] == [turn["logprobs"] for turn in record["turns"]]
    code, shown = agentrl("inspect", str(recorded.directory), "--export", str(path))
    assert code == 2
    assert "exists already" in shown


@pytest.mark.slow
def test_a_budget_leaves_whole_groups_in_each_step_and_is_kept_on_resumption(tmp_path: Path, agentrl: Command) -> None:
    words = (
        "--runtime",
        "local",
        "--groups-per-step",
        "4",
        "--n-samples-per-prompt",
        "4",
        "--max-new-tokens",
        "16",
        "--record",
        "0.045",
    )
    more = ("--no-tensorboard", "--no-save-model", "--seed", "7", "--save-every", "1")
    run = succeeded(train(tmp_path / "run", *words, *more, "--num-steps", "3", agent="envs/calculator.py"))
    done = subprocess.run(
        command("train", "--resume", str(run.directory), "--num-steps", "4", "--record", "0.06"),
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = records(run)
    sizes = Counter(record["group_id"] for record in found)
    whole = {record["version"] for record in found if sizes[record["group_id"]] == 4}
    assert set(sizes.values()) == {1, 4}
    assert len(sizes) == 16
    assert whole == {0, 1, 2, 3}
    size = (run.directory / "trajectories.jsonl").stat().st_size
    assert run.summary["recorded"] == {"episodes": len(found), "played": 64, "bytes": size}
    assert size <= 1.1 * 0.06 * 2**20  # the single episodes of the last groups come on top
    annotated = {json.loads(line)["trajectory_id"] for line in (run.directory / "annotations.jsonl").read_text().splitlines()}
    assert annotated == {record["trajectory_id"] for record in found}
    assert f"recorded     {len(found)} of 64 episodes" in agentrl("inspect", str(run.directory))[1]


def test_a_killed_run_is_shown_as_far_as_it_went(recorded: Run, agentrl: Command, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(recorded.directory, run, ignore=shutil.ignore_patterns("model", "summary.json"))
    lines = (run / "trajectories.jsonl").read_text().splitlines(keepends=True)
    (run / "trajectories.jsonl").write_text("".join(lines[:10]) + lines[10][:300])
    rows = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text(rows[0] + rows[1][:50])
    code, shown = agentrl("inspect", str(run))
    assert code == 0
    assert "unfinished   1 step in" in shown
    assert "10 of 48 episodes" in shown
    assert "not readable" not in shown
    code, shown = agentrl("replay", str(run), "--all")
    assert code == 0
    assert "10 of 10" in shown
    (run / "trajectories.jsonl").write_text(lines[0] + "garbage\n" + lines[1])
    code, shown = agentrl("inspect", str(run))
    assert "not readable: trajectories.jsonl, line 2" in shown
    (run / "trajectories.jsonl").unlink()
    code, shown = agentrl("inspect", str(run))
    assert code == 0
    assert "--record all" in shown


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_episode_of_the_demo_replays(tmp_path: Path) -> None:
    words = [word for word in demo_command()[1:] if word not in ("--agent", "envs/calculator.py")]
    run = succeeded(train(tmp_path / "run", *words, "--record", "all", agent="envs/calculator.py", timeout_s=600))
    done = subprocess.run(command("replay", str(run.directory), "--all"), cwd=ROOT, capture_output=True, text=True, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("100% of the episodes replay")
    assert len(records(run)) >= 60 * 16 * 8

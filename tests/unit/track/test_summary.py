"""The summary of a run: numbers, file, screen."""

import io
import json
import shutil
import sys

import pytest
from rich.console import Console

from agentrl.track.summary import SummaryBuilder, ends, print_summary, summary_rows, write_summary


@pytest.fixture
def built(tmp_path, metrics):
    builder = SummaryBuilder()
    for step in range(1, 21):
        builder.add(metrics(step, reward=step / 20, **{"staleness/max": 2.0 if step == 7 else 1.0}))
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "trajectories.jsonl").touch()
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / "model").mkdir()
    return builder.build(run_dir=tmp_path, wall_s=60.0)


def test_reward_compares_the_first_five_steps_with_the_last_ten(built):
    assert built["reward"] == pytest.approx({"first": 0.15, "last": 0.775, "gain": 0.625, "best": 1.0})
    assert built["score"]["first"] == pytest.approx(0.075)


def test_totals_and_peaks(built):
    assert (built["steps"], built["episodes"], built["tokens"]) == (20, 320, 40_000)
    assert built["staleness"] == pytest.approx({"mean": 0.8, "max": 2.0})
    assert built["tokens_per_s"] == pytest.approx({"mean": 1010.5, "peak": 1020.0})
    assert built["mismatch_max"] == 3e-6
    assert built["ledger"] == {"submitted": 84, "trained": 80, "filtered": 1, "dropped": 0, "in_flight": 3}


def test_the_parts_of_the_time_add_up(built):
    time = built["time"]
    assert time["outside_loop_s"] + time["loop_s"] == built["wall_s"]
    assert time["train_s"] + time["publish_s"] + time["wait_s"] == pytest.approx(time["loop_s"])
    assert (time["train_s"], time["publish_s"]) == pytest.approx((10.0, 4.0))


def test_final_accounts_replace_those_of_the_last_step(tmp_path, metrics):
    builder = SummaryBuilder()
    builder.add(metrics(1))
    assert builder.build(run_dir=tmp_path, wall_s=1.0, ledger={"ledger/in_flight": 0})["ledger"] == {"in_flight": 0}


def test_only_existing_outputs_are_listed(built, tmp_path):
    assert built["paths"] == {name: str(tmp_path / file) for name, file in FILES.items()}


FILES = {"metrics": "metrics.jsonl", "trajectories": "trajectories.jsonl", "tensorboard": "tensorboard", "model": "model"}


def test_a_run_without_a_step_has_a_summary(tmp_path):
    summary = SummaryBuilder().build(run_dir=tmp_path, wall_s=3.0, status="failed")
    assert (summary["status"], summary["steps"], summary["reward"]["gain"]) == ("failed", 0, None)
    assert [label for label, _ in summary_rows(summary, rewards=[], agent="")] == ["failed", "saved"]


def test_the_file_is_strict_json_and_replaced_whole(built, tmp_path):
    path = tmp_path / "summary.json"
    write_summary({**built, "extra": float("nan")}, path)
    assert json.loads(path.read_text()) == {**built, "extra": None}
    write_summary({"steps": 0}, path)
    assert json.loads(path.read_text()) == {"steps": 0}
    assert not list(tmp_path.glob("*.partial"))


def test_the_screen_names_results_places_and_next_commands(built, tmp_path):
    console = Console(file=io.StringIO(), width=80)
    print_summary(built, console=console, rewards=[0.1, 0.5, 0.9], agent="envs/calculator.py")
    text = console.file.getvalue()
    for part in (
        "20 steps in 1m 00s",
        "0.150 to 0.775 (+0.625)",
        "320, 40k tokens sampled",
        "training 25%, publishing 10%, waiting for episodes 65%",
        "mean 0.80, max 2",
        "84 submitted = 80 trained + 1 filtered + 0 dropped + 3 in flight",
        f"agentrl view {tmp_path}",
        f"tensorboard --logdir {tmp_path}/tensorboard",
        f"agentrl train --agent envs/calculator.py --model {tmp_path}/model",
    ):
        assert part in text
    assert len(text.splitlines()) <= 24
    assert "\x1b" not in text


@pytest.fixture(autouse=True)
def on_path(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")


def test_programs_that_the_shell_does_not_find_are_named_by_their_path(built, tmp_path, monkeypatch):
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "agentrl").touch()
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(sys, "executable", str(tmp_path / ".venv" / "bin" / "python"))
    monkeypatch.chdir(tmp_path)
    commands = [text for _, text in summary_rows(built, rewards=[], agent="env.py")]
    assert commands[-1].startswith(".venv/bin/agentrl train --agent env.py")


def test_a_warning_that_leads_to_the_doctor_is_followed_by_its_command(built, tmp_path):
    warnings = [{"text": "nothing is learned", "remedy": "`agentrl doctor RUN` names the cause"}]
    assert dict(summary_rows({**built, "warnings": warnings}, rewards=[], agent=""))["next"] == f"agentrl doctor {tmp_path}"
    assert dict(summary_rows(built, rewards=[], agent=""))["next"] == f"agentrl view {tmp_path}"


def test_suggested_commands_quote_paths(built):
    built = {**built, "paths": {"model": "runs/my run/model"}}
    assert (
        dict(summary_rows(built, rewards=[], agent="my env.py"))["next"] == "agentrl train --agent 'my env.py' --model 'runs/my run/model'"
    )


def test_the_suggested_training_takes_its_tasks_from_where_the_run_did(built, tmp_path):
    data = {"prompts": "data.jsonl", "label_key": "answer", "shuffle": False, "eval_size": 0, "remote_rm_url": "reward.py"}
    (tmp_path / "config.json").write_text(json.dumps({"data": data, "rollout": {"max_turns": 16, "max_new_tokens": 128, "top_k": 5}}))
    built = {**built, "paths": {"model": "model", "config": str(tmp_path / "config.json")}}
    command = dict(summary_rows(built, rewards=[], agent="reward.py"))["next"]
    assert command == "agentrl train --agent reward.py --prompts data.jsonl --label-key answer --no-shuffle --max-turns 16 --model model"


@pytest.mark.parametrize(("steps", "expected"), [(1, (1, 1)), (2, (1, 1)), (10, (5, 5)), (12, (5, 7)), (40, (5, 10))])
def test_first_and_last_steps_overlap_in_a_single_step_only(steps: int, expected: tuple[int, int]) -> None:
    assert ends(steps) == expected

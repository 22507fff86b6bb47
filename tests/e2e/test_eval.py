"""Evaluation on the real stack, through the command line."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import forked
from tests.e2e.runs import ENVS, SMALL, Run, start, succeeded, train
from tests.e2e.test_demo import demo_command
from tests.e2e.test_resume import kill_in_each_part, weights
from tests.e2e.test_train import untimed

pytestmark = pytest.mark.timeout(900)

LOCAL = ("--runtime", "local", "--eval-size", "6", *SMALL)
EVALUATED = ("--eval-every", "2", "--eval-samples", "2", "--eval-temperature", "0", "--keep-best", "eval/score", "--save-every", "2")

HALF_BROKEN = """
from agentrl import AgentInstance, StepResult, Task


class HalfBroken(AgentInstance):
    @classmethod
    def tasks(cls):
        return [Task(f"{a}+{a}=", id=str(a), metadata={"kind": "odd" if a % 2 else "even"}) for a in range(8)]

    def step(self, state):
        if state.task.id == "3":
            raise OSError("the grader is gone")
        return StepResult(len(state.action_text) / 100, terminated=True, score=float(len(state.action_text) > 1))
"""


def evaluate(*args: str, timeout_s: float = 300) -> tuple[int | None, str]:
    if not {"ray", "--num-engines"} & set(args):
        return forked.run(["eval", *args], {}, timeout_s)
    process = start("eval", *args)
    output, _ = process.communicate(timeout=timeout_s)
    return process.returncode, output


def result_in(directory: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((directory / "eval.json").read_text())
    return data


def training_only(run: Run) -> list[dict[str, Any]]:
    """Metrics without time, without evaluations, and without the engine's counters, which count every prompt."""
    return [{name: value for name, value in row.items() if not name.startswith(("eval/", "engine/"))} for row in untimed(run)]


def best_of(directory: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((directory / "best" / "best.json").read_text())
    return data


@pytest.mark.slow
def test_evaluating_changes_nothing(tmp_path: Path) -> None:
    without = succeeded(train(tmp_path / "without", *LOCAL, "--num-steps", "4"))
    evaluated = succeeded(train(tmp_path / "with", *LOCAL, *EVALUATED, "--eval-at-start", "--num-steps", "4"))
    rows = evaluated.metrics
    assert [(row["step"], "eval/score" in row) for row in rows] == [(0, True), (1, False), (2, True), (3, False), (4, True)]
    assert training_only(evaluated)[1:] == training_only(without)
    assert len(training_only(without)[0]) > 20
    assert weights(evaluated) == weights(without)
    scores = {row["step"]: row["eval/score"] for row in rows if "eval/score" in row}
    assert all(row["eval/pass@1"] == row["eval/pass@2"] for row in rows if "eval/score" in row)  # the same words each time
    best = best_of(tmp_path / "with")
    assert best["value"] == max(scores.values()) == scores[best["step"]]


@pytest.mark.slow
def test_the_same_model_twice_does_not_differ_and_failures_are_told(tmp_path: Path) -> None:
    file, output = tmp_path / "half_broken.py", tmp_path / "out"
    file.write_text(HALF_BROKEN)
    arguments = (
        "--agent",
        str(file),
        "--baseline",
        "start",
        "--n-samples-per-prompt",
        "2",
        "--max-new-tokens",
        "8",
        "--output",
        str(output),
    )
    code, shown = evaluate(*arguments)
    assert code == 3, shown
    result = result_in(output)
    model, baseline = result["model"], result["baseline"]
    assert (model["tasks"], model["episodes"], model["failed_tasks"], model["failed_episodes"]) == (7, 14, ["3"], 2)
    assert list(model["causes"].values()) == [2]
    assert "the grader is gone" in next(iter(model["causes"]))
    assert model["by_task"] == baseline["by_task"]  # the same seeds, the same weights, the same words
    assert set(model["by_kind"]) == {"odd", "even"}
    assert model["by_kind"]["odd"]["reward"]["tasks"] == 3
    difference = result["comparison"]["overall"]["reward"]
    assert (difference["difference"]["value"], difference["better"], difference["worse"]) == (0.0, 0.0, 0.0)
    assert "1 and 1 of 8 tasks failed and are in no figure" in shown
    records = [json.loads(line) for line in (output / "trajectories.jsonl").read_text().splitlines()]
    assert len(records) == 16
    assert all(record["trajectory_id"].startswith("eval-") for record in records)
    rewards = [record["reward"] for record in records if record["status"] == "finished"]
    assert sum(rewards) / len(rewards) == pytest.approx(model["overall"]["reward"]["value"])
    code, shown = forked.run(["replay", str(output), "--all"], {}, 100)
    assert (code, "16 of 16" in shown) == (0, True), shown


HALF_SLOW = HALF_BROKEN.replace('raise OSError("the grader is gone")', "time.sleep(60)").replace("\n", "\nimport time\n", 1)


def wait_for(done: Callable[[], bool], timeout_s: float = 200) -> None:
    deadline = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_evaluation_keeps_what_it_has(tmp_path: Path, number: int) -> None:
    file, output = tmp_path / "half_slow.py", tmp_path / "out"
    file.write_text(HALF_SLOW)
    process = start("eval", "--agent", str(file), "--eval-samples", "2", "--max-new-tokens", "8", "--output", str(output))
    records = output / "trajectories.jsonl"
    wait_for(lambda: records.exists() and records.read_text().count("\n") == 14)
    process.send_signal(number)
    shown, _ = process.communicate(timeout=60)
    assert process.returncode == 130, shown
    assert "interrupted after 7 of 8 tasks" in shown
    assert "Traceback" not in shown
    result = result_in(output)
    assert (result["partial"], result["tasks"], result["model"]["tasks"], "3" in result["model"]["by_task"]) == (True, 8, 7, False)


@pytest.mark.faults
def test_an_evaluation_outlives_its_engine(tmp_path: Path) -> None:
    file, output = tmp_path / "dies.py", tmp_path / "out"
    mark = tmp_path / "died"
    file.write_text(
        HALF_BROKEN.replace(
            'raise OSError("the grader is gone")',
            f"with contextlib.suppress(FileExistsError):\n                os.close(os.open({str(mark)!r}, os.O_CREAT | os.O_EXCL))\n"
            "                os.kill(os.getpid(), signal.SIGKILL)",
        ).replace("\n", "\nimport contextlib\nimport os\nimport signal\n", 1)
    )
    code, shown = evaluate(
        *("--agent", str(file), "--eval-samples", "2", "--max-new-tokens", "8", "--runtime", "ray", "--output", str(output))
    )
    assert code == 0, shown
    assert mark.exists()
    result = result_in(output)
    assert (result["partial"], result["model"]["tasks"], result["model"]["failed_episodes"]) == (False, 8, 0)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_before_and_after_the_demo_training(tmp_path: Path) -> None:
    run, output = tmp_path / "run", tmp_path / "out"
    process = start(*demo_command(), "--run-dir", str(run))
    shown, _ = process.communicate(timeout=400)
    assert process.returncode == 0, shown
    code, shown = evaluate("--run", str(run), "--baseline", "start", "--eval-size", "100", "--output", str(output))
    print(shown)
    assert code == 0, shown
    score = result_in(output)["comparison"]["overall"]["score"]
    assert score["difference"]["low"] > 0.1, score
    assert score["better"] > score["worse"]


@pytest.mark.slow
def test_a_run_and_the_command_measure_the_same(tmp_path: Path) -> None:
    arguments = ("--async", "--num-steps", "6", "--eval-size", "16", "--eval-every", "3", "--eval-at-start", "--keep-best", "eval/reward")
    run = succeeded(train(tmp_path / "run", *arguments, *SMALL, "--learning-rate", "2e-3"))
    code, shown = evaluate("--run", str(run.directory), "--baseline", "start", "--output", str(tmp_path / "out"))
    assert code == 0, shown
    measured = [json.loads(line) for line in (run.directory / "evaluations.jsonl").read_text().splitlines()]
    by_step = {row["step"]: row["overall"] for row in measured}
    result = result_in(tmp_path / "out")
    assert result["model"]["overall"] == by_step[best_of(run.directory)["step"]]
    assert result["baseline"]["overall"] == by_step[0]


@pytest.mark.slow
def test_two_engines_on_ray(tmp_path: Path) -> None:
    arguments = ("--agent", str(ENVS / "arithmetic.py"), "--eval-size", "16", "--eval-samples", "2", "--max-new-tokens", "24")
    results = []
    for name, more in (("one", ()), ("two", ("--num-engines", "2"))):
        code, shown = evaluate(*arguments, *more, "--output", str(tmp_path / name))
        assert code == 0, shown
        results.append(result_in(tmp_path / name)["model"]["by_task"])
    assert results[0] == results[1]


@pytest.mark.faults
def test_the_best_model_survives_kills(tmp_path: Path) -> None:
    arguments = (*LOCAL, *EVALUATED, "--num-steps", "12")
    once = succeeded(train(tmp_path / "once", *arguments))
    kill_in_each_part(tmp_path / "killed", 3, once, *arguments)
    again = succeeded(train(tmp_path / "killed", "--resume", "auto", *arguments))
    assert training_only(again) == training_only(once)
    assert [row.get("eval/score") for row in again.metrics] == [row.get("eval/score") for row in once.metrics]
    assert best_of(tmp_path / "killed") == best_of(tmp_path / "once")
    model = Path("best") / "model.safetensors"
    assert (tmp_path / "killed" / model).read_bytes() == (tmp_path / "once" / model).read_bytes()
    assert not [path.name for path in (tmp_path / "killed").iterdir() if path.name.startswith(".")]
    longer = succeeded(train(tmp_path / "killed", "--resume", str(tmp_path / "killed"), "--num-steps", "14"))
    scores = {row["step"]: row["eval/score"] for row in longer.metrics if "eval/score" in row}
    assert list(scores) == [2, 4, 6, 8, 10, 12, 14]
    best = best_of(tmp_path / "killed")
    assert best["value"] == max(scores.values()) == scores[best["step"]]
    assert all(scores[step] < best["value"] for step in scores if step < best["step"])
    assert [json.loads(line)["step"] for line in (tmp_path / "killed" / "evaluations.jsonl").read_text().splitlines()] == list(scores)


def test_the_help_lists_no_setting_of_training() -> None:
    code, shown = evaluate("--help")
    assert code == 0
    assert "--baseline" in shown
    assert "--learning-rate" not in shown

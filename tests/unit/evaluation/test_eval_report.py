from __future__ import annotations

import io
import json
from pathlib import Path

from rich.console import Console

from agentrl.evaluation.assessment import EpisodeOutcome, TaskOutcome, assess, compare
from agentrl.evaluation.report import EvalProgress, log_evaluation, print_assessment, print_comparison
from tests.unit.conftest import Clock


def outcome(name: str, *rewards: float, kind: str = "", failed: int = 0) -> TaskOutcome:
    episodes = tuple(EpisodeOutcome(reward=r, score=r, tokens=10, turns=2, truncated=False) for r in rewards)
    return TaskOutcome(task_id=name, kind=kind, episodes=episodes, failures=("timeout: step: 60 s",) * failed)


SHOW_CURSOR, CLEAR = "\x1b[?25h", "\r\x1b[1A\x1b[2K"
MODEL = [outcome(str(i), 1.0, kind="easy" if i < 4 else "hard") for i in range(8)]
BASELINE = [outcome(str(i), float(i % 2), kind="easy" if i < 4 else "hard") for i in range(8)]


def text_of(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def plain() -> Console:
    return Console(file=io.StringIO(), width=120)


def test_one_model() -> None:
    console = plain()
    print_assessment(console, assess([*MODEL[:4], outcome("x", 0.0, failed=1), outcome("y", failed=2)]))
    lines = [" ".join(line.split()) for line in text_of(console).splitlines()]
    assert lines[0] == "mean 95% interval tasks"
    assert "reward 0.800 0.400 to 1.000 5" in lines
    assert "easy: reward 1.000 1.000 to 1.000 4" in lines
    assert "other: reward 0.000 one task only 1" in lines
    assert (
        "5 episodes, 10.0 tokens and 2.0 turns each, 0% truncated; 3 more failed and are in no figure, 1 task has none that did not:"
        in lines
    )
    assert "3 x timeout: step: 60 s" in lines


def test_two_models() -> None:
    console = plain()
    print_comparison(console, compare(MODEL, BASELINE[:-1]), assess(MODEL), assess(BASELINE[:-1]))
    lines = [" ".join(line.split()) for line in text_of(console).splitlines()]
    assert lines[0] == "model baseline difference 95% interval tasks better worse"
    assert any(line.startswith("reward 1.000 0.429 +0.571 +") and line.endswith("57% 0%") for line in lines)
    assert any(line.startswith("hard: pass@1 1.000 0.333 +0.667") for line in lines)
    assert "1 task was measured for one of the two only, and left out above" in lines


def test_progress_in_a_pipe_is_a_line_now_and_then(clock: Clock) -> None:
    console = plain()
    progress = EvalProgress(console, clock=clock)
    progress.on_stage("playing")
    for done in range(1, 21):
        clock.now += 1.0
        progress.on_task(done, 20)
    progress.close()
    assert text_of(console).splitlines() == ["[  0.0 s] playing", *(f"[{5.0 * i:5.1f} s] {5 * i} of 20 tasks" for i in (1, 2, 3))]


def test_progress_in_a_terminal_is_a_bar_that_goes_away() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    progress = EvalProgress(console)
    progress.on_task(1, 4)
    assert "/4" in text_of(console)
    assert not text_of(console).endswith(SHOW_CURSOR + CLEAR)
    progress.close()
    progress.close()
    assert text_of(console).endswith(SHOW_CURSOR + CLEAR)


def test_the_line_of_an_evaluation_names_its_step_and_counts_failures(tmp_path: Path) -> None:
    episode = EpisodeOutcome(reward=0.5, score=1.0, tokens=3, turns=1, truncated=False)
    outcomes = [TaskOutcome(task_id="a", episodes=(episode,), failures=("timeout: late", "timeout: late"))]
    log_evaluation(tmp_path / "evaluations.jsonl", 7, assess(outcomes), 2.5, outcomes)
    row = json.loads((tmp_path / "evaluations.jsonl").read_text())
    assert (row["step"], row["seconds"], row["failed_episodes"]) == (7, 2.5, 2)
    assert row["by_task"] == {"a": {"kind": "", "reward": 0.5, "score": 1.0, "episodes": 1, "failures": 2}}

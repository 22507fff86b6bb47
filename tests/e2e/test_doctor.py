"""``agentrl doctor`` names the planted cause of real runs first, and says that a sound run learns."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl.cli.main import main
from tests.e2e.runs import ROOT, succeeded, train

pytestmark = pytest.mark.timeout(300)

PLANTED = "tests/e2e/planted.py"
SHORT = ("--engine", "transformers", "--runtime", "local", "--record", "all", "--no-tensorboard", "--seed", "1")
SIZE = ("--num-steps", "6", "--groups-per-step", "6", "--n-samples-per-prompt", "6", "--max-new-tokens", "8")

Doctor = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Doctor:
    """Trains in a planted environment, then runs the command in this process; returns its exit code and report."""
    monkeypatch.chdir(ROOT)

    def examine(name: str, *words: str) -> tuple[int, dict[str, Any]]:
        agent = f"{PLANTED}:{name}" if name.isidentifier() else name
        succeeded(train(tmp_path / "run", *SHORT, *SIZE, *words, agent=agent))
        capfd.readouterr()
        code = main(["doctor", str(tmp_path / "run"), "--json"])
        return code, json.loads(capfd.readouterr().out)

    return examine


CAUSES = {
    "label-type": ("LabelType",),
    "format-never-met": ("Format",),
    "length-only": ("Length", "--temperature", "1.5"),
    "no-effect": ("FewTasks", "--learning-rate", "1e-10"),
    "policy-broke": ("Sound", "--learning-rate", "0.3"),
    "failed-episodes": ("Failing", "--max-failure-rate", "1"),
}
MORE_CAUSES = {
    "mismatch": ("Sound", "--engine", f"{PLANTED}:DriftingEngine"),
    "answers-cut": ("envs/calculator.py", "--max-new-tokens", "4"),
    "observations-do-not-fit": ("LongObservation", "--max-episode-tokens", "128"),
    "all-masked": ("Sound", "--off-policy-mode", "mask", "--off-policy-range", "1.5", "2"),
    "one-answer-wins": ("OneAnswer",),
    "evaluation-on-training-tasks": ("SameTasks", "--eval-every", "3"),
    "too-hard": ("Impossible",),
    "too-easy": ("Easy",),
}
PLANTS = [*CAUSES.items(), *(pytest.param(*item, marks=pytest.mark.slow) for item in MORE_CAUSES.items())]
REPLAYED = {"label-type": "with the labels as text", "format-never-met": "written as "}


@pytest.mark.parametrize(("cause", "words"), PLANTS)
def test_the_planted_cause_is_named_first(doctor: Doctor, cause: str, words: tuple[str, ...]) -> None:
    code, report = doctor(*words)
    assert [verdict["id"] for verdict in report["verdicts"]][:1] == [cause], report
    assert code == 1
    first = report["verdicts"][0]
    assert first["remedy"]
    assert first["episodes"]
    assert first["share"] or first["estimate"]
    assert first["paid"].startswith(REPLAYED.get(cause, ""))


def test_a_change_that_pays_nothing_withdraws_the_cause(doctor: Doctor, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    _, report = doctor("LabelType", "--num-steps", "3")
    run = str(tmp_path / "run")
    assert main(["doctor", run, "--json", "--no-replay"]) == 1
    unreplayed = json.loads(capfd.readouterr().out)
    assert [verdict["id"] for verdict in unreplayed["verdicts"]] == [verdict["id"] for verdict in report["verdicts"]] == ["label-type"]
    assert (bool(report["verdicts"][0]["paid"]), unreplayed["verdicts"][0]["paid"]) == (True, "")
    assert main(["doctor", run, "--json", "--agent", f"{PLANTED}:Format"]) == 1  # where a plain label is never paid
    refuted = json.loads(capfd.readouterr().out)
    assert "refuted" in refuted["untested"]["label-type"]
    assert [verdict["id"] for verdict in refuted["verdicts"]] != ["label-type"]


DEMO = ("envs/calculator.py", "--async", "--num-steps", "12", "--max-new-tokens", "32")


@pytest.mark.parametrize("words", [("Sound", "--num-steps", "12"), pytest.param(DEMO, marks=pytest.mark.slow)])
def test_a_sound_run_learns(doctor: Doctor, words: tuple[str, ...]) -> None:
    code, report = doctor(*words)
    assert (code, report["outcome"], report["verdicts"]) == (0, "learning", [])
    assert report["rising"]


def test_a_run_of_a_few_episodes_is_not_judged(doctor: Doctor) -> None:
    code, report = doctor("LabelType", "--num-steps", "1", "--groups-per-step", "2", "--n-samples-per-prompt", "2")
    assert (code, report["outcome"], report["verdicts"]) == (3, "too few episodes to say", [])
    assert "label-type" in report["untested"]

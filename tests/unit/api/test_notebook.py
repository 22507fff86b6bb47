"""Runs, evaluations and checks in a notebook: a curve or a table, and a link to the viewer that can be followed."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

import agentrl
from agentrl.api.checking import CheckResult
from agentrl.api.evaluation import Evaluation, Measured
from agentrl.check.findings import Report
from agentrl.evaluation.assessment import EpisodeOutcome, TaskOutcome, assess, compare
from tests.run_files import MadeRun
from tests.unit.track.test_notebook import HOSTILE, Elements


def linked(html: str) -> str:
    found = re.search(r'<a href="([^"]+)" target="_blank">Open in the viewer</a>', html)
    assert found is not None, html
    return found[1]


def made_run(folder: Path) -> agentrl.Run:
    made = MadeRun(folder)
    for step in (1, 2, 3):
        made.step(step, [made.group(step), made.group(step)])
    return agentrl.load_run(folder)


def test_a_run_shows_its_curve_and_leads_to_the_viewer(tmp_path: Path) -> None:
    run = made_run(tmp_path / "<b>run")
    html = run._repr_html_()
    assert {"svg", "table", "a", "code"} <= set(Elements(html).names)
    assert "&lt;b&gt;run" in html
    address = linked(html)
    with urlopen(address, timeout=10) as answer:
        assert b"agentrl" in answer.read()
    with pytest.raises(HTTPError, match="401"):
        urlopen(address.rsplit("/", 2)[0] + "/", timeout=10)
    assert linked(run._repr_html_()) == address, "one page for each run"


def test_a_run_before_its_first_step_shows_its_status(tmp_path: Path) -> None:
    MadeRun(tmp_path / "run")
    html = agentrl.load_run(tmp_path / "run")._repr_html_()
    assert "unfinished" in html
    assert "svg" not in html


def outcomes(reward: float) -> list[TaskOutcome]:
    episode = EpisodeOutcome(reward=reward, score=reward, tokens=3, turns=1, truncated=False)
    return [TaskOutcome(task_id=f"{number}", kind=f"{HOSTILE}{number % 2}", episodes=(episode,)) for number in range(4)]


@pytest.mark.parametrize("compared", [False, True])
def test_an_evaluation_shows_its_figures_with_intervals(tmp_path: Path, compared: bool) -> None:
    made_run(tmp_path / "eval")
    model, baseline = (Measured(model="m", outcomes=outcomes(value), assessment=assess(outcomes(value))) for value in (1.0, 0.25))
    versus = {"baseline": baseline, "comparison": compare(model.outcomes, baseline.outcomes)} if compared else {}
    html = Evaluation(path=tmp_path / "eval", num_tasks=4, model=model, **versus)._repr_html_()
    assert "script" not in Elements(html).names
    assert "95% interval" in html
    assert ("+0.750" in html) is compared
    assert linked(html)


def test_a_check_shows_its_findings_and_rewards() -> None:
    report = Report(env={"name": HOSTILE})
    report.add("reward-constant", HOSTILE, "0 in each of 680 episodes")
    earned = dict.fromkeys(("reward", "reward_min", "reward_max", "score"), 0.0)
    report.policies.append({"policy": "label", "episodes": 8, "failed": 0, "finished": 8, "turns": 1.0, **earned})
    html = CheckResult(report)._repr_html_()
    assert "script" not in Elements(html).names
    assert "1 warning" in html
    assert "0 in each of 680 episodes" in html
    assert "<td" in html

"""The end of a check that could not look at everything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from agentrl.api import checking
from agentrl.check.findings import NO_TIME, Report
from agentrl.check.report import print_report
from agentrl.cli.main import main
from tests.unit.check.support import checked


def last_line(report: Report) -> str:
    console = Console(record=True, width=110, file=None, quiet=False)
    with console.capture() as captured:
        print_report(report, console=console)
    return captured.get().strip().splitlines()[-1]


def policy(episodes: int) -> dict[str, Any]:
    numbers = {"reward": 0.0, "reward_min": 0.0, "reward_max": 0.0, "score": 0.0}
    return {"policy": "empty", "episodes": episodes, "failed": 0, "finished": episodes, "turns": 1.0, **numbers}


def test_a_check_that_ran_out_of_time_is_incomplete(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    report = Report(policies=[policy(2)], skipped=[f"determinism of some policies: {NO_TIME}"])
    assert last_line(report).startswith("incomplete, --budget-s was over: 0 errors")
    monkeypatch.setattr(checking, "run_check", lambda config: checking.CheckResult(report))
    assert main(["check", "env.py"]) == 3
    report.skipped.clear()
    assert main(["check", "env.py"]) == 0
    assert last_line(report).startswith("0 errors")
    report.add("hangs", "env.py", "no answer")
    assert main(["check", "env.py"]) == 1


def test_a_check_without_an_episode_does_not_say_that_there_are_no_errors() -> None:
    line = last_line(Report(policies=[policy(0)]))
    assert line.startswith("no episode was played")
    assert "0 errors" not in line


SLOW_LIST = """
import time
import agentrl

class Listed(agentrl.BlackBoxAgent):
    @classmethod
    def tasks(cls):
        time.sleep(1.5)
        return [agentrl.Task("Say cat.", label="cat")]

    async def run(self, task, llm):
        return 1.0
"""


def test_a_list_of_tasks_that_takes_all_the_time_leaves_the_check_incomplete(tmp_path: Path) -> None:
    (tmp_path / "listed.py").write_text(SLOW_LIST)
    report = checked(str(tmp_path / "listed.py"), budget_s=1.0)
    assert (report.num_episodes, report.out_of_time) == (0, True)
    assert last_line(report).startswith("incomplete, --budget-s was over: no episode was played")

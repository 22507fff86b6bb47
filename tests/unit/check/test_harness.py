"""Sessions of an agent program with a scripted model: what it costs a learner, rewrites and survives."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from agentrl.check.findings import Report
from agentrl.check.harness import NUM_EDITS, changes, check_harness
from agentrl.check.report import print_report
from agentrl.harness import HARNESSES
from tests.harnesses.support import installed, toy
from tests.unit.check.support import context_of, ids, settings_of


def check_toy(monkeypatch: pytest.MonkeyPatch, folder: Path, mode: str = "") -> Report:
    monkeypatch.setitem(HARNESSES, "toy", toy(mode))  # type: ignore[arg-type]
    context = context_of(settings_of(f"harness:toy?program={installed(folder)}", sandbox="none"))
    asyncio.run(check_harness(context))
    return context.report


def test_a_session_that_only_goes_on_is_one_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    report = check_toy(monkeypatch, tmp_path, "rewrites")
    assert ids(report) == set(), [finding.seen for finding in report.findings]
    session = report.harness["session"]
    assert (session["edits"], session["requests"], session["answered"]) == (NUM_EDITS, NUM_EDITS + 3, NUM_EDITS + 3)
    assert (len(session["rows"]), session["wasted"], session["branches"]) == (1, 0, {"system changed": 1})
    assert [helper["why"] for helper in session["helpers"]] == ["asks for a title or a summary"]
    assert session["rewritten"] == {"edit: all added": NUM_EDITS}
    assert session["rows"][0] > session["sampled"] > 0
    screen = io.StringIO()
    print_report(report, console=Console(file=screen))
    for line in ("ten edits", "0 tokens wasted", "edit: all added 10", "(asks for a title or a summary)"):
        assert line in screen.getvalue()


def test_a_context_that_is_full_and_an_engine_that_fails_are_survived(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    report = check_toy(monkeypatch, tmp_path)
    full, failed = report.harness["small context"], report.harness["failing engine"]
    assert (full["complete"], full["refused"] > 0, "compacted" in full["branches"]) == (True, True, True)
    assert (failed["complete"], failed["retries"], failed["error"]) == (True, 1, "")
    assert [row["policy"] for row in report.policies] == ["ten edits", "small context", "failing engine"]


def test_tokens_that_are_read_again_are_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    report = check_toy(monkeypatch, tmp_path, "forgets")
    assert ids(report) == {"wasted-tokens"}
    session = report.harness["session"]
    assert (len(session["rows"]), session["branches"]["edited"], session["edits"]) == (2, 1, NUM_EDITS)
    assert 0 < session["wasted"] < max(session["rows"])


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ({"a": 1}, {"a": 1}, []),
        ({"a": 1.0, "b": " x"}, {"a": 1, "b": "x"}, ["a written anew", "b written anew"]),
        ({"a": 1}, {"b": 1}, ["a dropped", "b added"]),
        ("broken", {}, []),
    ],
)
def test_changes_of_arguments_are_named(old: Any, new: Any, named: list[str]) -> None:
    assert list(changes(old, new)) == named

"""Checks environments of the tests in a process of their own, as the command does."""

from __future__ import annotations

from pathlib import Path

from agentrl.assets import tiny_model_path
from agentrl.check.findings import CheckSettings, Report, Severity
from agentrl.check.rules import RULES
from agentrl.check.supervise import check
from tests.unit.check.forks import forked

BROKEN = Path(__file__).with_name("broken")


def checked(env: str, **settings: object) -> Report:
    """The report of an environment, with the bundled tokenizer."""
    given = {"model": str(tiny_model_path()), "max_model_len": 1024, "episodes": 4, "timeout_s": 30.0, "elsewhere": False, **settings}
    return check(CheckSettings(env=env, **given), forked)  # type: ignore[arg-type]


def ids(report: Report, *severities: Severity) -> set[str]:
    """Ids of the findings of some severities; of errors and warnings, if none is named."""
    wanted = severities or (Severity.ERROR, Severity.WARNING)
    return {finding.id for finding in report.findings if RULES[finding.id].severity in wanted}

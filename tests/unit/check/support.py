"""Checks environments of the tests in a process of their own, as the command does."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from agentrl.assets import tiny_model_path
from agentrl.check.findings import CheckSettings, Report, Severity
from agentrl.check.supervise import check
from agentrl.config.sections import changed
from tests.unit.check.forks import forked

BROKEN = Path(__file__).with_name("broken")


def checked(env: str, **settings: Any) -> Report:
    """The report of an environment, with the bundled tokenizer."""
    return check(settings_of(env, **settings), forked)


def settings_of(env: str, **settings: Any) -> CheckSettings:
    """Settings of a check by the names of their flags."""
    own = {item.name for item in fields(CheckSettings)}
    short = CheckSettings(env=env, model=str(tiny_model_path()), episodes=4, elsewhere=False)
    short = changed(short, max_model_len=1024, **{name: value for name, value in settings.items() if name not in own})
    return replace(short, **{name: value for name, value in settings.items() if name in own})


def ids(report: Report, *severities: Severity) -> set[str]:
    """Ids of the findings of some severities; of errors and warnings, if none is named."""
    wanted = severities or (Severity.ERROR, Severity.WARNING)
    return {finding.id for finding in report.findings if finding.rule.severity in wanted}

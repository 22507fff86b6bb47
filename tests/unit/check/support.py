"""Checks environments of the tests in a process of their own, as the command does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from agentrl.assets import tiny_model_path
from agentrl.check.black_box import check_black_box
from agentrl.check.context import Context
from agentrl.check.findings import CheckSettings, Report, Severity
from agentrl.check.play import make_player
from agentrl.check.probe import Watch
from agentrl.check.results import play_standard
from agentrl.check.supervise import check
from agentrl.check.tasks import read_tasks
from agentrl.check.tokenizer import load_codec
from agentrl.config.sections import changed
from agentrl.env.agent_spec import preload
from agentrl.env.black_box import BlackBoxAgent
from agentrl.env.executor import Executor
from agentrl.env.plan import DataConfig
from agentrl.suites.load import load_agent
from tests.unit.check.forks import forked

BROKEN = Path(__file__).with_name("broken")


def checked(env: str, **settings: Any) -> Report:
    """The report of an environment, with the bundled tokenizer."""
    return check(settings_of(env, **settings), forked)


def context_of(asked: CheckSettings) -> Context:
    """The context of a check in this process, before anything is played."""
    spec, report, watch = load_agent(asked.env), Report(), Watch()
    player = make_player(asked, spec, load_codec(asked), watch)
    return Context(asked, spec, preload(spec), player, report, watch, started=float("inf"))


async def played(env: str, data: DataConfig | None = None, **settings: Any) -> Context:
    """The context of a check in this process, after the standard policies; what calls the model itself is not played."""
    asked = settings_of(env, **settings)
    context = context_of(asked if data is None else replace(asked, data=data))
    read_tasks(context)
    if issubclass(context.cls, BlackBoxAgent):
        await check_black_box(context)
    elif not issubclass(context.cls, Executor):
        await play_standard(context)
    return context


def settings_of(env: str, **settings: Any) -> CheckSettings:
    """Settings of a check by the names of their flags."""
    own = {name: settings.pop(name) for name in ("elsewhere", "ratios", "chooses_model") if name in settings}
    short = CheckSettings(**{"elsewhere": False, **own})
    return changed(short, **{"agent": env, "model": str(tiny_model_path()), "episodes": 4, "max_model_len": 1024, **settings})


def ids(report: Report, *severities: Severity) -> set[str]:
    """Ids of the findings of some severities; of errors and warnings, if none is named."""
    wanted = severities or (Severity.ERROR, Severity.WARNING)
    return {finding.id for finding in report.findings if finding.rule.severity in wanted}

"""One check of an environment, from its settings to a report that says of each finding which rule it breaks."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from agentrl.assets import model_path, tiny_model_path
from agentrl.check.findings import CheckConfig, CheckOptions, CheckSettings, Finding, Report, Rule, Severity, by_severity
from agentrl.check.report import policy_rows, summary_text
from agentrl.check.supervise import GIVEN, check, command
from agentrl.check.tokenizer import FileTokenizer
from agentrl.config.sections import changed, sections_of
from agentrl.core.errors import AgentRLError, ConfigError
from agentrl.core.model_shape import CPU_CONTEXT
from agentrl.core.process import refuse_import
from agentrl.core.types import Task
from agentrl.env.given import PREFIX
from agentrl.rollout.tasks import context_length
from agentrl.suites.load import load_agent
from agentrl.track.html import escaped, table

BEGIN_ANYWAY = "--skip-checks env begins the run all the same."
REHEARSAL_S = 30.0
REHEARSAL = CheckOptions(timeout_s=REHEARSAL_S / 2, budget_s=REHEARSAL_S / 2)


@dataclass(frozen=True, slots=True)
class CheckFinding:
    """A finding (where a rule is broken, what was seen, how often) with its rule (severity, title, why it matters, remedy, code)."""

    finding: Finding
    rule: Rule

    def __str__(self) -> str:
        """Return the finding in one line."""
        return f"{self.rule.severity} {self.rule.id}: {self.finding.where}: {self.finding.seen}"

    def to_dict(self, *, fix_hints: bool = False) -> dict[str, Any]:
        """Return the finding in JSON's own types."""
        seen, known = asdict(self.finding), asdict(self.rule)
        names = ("id", "severity", "title", "where", "seen", "count", "why", "remedy", *(("snippet",) if fix_hints else ()))
        return {name: str(known[name]) if name in known else seen[name] for name in names}


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The outcome of a check.

    Attributes:
        report: Everything that was seen: rewards by policy, times of calls, speed, lengths of prompts, checks that were not made.
        findings: The rules that are broken, errors first.
    """

    report: Report
    findings: tuple[CheckFinding, ...] = field(init=False)

    def __post_init__(self) -> None:
        """Look the rules up."""
        found = tuple(CheckFinding(finding, finding.rule) for finding in by_severity(self.report.findings))
        object.__setattr__(self, "findings", found)

    @property
    def errors(self) -> list[CheckFinding]:
        """Findings with which training would fail, or learn from wrong data."""
        return self._of(Severity.ERROR)

    @property
    def warnings(self) -> list[CheckFinding]:
        """Findings with which training works, but probably not as meant."""
        return self._of(Severity.WARNING)

    @property
    def notes(self) -> list[CheckFinding]:
        """Findings that are good to know."""
        return self._of(Severity.NOTE)

    @property
    def ok(self) -> bool:
        """True if there is no error."""
        return not self.errors

    def to_dict(self, *, fix_hints: bool = False) -> dict[str, Any]:
        """Return the whole result in JSON's own types, as ``agentrl check --json`` prints it."""
        counts = {str(severity): len(self._of(severity)) for severity in Severity}
        findings = [finding.to_dict(fix_hints=fix_hints) for finding in self.findings]
        return {"ok": self.ok, "counts": counts, **self.report.to_dict(), "findings": findings}

    def __repr__(self) -> str:
        """Return the environment, and its errors and warnings."""
        listed = "".join(f"\n  {finding}" for finding in (*self.errors, *self.warnings))
        return f"<CheckResult {self.report.env.get('name', '')}: {len(self.errors)} errors, {len(self.warnings)} warnings>{listed}"

    def _repr_html_(self) -> str:
        """Return what was found, and the rewards by policy, for notebooks."""
        title = f"<b>Check of {escaped(self.report.env.get('name', ''))}</b>: {summary_text(self.report)}"
        headings = ("finding", "of the environment", "remedy")
        found = [
            (f"{item.rule.severity} {item.rule.id}", f"{item.finding.where}: {item.finding.seen}", item.rule.remedy)
            for item in self.findings
        ]
        parts = [table(headings, found)] if found else []
        return f"<div>{title}{''.join(parts)}{table(*policy_rows(self.report))}</div>"

    def _of(self, severity: Severity) -> list[CheckFinding]:
        return [finding for finding in self.findings if finding.rule.severity is severity]


def run_check(config: CheckConfig) -> CheckResult:
    """Check an environment in a process of its own.

    Raises:
        ConfigError: If the request itself is wrong, the environment cannot be sent to the process, or this is an import of the script.
    """
    refuse_import()
    settings = CheckSettings(**{name: getattr(config, name) for name in sections_of(CheckConfig)})
    return CheckResult(_in_process(_with_model(settings)))


def _in_process(settings: CheckSettings, task: Task | None = None, on_start: Callable[[int], object] = bool) -> Report:
    words = (sys.executable, "-m", "agentrl.check.run")
    if not settings.env.startswith(PREFIX):
        return check(settings, command(*words, on_start=on_start), task)
    with tempfile.NamedTemporaryFile(prefix="agentrl-check-") as file:
        file.write(pickle.dumps(load_agent(settings.env)))
        file.flush()
        # The classes of the object are imported there from where this process found them.
        more = {GIVEN: file.name, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        return check(settings, command(*words, on_start=on_start, **more), task)


async def rehearse(settings: CheckSettings, task: Task) -> str:
    """Play one scripted episode as a run is about to, in a process of its own; return a warning, or "".

    The process has `REHEARSAL_S` seconds, after which the run goes on: the environment may only be slow to begin with.

    Raises:
        ConfigError: If the environment cannot be loaded, or does something for which every episode of the run would fail.
    """
    given = settings.model.model
    known = not given or FileTokenizer.can_read(Path(given))  # else another template, which may refuse more
    settings = changed(settings, model=given if given and known else str(tiny_model_path()))
    processes: list[int] = []
    try:
        result = CheckResult(await asyncio.to_thread(_in_process, settings, task, processes.append))
    except asyncio.CancelledError:
        # A thread cannot be cancelled, but this one returns when its process ends.
        for process in processes:
            with contextlib.suppress(OSError):
                os.kill(process, signal.SIGTERM)  # its guardian kills it with all that it started
        raise
    except (AgentRLError, RuntimeError, OSError) as error:
        if isinstance(error, ConfigError) and error.field == "--agent":  # each worker would fail in the same way
            raise ConfigError(error.field, error.value, error.problem, f"{error.remedy} {BEGIN_ANYWAY}") from error
        return f"no scripted episode could be played before the run: {error}"
    # These may not hold in the run, whose deadlines are longer and whose template may be another one.
    unclear = ("hangs", "timeout", "leaks-memory", *(() if known else ("template-refuses",)))
    if wrong := next((found for found in result.errors if found.rule.id not in unclear), None):
        remedy = f"{wrong.rule.remedy} `agentrl check` looks further; {BEGIN_ANYWAY}"
        raise ConfigError("--agent", settings.run.agent, f"{wrong.rule.title}: {wrong.finding.where}: {wrong.finding.seen}", remedy)
    late = [f"{found.finding.where}: {found.finding.seen}" for found in result.errors if found.rule.id in ("hangs", "timeout")]
    if failed := [*late, *result.report.skipped]:
        return f"the scripted episode before the run failed: {failed[0]}"
    leaks = (found for found in result.errors if found.rule.id == "leaks-memory")
    return next((f"{found.rule.title}: {found.finding.where}: {found.finding.seen}" for found in leaks), "")


def _with_model(settings: CheckSettings) -> CheckSettings:
    """Return the settings with the bundled model if none is named, and with its context length if none is given."""
    model = model_path(settings.model.model)
    if Path(model).exists() and not Path(model).is_dir():
        raise ConfigError("--model", model, "is a file", "Give the directory of a model.")
    length = settings.engine.max_model_len or min(context_length(model) or CPU_CONTEXT, CPU_CONTEXT)
    return replace(changed(settings, model=model, max_model_len=length), chooses_model=not settings.model.model)

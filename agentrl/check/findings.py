"""The request of a check and its answer: settings, findings that each name a rule, and the report that they add up to."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from agentrl.assets import tiny_model_path
from agentrl.config.load import Command
from agentrl.config.schema import PlaySettings
from agentrl.core.settings import Count, CountOrZero, Positive
from agentrl.rollout.plan import SamplingConfig


class Severity(StrEnum):
    """Severity of a finding."""

    ERROR = "error"
    """Training on it would fail, or learn from wrong data."""
    WARNING = "warning"
    """Training works, but probably not as meant."""
    NOTE = "note"
    """Good to know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One thing that can be wrong; `id` is its stable name, in words with hyphens."""

    id: str
    severity: Severity
    title: str  # the defect, as a clause
    why: str  # the harm that it does to training
    remedy: str
    snippet: str = ""  # code of the remedy, for ``--fix-hints``


def read_rules(path: Path) -> Mapping[str, Rule]:
    """Return the rules of a TOML file by their names, in its order."""
    tables = tomllib.loads(path.read_text(encoding="utf-8"))
    return {name: Rule(id=name, **{**fields, "severity": Severity(fields["severity"])}) for name, fields in tables.items()}


RULES = read_rules(Path(__file__).with_name("rules.toml"))


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """The extent of a check, and its report."""

    concurrency: Count = 128
    """Episodes that one worker is to run at once."""
    turn_s: Positive = 1.0
    """Seconds that the model is assumed to take for a turn."""
    episodes: Count = 8
    """Episodes per policy."""
    recorded: str = ""
    """Directory of a run, or its ``trajectories.jsonl``, whose answers are given as well."""
    timeout_s: Positive = 30.0
    """Deadline of one call of the environment."""
    budget_s: Positive = 120.0
    """Seconds for the whole check."""
    memory_mib: CountOrZero = 0
    """Memory that the environment may take in the process of the check, MiB; on Linux. 0: half of what is free."""
    json: bool = False
    """Write the report as JSON."""
    fix_hints: bool = False
    """Show a piece of code with each remedy."""


@dataclass(frozen=True, kw_only=True)
class CheckConfig(PlaySettings):
    """Sections of ``agentrl check``; ``--model`` names the tokenizer and the chat template, its weights are not read."""

    check: CheckOptions = field(default_factory=CheckOptions)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)


@dataclass(frozen=True, kw_only=True)
class CheckSettings(CheckConfig):
    """Settings of one check, and what the run that it precedes says of itself.

    Attributes:
        elsewhere: True to compare tasks and episodes with those of a second process.
        ratios: True if the run computes importance ratios.
        chooses_model: True if nobody named a model, so that pictures choose the bundled one that reads them.
    """

    elsewhere: bool = True
    ratios: bool = True
    chooses_model: bool = False

    @property
    def env(self) -> str:
        """The environment."""
        return self.run.agent

    @property
    def bundled_model(self) -> bool:
        """True for the bundled tokenizer, which shows little about the user's own."""
        return self.model.model == str(tiny_model_path())


NO_TIME = "no time left"
"""End of the reason for a check that was not made because ``--budget-s`` was over."""
CHECK = Command(
    "check",
    CheckConfig,
    "Play an environment without a model and report what is wrong with it. Exit code: 0 no errors, 1 errors, 2 bad request, 3 no "
    "errors in the time that there was.",
    main=(
        *("agent", "prompts", "model", "episodes", "concurrency", "turn_s", "recorded", "timeout_s", "budget_s", "seed", "json"),
        "fix_hints",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A rule that an environment breaks."""

    id: str
    where: str  # file, class and method
    seen: str  # the observation, with its value
    count: int = 1

    @property
    def rule(self) -> Rule:
        """The rule that is broken."""
        return RULES[self.id]


def by_severity(findings: Iterable[Finding]) -> list[Finding]:
    """Errors first, then warnings, then notes; each in the order in which they were found."""
    return sorted(findings, key=lambda finding: tuple(Severity).index(finding.rule.severity))


@dataclass(slots=True, kw_only=True)
class Report:
    """Everything that one check found; every field is of JSON's own types.

    Attributes:
        env: The environment: ``spec``, ``name``, ``source``, ``tasks`` (how many, `None`: no end of them was seen).
        findings: One per rule that is broken.
        policies: Per policy: episodes, failures, ends, mean turns, mean reward, lowest and highest reward, mean score;
            with several agents the rewards and the score of each under ``agents``, and above them the mean over the agents.
        timing: Per method: how it runs, calls, and the p50, the p99 and the first call in seconds.
        speed: Consequences of the times for the concurrency that was asked for.
        requests: Requests of a black-box agent: how many, refused, abandoned and streamed; tools; tokens of the prompts; branches and
            untrained answers by reason; and the first episode's requests in a line each.
        harness: An agent program (``harness:NAME``): version, dialect, and what its sessions cost, refused and rewrote.
        prompts: Tokens of the first prompts, lowest, median and highest, and the context length.
        constant: The best constant answer: text, mean score, tasks.
        skipped: Checks that were not made, with the reason.
        seconds: Duration of the check.
    """

    env: dict[str, Any] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    policies: list[dict[str, Any]] = field(default_factory=list)
    timing: list[dict[str, Any]] = field(default_factory=list)
    speed: dict[str, Any] = field(default_factory=dict)
    requests: dict[str, Any] = field(default_factory=dict)
    harness: dict[str, Any] = field(default_factory=dict)
    prompts: dict[str, Any] = field(default_factory=dict)
    constant: dict[str, Any] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def num_episodes(self) -> int:
        """Episodes that were played."""
        return sum(int(row["episodes"]) for row in self.policies)

    @property
    def out_of_time(self) -> bool:
        """True if ``--budget-s`` ended before all checks were made."""
        return any(NO_TIME in reason for reason in self.skipped)

    def add(self, rule: str, where: str, seen: str) -> None:
        """Note a finding; a rule that is broken again is only counted."""
        for index, finding in enumerate(self.findings):
            if finding.id == rule:
                self.findings[index] = Finding(id=rule, where=finding.where, seen=finding.seen, count=finding.count + 1)
                return
        self.findings.append(Finding(id=rule, where=where, seen=seen))

    def has(self, *rules: str) -> bool:
        """Return True if any of these rules is broken."""
        return any(finding.id in rules for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Return the report in JSON's own types."""
        return asdict(self)

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> Report:
        """The inverse of `to_dict`."""
        return cls(**{**value, "findings": [Finding(**finding) for finding in value["findings"]]})

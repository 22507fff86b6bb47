"""Findings about a machine, each with a verdict and a remedy, and the report that they add up to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from agentrl.resolve.sizing.rates import Rates


class Level(StrEnum):
    """Verdict on one thing."""

    GOOD = "good"
    """As it should be."""
    WARNING = "warning"
    """Runs work, but slowly or not all of them."""
    WRONG = "wrong"
    """Runs fail, or compute something else."""
    UNTRIED = "not tried"
    """Not possible or not needed here, or no time was left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at or tried."""

    part: str  # limits, packages, devices, rates, kernels, bytes, learner or engine
    name: str
    level: Level = Level.GOOD
    found: str = ""  # in a few words, with figures
    remedy: str = ""  # of what is not good

    def __post_init__(self) -> None:
        """Refuse a bad verdict without a remedy."""
        if self.level in (Level.WARNING, Level.WRONG) and not self.remedy:
            raise ValueError(f"{self.part}, {self.name}: a finding that is {self.level} needs a remedy")


def judged(part: str, name: str, found: str, *, wrong: bool = False, warning: bool = False, remedy: str) -> Finding:
    """Return a finding that is wrong, a warning, or good and then without the remedy."""
    level = Level.WRONG if wrong else Level.WARNING if warning else Level.GOOD
    return Finding(part=part, name=name, level=level, found=found, remedy=remedy if level != Level.GOOD else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineReport:
    """Everything that was found on one machine."""

    host: str
    device: str  # name of the device that was measured
    findings: tuple[Finding, ...]
    seconds: float = 0.0
    rates: Rates = field(default_factory=Rates)

    def of(self, level: Level) -> Sequence[Finding]:
        """Return the findings with a verdict."""
        return [finding for finding in self.findings if finding.level is level]

    @property
    def verdict(self) -> Level:
        """Return the worst verdict."""
        return next((level for level in (Level.WRONG, Level.WARNING) if self.of(level)), Level.GOOD)

    @property
    def exit_code(self) -> int:
        """1 if something is wrong, else 0."""
        return int(self.verdict is Level.WRONG)

    def to_dict(self) -> dict[str, Any]:
        """Return the report in JSON's own types."""
        return {**asdict(self), "verdict": str(self.verdict), "findings": [asdict(each) for each in self.findings]}

"""Verdicts on a run, each with the episodes that prove it, and the report that they add up to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from agentrl.check.findings import Rule, read_rules
from agentrl.core.exit_codes import INCOMPLETE
from agentrl.evaluation.statistics import Estimate, Share

CAUSES = read_rules(Path(__file__).with_name("causes.toml"))
"""Causes by their names, the root causes first."""
MISSING = ("labels-missing", "answers-empty")
UNPAID = ("policy-broke", "label-type", "observations-do-not-fit", "answers-cut", "turns-cut")
FOLLOW: Mapping[str, tuple[str, ...]] = {
    "policy-broke": ("answers-empty",),
    "answers-cut": ("policy-broke",),
    "format-never-met": (*MISSING, *UNPAID, "right-earns-less"),
    "one-answer-wins": ("length-only", "right-earns-less"),
    "length-only": ("right-earns-less",),
    "repetition-wins": ("length-only",),
    "too-hard": (*MISSING, *UNPAID, "format-never-met"),
    "no-effect": ("all-masked",),
}
"""Causes that may be consequences, each with those that explain it."""
MAX_SHOWN = 5
"""Episodes, or steps, that a verdict names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A cause that the records prove.

    Attributes:
        id: Name of the cause.
        seen: The observation, with its values.
        share: Share of the cases in which it was seen, with its interval; `None` if the observation is a mean.
        estimate: A mean or a difference of means with its interval; `None` if the observation is a share.
        episodes: Names of episodes that prove it.
        steps: Steps that prove it.
        where: File and line, or the setting; empty if it is not known.
        remedy: A remedy with the run's own values, in place of that of the cause.
        paid: Result of a replay with the change.
    """

    id: str
    seen: str
    share: Share | None = None
    estimate: Estimate | None = None
    episodes: tuple[str, ...] = ()
    steps: tuple[int, ...] = ()
    where: str = ""
    remedy: str = ""
    paid: str = ""

    @property
    def rule(self) -> Rule:
        """The cause: title, harm and remedy."""
        return CAUSES[self.id]

    @property
    def change(self) -> str:
        """The change to make."""
        return self.remedy or self.rule.remedy

    def to_dict(self) -> dict[str, Any]:
        """Return the verdict in JSON's own types, with the words of its cause."""
        rule = {"severity": str(self.rule.severity), "title": self.rule.title, "why": self.rule.why}
        return {**asdict(self), **rule, "remedy": self.change}


@dataclass(frozen=True, slots=True)
class Untested:
    """A hypothesis that could not be tested, with the reason."""

    reason: str


@dataclass(frozen=True, slots=True)
class Advice:
    """A setting with which a run would learn more, though nothing is wrong with it: its name, the observation, and the change."""

    id: str
    seen: str
    remedy: str


class Outcome(StrEnum):
    """Result of an examination."""

    LEARNING = "learning"
    """The reward rises, and no cause was found."""
    CAUSES = "causes found"
    """At least one cause is proven."""
    UNDECIDED = "too few episodes to say"
    """Neither: the records do not suffice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """The report on one run.

    Attributes:
        run: Directory of the run, as the user named it.
        steps: Steps with a reward.
        groups: Groups with a reward.
        episodes: Recorded episodes that were read.
        trend: Difference of the mean rewards of the last and the first third of the groups; `None` with too few groups.
        first: Mean reward of the groups of the first third.
        last: Mean reward of the groups of the last third.
        proven: Proven causes, also those that others explain, the root cause first.
        untested: Hypotheses that could not be tested, with the reason.
        advice: What would teach the run more, where no cause was found.
    """

    run: str
    steps: int
    groups: int
    episodes: int
    trend: Estimate | None = None
    first: float = 0.0
    last: float = 0.0
    proven: tuple[Verdict, ...] = ()
    untested: Mapping[str, str] = field(default_factory=dict)
    advice: tuple[Advice, ...] = ()

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """Proven causes that no other one explains."""
        names = {verdict.id for verdict in self.proven}
        return tuple(verdict for verdict in self.proven if names.isdisjoint(FOLLOW.get(verdict.id, ())))

    @property
    def rising(self) -> bool:
        """True if the reward rises by more than chance."""
        return self.trend is not None and self.trend.low is not None and self.trend.low > 0.0

    @property
    def outcome(self) -> Outcome:
        """The result in one word or a few."""
        if self.verdicts:
            return Outcome.CAUSES
        return Outcome.LEARNING if self.rising else Outcome.UNDECIDED

    @property
    def exit_code(self) -> int:
        """Exit code of the command."""
        return {Outcome.LEARNING: 0, Outcome.CAUSES: 1, Outcome.UNDECIDED: INCOMPLETE}[self.outcome]

    def concluded(self, proven: Iterable[Verdict], untested: Mapping[str, str]) -> Examination:
        """Return the report with these proven causes, and these hypotheses as untested."""
        return replace(self, proven=tuple(proven), untested=dict(untested))

    def to_dict(self) -> dict[str, Any]:
        """Return the report in JSON's own types."""
        own = {name: value for name, value in asdict(self).items() if name != "proven"}
        verdicts = [verdict.to_dict() for verdict in self.verdicts]
        return {**own, "outcome": str(self.outcome), "rising": self.rising, "verdicts": verdicts}

"""The request of a check and its answer: settings, rules, the findings that name one, and the report that they add up to."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckSettings:
    """Settings of one check.

    Attributes:
        env: What ``--agent`` would be.
        prompts: Data set with the tasks; empty: the environment's own.
        prompt_split: Split of a data set from a hub.
        input_key: Column that holds the prompt.
        label_key: Column that holds the label.
        model: Directory or hub name whose tokenizer is used.
        model_given: Whether the user chose it; otherwise it is the bundled one, and says little about the user's own.
        max_model_len: Context length in tokens.
        max_new_tokens: Tokens of a turn.
        max_turns: Turns of an episode.
        concurrency: Episodes that a worker is to run at once.
        env_threads: Threads for plain ``def`` methods.
        turn_s: Seconds that a model is assumed to take for one turn.
        episodes: Episodes per policy.
        recorded: ``trajectories.jsonl``, or the directory of the run that holds it; empty: none.
        timeout_s: Deadline of one call of user code.
        budget_s: Seconds for all of it.
        elsewhere: Whether tasks and episodes are compared with those of a second process.
        seed: Decides tasks, seeds and the answers of the random policies.
    """

    env: str
    prompts: str = ""
    prompt_split: str = "train"
    input_key: str = "prompt"
    label_key: str = "label"
    model: str = ""
    model_given: bool = False
    max_model_len: int = 0
    max_new_tokens: int = 128
    max_turns: int = 8
    concurrency: int = 128
    env_threads: int = 32
    turn_s: float = 1.0
    episodes: int = 8
    recorded: str = ""
    timeout_s: float = 30.0
    budget_s: float = 120.0
    elsewhere: bool = True
    seed: int = 0


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
    """One thing that can be wrong.

    Attributes:
        id: Stable name, in words with hyphens.
        severity: Of every finding of this rule.
        title: What is wrong, as a clause.
        why: What it does to training.
        remedy: What to do about it.
        snippet: Code that does it, for ``--fix-hints``.
    """

    id: str
    severity: Severity
    title: str
    why: str
    remedy: str
    snippet: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A rule that an environment breaks.

    Attributes:
        id: Of the rule.
        where: File, class and method.
        seen: What was seen, with the value.
        count: How often.
    """

    id: str
    where: str
    seen: str
    count: int = 1


@dataclass(slots=True, kw_only=True)
class Report:
    """Everything that one check found; every field is of JSON's own types.

    Attributes:
        env: What was checked: ``spec``, ``name``, ``source``, ``tasks`` (how many, `None`: no end of them was seen).
        findings: One per rule that is broken.
        policies: Per policy: episodes, failures, ends, mean turns, mean reward, lowest and highest reward, mean score.
        timing: Per method: how it runs, calls, and the p50, the p99 and the first call in seconds.
        speed: What the times mean for the concurrency that was asked for.
        prompts: Tokens of the first prompts, lowest, median and highest, and the context length.
        constant: The best constant answer: text, mean score, tasks.
        skipped: Checks that were not made, with the reason.
        seconds: How long it took.
    """

    env: dict[str, Any] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    policies: list[dict[str, Any]] = field(default_factory=list)
    timing: list[dict[str, Any]] = field(default_factory=list)
    speed: dict[str, Any] = field(default_factory=dict)
    prompts: dict[str, Any] = field(default_factory=dict)
    constant: dict[str, Any] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    seconds: float = 0.0

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
        """All of it, as JSON wants it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> Report:
        """The inverse of `to_dict`."""
        return cls(**{**value, "findings": [Finding(**finding) for finding in value["findings"]]})

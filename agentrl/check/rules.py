"""Everything that a check can find, in one table."""

from __future__ import annotations

from collections.abc import Mapping

from agentrl.check import determinism, effects, elsewhere, learning, resources, results, speed, supervise, tasks, text
from agentrl.check.findings import Finding, Rule, Severity

RULES: Mapping[str, Rule] = {
    rule.id: rule
    for module in (tasks, results, determinism, elsewhere, resources, speed, text, learning, effects, supervise)
    for rule in module.RULES
}
"""Rules by id, in the order in which they are looked for."""

ORDER = tuple(Severity)


def rule(finding: Finding) -> Rule:
    """The rule that a finding names."""
    return RULES[finding.id]


def by_severity(findings: list[Finding]) -> list[Finding]:
    """Errors first, then warnings, then notes; each in the order in which they were found."""
    return sorted(findings, key=lambda finding: ORDER.index(rule(finding).severity))


def count(findings: list[Finding], severity: Severity) -> int:
    """Number of findings of one severity."""
    return sum(rule(finding).severity is severity for finding in findings)

"""The findings about machines, for people."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.doctor.machine.findings import Finding, Level, MachineReport
from agentrl.track.text import Screen, counted, duration

COLOURS = {Level.GOOD: "green", Level.WARNING: "yellow", Level.WRONG: "bold red", Level.UNTRIED: "dim"}
COLUMNS = ("part", "what", "verdict", "found")


def print_machine(screen: Screen, report: MachineReport) -> None:
    """Print the table of findings, and what to do about those that are not good."""
    screen.line(f"{report.host}: {report.device}, {counted(len(report.findings), 'finding')} in {duration(report.seconds)}")
    screen.table(COLUMNS, [_row(finding) for finding in report.findings])
    screen.line((conclusion(report), COLOURS[report.verdict]), prose=True)
    for finding in (*report.of(Level.WRONG), *report.of(Level.WARNING)):
        screen.line((f"{finding.level} ", COLOURS[finding.level]), f"{finding.part}, {finding.name}: {finding.found}", prose=True)
        screen.line(("fix  ", "dim"), finding.remedy, indent=3, prose=True)


def _row(finding: Finding) -> Sequence[str | tuple[str, str]]:
    return finding.part, finding.name, (str(finding.level), COLOURS[finding.level]), finding.found


def conclusion(report: MachineReport) -> str:
    """Return the verdict on the whole in a sentence."""
    wrong, warnings = len(report.of(Level.WRONG)), len(report.of(Level.WARNING))
    untried = len(report.of(Level.UNTRIED))
    said = [f"{wrong} wrong"] * bool(wrong) + [counted(warnings, "warning")] * bool(warnings)
    left = f"; {untried} not tried" if untried else ""
    return (", ".join(said) if said else "nothing is wrong") + left

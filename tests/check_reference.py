"""Writes the table of findings into ``docs/check.md``: ``python -m tests.check_reference``."""

from __future__ import annotations

from pathlib import Path

from agentrl.check.findings import RULES, Severity

DOCS = Path(__file__).parents[1] / "docs" / "check.md"
BEGIN, END = "<!-- findings: begin -->", "<!-- findings: end -->"


def findings_table() -> str:
    """All rules, errors first, as Markdown."""
    lines = []
    for severity in Severity:
        lines += ["", f"### {str(severity).capitalize()}s", "", "| id | what | why | remedy |", "|---|---|---|---|"]
        for rule in RULES.values():
            if rule.severity is severity:
                cells = (f"`{rule.id}`", rule.title, rule.why, rule.remedy)
                lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join([*lines, ""])


def with_table(page: str) -> str:
    """The page with the table between its marks renewed."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{findings_table()}\n{END}{after}"


if __name__ == "__main__":
    DOCS.write_text(with_table(DOCS.read_text(encoding="utf-8")), encoding="utf-8")

"""Writes docs/harnesses.md: what each program of `agentrl.harness` costs a learner, by version and dialect.

``make test-clients`` plays the programs (tests/clients/test_harnesses.py), and then runs ``python -m tests.harness_matrix``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.harness import DIALECTS, HARNESSES, Harness

ROOT = Path(__file__).parents[1]
CLIENTS = Path(os.environ.get("AGENTRL_CLIENTS", ROOT / ".venv-clients")).absolute()
PAGE, RESULTS = ROOT / "docs" / "harnesses.md", ROOT / "build" / "harnesses.json"
BEGIN, END = "<!-- programs: begin -->", "<!-- programs: end -->"
COLUMNS = (
    *("program", "version", "API", "first prompt", "brief", "requests", "rows", "tokens of the rows", "wasted", "helpers"),
    *("small context", "failing engine"),
)


def places() -> list[tuple[str, str]]:
    """Every program with each of its dialects."""
    return [(name, dialect) for name, harness in HARNESSES.items() for dialect in harness.dialects]


def program_of(harness: Harness) -> Path:
    """The executable of a program that ``make test-clients`` installs."""
    if harness.installer == "npm":
        return CLIENTS / "node_modules" / ".bin" / harness.program
    own = CLIENTS / harness.package / "bin" / harness.program
    return own if own.exists() else CLIENTS / "bin" / harness.program


def results() -> dict[str, Any]:
    """What was measured, by name and dialect."""
    return json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}


def keep(name: str, dialect: str, harness: Mapping[str, Any], brief: int) -> None:
    """Keep a measurement for the page; `brief` is the size of the first prompt of a brief start."""
    RESULTS.parent.mkdir(exist_ok=True)
    kept = results() | {f"{name} {dialect}": {**harness, "first_brief": brief}}
    RESULTS.write_text(json.dumps(dict(sorted(kept.items())), indent=1) + "\n")


def row(measured: Mapping[str, Any]) -> str:
    """A line of the table."""
    session, full, failed = measured["session"], measured.get("small context"), measured["failing engine"]
    brief = measured["first_brief"]
    cells = (
        *(measured["title"], measured["version"], DIALECTS[measured["dialect"]]),
        *(f"{session['first_prompt']:,}", f"{brief:,}" if brief else "not measured", session["requests"], len(session["rows"])),
        *(f"{sum(session['rows']):,}", f"{session['wasted']:,}", len(session["helpers"]), _end(full), _end(failed)),
    )
    return f"| {' | '.join(map(str, cells))} |"


def _end(session: Mapping[str, Any] | None) -> str:
    if session is None:
        return "not tried"
    how = "compacts, " if "compacted" in session["branches"] else ""
    return f"{how}goes on" if session["complete"] else f"{how}{'ends early' if session['ended'] else 'gives up'}"


def rewrites(measured: Mapping[str, Any]) -> str:
    """A line of the table of what programs change in the model's answers."""
    changes = ", ".join(f"`{change}` ({count})" for change, count in measured["session"]["rewritten"].items())
    return f"| {measured['title']} | {DIALECTS[measured['dialect']]} | {changes or 'nothing'} |"


def left(harness: Harness) -> str:
    """A line of the table of what programs leave behind."""
    names = [f"`{name}`" for name in harness.writes]
    return f"| {harness.title} | `{harness.install}` | {', '.join(names)} |"


def tables(kept: Mapping[str, Any]) -> str:
    """All tables, in the order of `HARNESSES`."""
    known = [kept[f"{name} {dialect}"] for name, dialect in places() if f"{name} {dialect}" in kept]
    lines = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS), *map(row, known), ""]
    lines += ["| program | API | changes of answers that it sends back |", "|---|---|---|", *map(rewrites, known)]
    lines += ["", "| program | installation | files that it leaves in its home, or with `./` in the working folder |", "|---|---|---|"]
    return "\n".join([*lines, *map(left, HARNESSES.values())])


def main(words: Sequence[str]) -> None:
    """Write the tables into the page; with the word ``npm``, print what npm is to install."""
    if words == ["npm"]:
        sys.stdout.write(" ".join(f"{one.package}@{one.version}" for one in HARNESSES.values() if one.installer == "npm") + "\n")
        return
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{tables(results())}\n\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main(sys.argv[1:])

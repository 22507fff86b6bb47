"""A pytest plugin: what the tests of docs/reliability.md injected and saw, written to a file by the run.

A test belongs to a row of that page by ``@pytest.mark.row(number, injected)``; ``{name}`` in the text stands for a parameter of the
test. What it saw, figures above all, it tells the fixture `saw`. The report is written next to the working directory's other
files, as Markdown and as JSON, whenever a test marked ``faults`` ran, or where ``--faults-report`` says.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeAlias

import psutil
import pytest

Saw: TypeAlias = Callable[[str], None]

DEFAULT = "faults-report.md"
ROWS = {
    1: "an engine is killed during generation",
    2: "all engines are dead",
    3: "an engine answers and never generates",
    4: "an engine comes back with old weights",
    5: "a weight publication fails half way",
    6: "an environment's step never returns",
    7: "a few episodes are 20 times slower",
    8: "an environment's process dies",
    9: "a task that always fails",
    10: "a reward that is no number",
    11: "a gradient that is not finite",
    12: "the run is killed at random points",
    13: "an asynchronous run is killed with its queue full",
    14: "killed while a checkpoint is saved",
    15: "the disk is full",
    16: "SIGTERM, SIGINT",
    17: "a learner slower than generation",
    18: "2,000 steps",
    19: "a background task raises",
    22: "clients of the endpoint that repeat, leave, come late or never stop",
    24: "secrets in the environment",
    27: "who can connect",
    28: "settings that cannot work",
    29: "--ray-address that nobody answers",
    30: "a signal during start-up, or twice within a second",
    31: "a machine is lost, another joins",
    32: "the machine of a learner rank is lost",
    33: "the run is killed while it has sandboxes",
}


@dataclass(frozen=True)
class Finding:
    """What one test of a row came to."""

    row: int
    injected: str
    seen: list[str]
    outcome: str
    test: str
    seconds: float


_findings: list[Finding] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--faults-report", metavar="PATH", default="", help="write the report of the fault tests to PATH and PATH.json")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "row(number, injected): tests a row of docs/reliability.md; run by make test-faults")


@pytest.fixture
def saw(request: pytest.FixtureRequest) -> Saw:
    """Tell the report what was seen."""
    return lambda text: request.node.user_properties.append(("saw", text))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        mark = item.get_closest_marker("row")
        if mark is not None:
            assert mark.args[0] in ROWS, f"{item.nodeid}: docs/reliability.md has no row {mark.args[0]}"
            parameters = getattr(item, "callspec", None)
            injected = mark.args[1].format(**{name: _name(value) for name, value in (parameters.params if parameters else {}).items()})
            item.user_properties += [("row", str(mark.args[0])), ("injected", injected)]
            if item.get_closest_marker("faults"):
                item.user_properties.append(("kills", "yes"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    facts = dict(item.user_properties)
    if "row" in facts and (report.when == "call" or report.outcome != "passed"):
        seen = [str(text) for name, text in item.user_properties if name == "saw"]
        if call.excinfo is not None:
            said = [line for line in call.excinfo.exconly(tryshort=True).splitlines() if line.strip()]
            seen += [line.strip()[:300] for line in dict.fromkeys((said[0], said[-1]))]
        row, seconds = int(str(facts["row"])), round(report.duration, 1)
        _findings.append(Finding(row, str(facts["injected"]), seen, report.outcome, item.nodeid, seconds))
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    asked = session.config.getoption("--faults-report")
    killing = any(("kills", "yes") in item.user_properties for item in getattr(session, "items", []))
    if _findings and (asked or killing):
        path = Path(asked or DEFAULT)
        path.parent.mkdir(parents=True, exist_ok=True)
        findings = sorted(_findings, key=lambda finding: finding.row)
        path.write_text(markdown(findings), encoding="utf-8")
        facts = {"date": time.strftime("%Y-%m-%d"), "findings": [asdict(finding) for finding in findings]}
        path.with_suffix(".json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    path = Path(terminalreporter.config.getoption("--faults-report") or DEFAULT)
    if any(finding.outcome for finding in _findings) and path.exists():
        terminalreporter.line(f"fault tests: {len(_findings)} findings in {path}")


def markdown(findings: list[Finding]) -> str:
    """The report for people: one line per test, and the rows that were not tested."""
    passed = sum(finding.outcome == "passed" for finding in findings)
    lines = [
        "# Fault tests",
        "",
        f"{time.strftime('%Y-%m-%d %H:%M')}, {psutil.cpu_count()} cores, Python {platform.python_version()}: "
        f"{passed} of {len(findings)} passed.",
        "",
        "| row | fault | injected | seen | result | seconds | test |",
        "|---|---|---|---|---|---|---|",
    ]
    for finding in findings:
        cells = [str(finding.row), ROWS[finding.row], finding.injected, "; ".join(finding.seen), finding.outcome, str(finding.seconds)]
        lines.append("| " + " | ".join(_cell(cell) for cell in [*cells, finding.test]) + " |")
    missing = [str(row) for row in ROWS if row not in {finding.row for finding in findings}]
    if missing:
        lines += ["", f"Not run this time: rows {', '.join(missing)}."]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def _name(value: object) -> str:
    return str(getattr(value, "name", None) or getattr(value, "__name__", None) or value)

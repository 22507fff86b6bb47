"""``docs/check.md`` says what the code says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from agentrl.check import findings
from agentrl.check.findings import RULES, Severity
from tests.check_reference import DOCS, with_table
from tests.unit.check.support import checked, ids
from tests.unit.check.test_black_box import AGENTS
from tests.unit.check.test_broken import DEFECTS, LOST, NOTES, SECOND

PAGE = DOCS.read_text(encoding="utf-8")
ELSEWHERE = {
    "changes-torch",
    "exceeds-memory",
    "slow-calls",
    "flat-groups",
    "reward-unseen",
    "score-clipped",
    "template-refuses",
    "images-broken",
    "images-idle",
    "loads-only-here",
    "solution-fails",
    "nothing-earns",
    "wasted-tokens",
}
"""Found in tests that are not tables."""


def test_the_table_is_the_one_of_the_rules() -> None:
    assert with_table(PAGE) == PAGE, "run python -m tests.check_reference"


def test_code_and_table_name_the_same_rules() -> None:
    nodes = [node for path in Path(findings.__file__).parent.glob("*.py") for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    calls = [node for node in nodes if isinstance(node, ast.Call) and len(node.args) == 3]
    reports = [call.args[0] for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr in ("found", "add")]
    assert {str(name.value) for name in reports if isinstance(name, ast.Constant)} <= set(RULES)
    texts = {str(node.value) for node in nodes if isinstance(node, ast.Constant)}
    made = {made_of(node) for node in nodes if isinstance(node, ast.JoinedStr)}
    unused = [name for name in RULES if name not in texts and not any(re.fullmatch(form, name) for form in made if "-" in form)]
    assert not unused, "in the table, but no check names it"
    looks_like_one = {text for text in texts if re.fullmatch("[a-z]+(-[a-z]+)+", text)}
    assert looks_like_one - set(RULES) <= {"agentrl-env", "site-packages", "sub-agent"}, "named by a check, but not in the table"


def made_of(node: ast.JoinedStr) -> str:
    """The form of an id that is put together, ``leaks-[a-z]+``; "" for any other text."""
    form = "".join(str(part.value) if isinstance(part, ast.Constant) else "[a-z]+" for part in node.values)
    return form if re.fullmatch(r"[a-z]+-\[a-z\]\+|\[a-z\]\+-[a-z]+", form) else ""


def test_the_example_finds_what_the_page_shows(tmp_path: Path) -> None:
    code, *_ = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "dice.py").write_text(code)
    report = checked(str(tmp_path / "dice.py"))
    shown = set(re.findall(r"^(?:error|warning|note) ([\w-]+):", PAGE, re.MULTILINE))
    assert ids(report, *Severity) == shown
    for finding in report.findings:
        assert f"{finding.rule.severity} {finding.id}: {finding.rule.title}" in PAGE


def test_every_rule_has_a_test_and_says_what_to_do() -> None:
    assert set(RULES) == {*DEFECTS.values(), *LOST.values(), *NOTES.values(), *SECOND.values(), *AGENTS.values(), *ELSEWHERE}
    for known in RULES.values():
        assert known.remedy.endswith((".", ").")), known.id
        assert known.why.endswith("."), known.id
        assert re.fullmatch(r"[a-z]+(-[a-z]+)*", known.id)
        assert known.snippet or known.severity is not Severity.ERROR or known.id in ("reset-raises", "prompt-too-long"), known.id

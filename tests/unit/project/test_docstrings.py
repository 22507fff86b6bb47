"""Docstrings begin with the thing or a verb: one that opens with "What", "Whether" or a pronoun has no subject of its own."""

import ast
import re
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
OPENERS = frozenset(
    {"What", "Whether", "Who", "Which", "Of", "How", "Where", "Why", "When", "If", "There", "Here", "Nothing", "Something"}
    | {"It", "Its", "They", "Their", "This", "That", "These", "Those"}
)

FILES = [str(path.relative_to(ROOT)) for folder in ("agentrl", "envs", "examples") for path in sorted((ROOT / folder).rglob("*.py"))]


def opening_words(source: str) -> list[tuple[int, str]]:
    """Line and first word of every docstring, also of attributes, and every argument in one whose text begins with Whether."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, documented)]
    found = [(getattr(node, "lineno", 1), ast.get_docstring(node)) for node in nodes]
    found += [docstring for node in nodes for docstring in attribute_docstrings(node.body)]
    openings = [(line, text.split()[0].strip(",.:;'`")) for line, text in found if text and text.split()]
    arguments = [(line, word) for line, text in found if text for word in re.findall(r"^    \w+: (Whether)\b", text, re.MULTILINE)]
    return openings + arguments


def attribute_docstrings(body: list[ast.stmt]) -> list[tuple[int, str]]:
    """Line and text of every string that stands behind an assignment."""
    return [
        (text.lineno, text.value.value)
        for assigned, text in pairwise(body)
        if isinstance(assigned, ast.Assign | ast.AnnAssign)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    ]


@pytest.mark.parametrize("name", FILES)
def test_docstrings_begin_with_their_subject(name: str) -> None:
    wrong = [(line, word) for line, word in opening_words((ROOT / name).read_text(encoding="utf-8")) if word in OPENERS]
    assert not wrong, f"{name}: begin these docstrings with the thing or a verb: {wrong}"


def test_the_check_sees_a_bad_opening() -> None:
    assert opening_words('def f():\n    """Whether it rains."""\n') == [(1, "Whether")]
    listed = 'def f():\n    """Rain.\n\n    Args:\n        wet: Whether it rains.\n    """\n'
    assert opening_words(listed) == [(1, "Rain"), (1, "Whether")]
    assert opening_words('WET = 1\n"""How wet it is."""\n') == [(2, "How")]

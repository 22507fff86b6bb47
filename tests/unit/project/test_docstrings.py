"""Docstrings begin with the thing or a verb: a sentence that opens with "What" or "Whether" has no subject of its own."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
OPENERS = frozenset({"What", "Whether", "Who", "Of", "How", "It", "They", "Where", "Why"})

FILES = [str(path.relative_to(ROOT)) for folder in ("agentrl", "envs", "examples") for path in sorted((ROOT / folder).rglob("*.py"))]


def opening_words(source: str) -> list[tuple[int, str]]:
    """Line and first word of every docstring."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, documented)]
    found = [(getattr(node, "lineno", 1), ast.get_docstring(node)) for node in nodes]
    return [(line, text.split()[0].strip(",.:;'`")) for line, text in found if text and text.split()]


@pytest.mark.parametrize("name", FILES)
def test_docstrings_begin_with_their_subject(name: str) -> None:
    wrong = [(line, word) for line, word in opening_words((ROOT / name).read_text(encoding="utf-8")) if word in OPENERS]
    assert not wrong, f"{name}: begin these docstrings with the thing or a verb: {wrong}"


def test_the_check_sees_a_bad_opening() -> None:
    assert opening_words('def f():\n    """Whether it rains."""\n') == [(1, "Whether")]

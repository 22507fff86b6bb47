"""The source of an environment is read as far as its class goes."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.doctor.source import Source, bare_comparisons, wanted_forms

FILE = '''
"""Wants \\\\boxed{} and state.label == text."""
import re

PATTERN = r"\\\\boxed\\{(.*)\\}"

class Base:
    def step(self, state):
        """Answer: none."""
        return state.action_text.strip() == state.label

class Env(Base):
    def right(self, state, label):
        return str(label) == state.action_text or label == 3 or state.label in state.action_text

class Other:
    def step(self, state):
        return label != "####" and state.label == text
'''


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "my.py").write_text(FILE)
    return tmp_path / "my.py"


def test_comparisons_of_labels_as_they_are_are_found_in_the_class_and_its_bases(file: Path) -> None:
    lines = bare_comparisons([Source(file, "Env")])
    assert [(str(line), line.text) for line in lines] == [
        ("my.py:10", "state.action_text.strip() == state.label"),
        ("my.py:14", "state.label in state.action_text"),
    ]
    assert [line.number for line in bare_comparisons([Source(file)])] == [10, 14, 18]


def test_forms_are_found_in_code_and_not_in_docstrings(file: Path) -> None:
    assert [(str(line), line.text) for line in wanted_forms([Source(file, "Env")])] == [("my.py:5", "\\boxed{label}")]
    assert [line.text for line in wanted_forms([Source(file)])] == ["\\boxed{label}", "#### label"]


def test_a_file_that_is_no_python_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "my.py").write_text("class :")
    assert not bare_comparisons([Source(tmp_path / "my.py"), Source(tmp_path / "none.py")])

"""The environment's source: the line that compares the label with text as it is, and the forms that it looks for."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentrl.check.policies import FORMS
from agentrl.core.plugins import kept_environment
from agentrl.inspect.reader import RunReader

LABELS = ("label", "labels")


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a file, and a text that stands there."""

    file: str
    number: int
    text: str

    def __str__(self) -> str:
        """Name the line as editors do."""
        return f"{self.file}:{self.number}"


@dataclass(frozen=True, slots=True)
class Source:
    """A Python file of a run, and the class in it that is used; an empty name stands for the whole file."""

    path: Path
    name: str = ""


def sources(run: RunReader) -> list[Source]:
    """Return the Python files of a run's environment and of its reward, as far as they are found; else the run's copies."""
    specs = [kept_environment(str(run.setting(name) or ""), run.path) for name in ("agent", "remote_rm_url")]
    parts = (spec.partition(".py:") for spec in specs)
    files = (Source(Path(path + (".py" if name else "")).expanduser(), name) for path, _, name in parts)
    return [file for file in files if file.path.suffix == ".py" and file.path.is_file()]


def bare_comparisons(files: Sequence[Source]) -> list[Line]:
    """Return the lines that compare a label as it is, not made text or a number by a call."""
    return [
        Line(path.name, node.lineno, ast.unparse(node))
        for path, node in _nodes(files)
        if isinstance(node, ast.Compare)
        and isinstance(node.ops[0], ast.Eq | ast.NotEq | ast.In | ast.NotIn)
        and any(_is_label(side) for side in (node.left, *node.comparators))
        # A label that is compared with a constant is not compared with an answer.
        and not any(isinstance(side, ast.Constant) for side in (node.left, *node.comparators))
    ]


def wanted_forms(files: Sequence[Source]) -> list[Line]:
    """Return the lines with a text or a pattern that begins one of the forms in which verifiers look for an answer; names of `FORMS`."""
    lines, of_labels = [], set[int]()
    for path, node in _nodes(files):
        # `label.split("####")` takes a label apart, and asks nothing of the answer.
        if isinstance(node, ast.Call) and any(map(_is_label, ast.walk(node.func) if isinstance(node.func, ast.Attribute) else node.args)):
            of_labels |= {id(part) for argument in node.args for part in ast.walk(argument)}
        if id(node) in of_labels or not isinstance(node, ast.Constant) or not isinstance(node.value, str):
            continue
        # Patterns escape backslashes and brackets, so both sides are compared without any backslash.
        text = node.value.replace("\\", "")
        lines += [Line(path.name, node.lineno, name) for name in FORMS if beginning(name).replace("\\", "") in text]
    return lines


def beginning(form: str) -> str:
    """Return the text that an answer in a form has before the answer itself."""
    return FORMS[form].partition("%s")[0].strip()


def label_reads(files: Sequence[Source]) -> list[Line]:
    """Return the lines that read a label."""
    return [Line(path.name, node.lineno, ast.unparse(node)) for path, node in _nodes(files) if _is_label(node)]


def _is_label(node: ast.AST) -> bool:
    return (isinstance(node, ast.Attribute) and node.attr in LABELS) or (isinstance(node, ast.Name) and node.id in LABELS)


def _nodes(files: Sequence[Source]) -> Iterator[tuple[Path, ast.expr]]:
    """Expressions of files in the order of their lines, without docstrings and other classes; files that are not Python are left out."""
    for file in files:
        try:
            tree = ast.parse(file.path.read_text(encoding="utf-8"))
        except (OSError, SyntaxError, ValueError):
            continue
        parts = _used(tree, file.name)
        statements = {node.value for part in parts for node in ast.walk(part) if isinstance(node, ast.Expr)}
        nodes = [node for part in parts for node in ast.walk(part) if isinstance(node, ast.expr) and node not in statements]
        yield from ((file.path, node) for node in sorted(nodes, key=lambda node: (node.lineno, node.col_offset)))


def _used(tree: ast.Module, name: str) -> list[ast.stmt]:
    """The statements of a file without the classes that are neither `name` nor its bases."""
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    used, waiting = set(), [name] if name in classes else list(classes)
    while waiting:
        used.add(own := waiting.pop())
        waiting += [base.id for base in classes[own].bases if isinstance(base, ast.Name) and base.id in classes and base.id not in used]
    return [node for node in tree.body if not isinstance(node, ast.ClassDef) or node.name in used]

"""Ceilings of the structure: who knows the configuration, how much code there is, how many settings; raised only with a reason."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from agentrl.config.schema import TrainConfig
from agentrl.config.sections import settings_of

PACKAGE = Path(__file__).parents[3] / "agentrl"
RESOLVING = ("config", "resolve", "cli", "api")
"""Packages that know the configuration: its schema and rules, what decides it, and the commands."""
WHOLE = re.compile(
    r"\b(TrainConfig|PlayConfig|PlaySettings|EvaluateConfig|MeasureConfig|SampleConfig|ServeConfig|SourceConfig|TuneConfig|FlowSettings|EpisodeSettings)\b"
)
"""Classes that hold other sections."""
MAX_FILES = 21
MAX_CODE_LINES = 61_760
MAX_FLAGS = 200


@cache
def sources() -> dict[Path, str]:
    """The package's files."""
    return {path.relative_to(PACKAGE): path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}


def takers() -> Iterator[tuple[Path, str]]:
    """Every function with an argument that is a whole configuration."""
    for path, source in sources().items():
        if WHOLE.search(source):
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                    if any(each.annotation and WHOLE.search(ast.unparse(each.annotation)) for each in arguments):
                        yield path, node.name


def code_lines(source: str) -> int:
    """Lines with a token that is neither comment nor docstring."""
    texts: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            texts.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    blank = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in blank:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - texts)


def test_nothing_below_resolve_takes_a_whole_configuration() -> None:
    assert [f"{path}: {name}" for path, name in takers() if path.parts[0] not in RESOLVING] == []


def test_few_files_know_the_configuration() -> None:
    assert len({path for path, _ in takers()}) <= MAX_FILES


def test_the_code_does_not_grow() -> None:
    assert sum(map(code_lines, sources().values())) <= MAX_CODE_LINES


def test_settings_do_not_grow() -> None:
    assert len(settings_of(TrainConfig)) <= MAX_FLAGS


def test_code_lines_leave_out_comments_and_docstrings() -> None:
    assert code_lines('"""Text\nof two lines."""\n\n# a remark\nx = (\n    1  # why\n)\n') == 3

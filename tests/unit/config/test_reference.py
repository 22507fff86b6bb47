"""The generated configuration reference."""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import pytest
from annotated_types import Ge, Gt, Le, Lt

from agentrl.algo.plan import KINDS
from agentrl.config.schema import TrainConfig
from agentrl.config.sections import field_docs, settings_of
from agentrl.core.settings import flag
from tests.reference import default_text, main, render, values

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.vllm
def test_the_pages_in_the_repository_are_up_to_date(capsys):
    assert main(["--check", "--docs", str(DOCS)]) == 0, capsys.readouterr().err


def test_an_outdated_page_fails_the_check_and_is_left_alone(tmp_path, capsys):
    assert main(["--check", "--docs", str(tmp_path)]) == 1
    assert main(["--docs", str(tmp_path)]) == 0
    assert main(["--check", "--docs", str(tmp_path)]) == 0
    page = tmp_path / "metrics.md"
    page.write_text("old")
    capsys.readouterr()
    assert main(["--check", "--docs", str(tmp_path)]) == 1
    assert page.read_text() == "old"
    assert capsys.readouterr().err.strip() == f"{page} is not up to date; run `make docs`"


def test_every_setting_has_one_row():
    rows = [line for line in render().splitlines() if line.startswith("| `--")]
    options = {name for part in KINDS for other in part.built_in for name in settings_of(TrainConfig.schema({part.setting: other}))}
    named = [row.split("`")[1] for row in rows]
    assert set(named) == {flag(name) for name in options}
    assert len(named) == len(set(named))
    assert all(row.count(" | ") == 4 for row in rows)


def test_every_section_and_alias_is_there():
    page = render()
    for section in dataclasses.fields(TrainConfig):
        assert f"\n## {section.name}\n" in page
    assert "Also: `--reward`." in page
    assert "| `--async`, `--no-async` | on or off | off |" in page


@pytest.mark.parametrize(
    ("hint", "text"),
    [
        (bool, "on or off"),
        (Path | None, "path"),
        (Annotated[int, Ge(0), Le(3)], "integer from 0 to 3"),
        (Annotated[float, Gt(0)] | None, "number above 0"),
        (Annotated[Annotated[float, Ge(0)], Lt(1)], "number below 1 from 0"),
        (Literal["a", "b"], "`a`, `b`"),
        (tuple[float, float], "2 numbers"),
        (tuple[str, ...], "texts"),
    ],
)
def test_values_in_words(hint, text):
    assert sorted(values(hint).split()) == sorted(text.split())


@pytest.mark.parametrize(
    ("value", "text"),
    [(True, "on"), (None, "unset"), ("", "unset"), ((), "unset"), ((0.0, 1.0), "`0.0 1.0`"), (5e-4, "`0.0005`"), (0, "`0`")],
)
def test_defaults(value, text):
    assert default_text(value) == text


def test_field_docs_reads_the_text_under_a_field():
    source = 'class A:\n    """Class."""\n    x: int = 1\n    """Of x."""\n    y: int = 2\n    z: int = 3\n    """Of\n    z."""\n'
    assert field_docs(source) == {"A": {"x": "Of x.", "z": "Of\n    z."}}

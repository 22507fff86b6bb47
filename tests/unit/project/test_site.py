"""The documentation site: its navigation, the links of its pages, and the check that reads what was built."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

import agentrl
from tests.site import check, hooks, versions
from tests.unit.project.test_pages import PAGES, anchors

ROOT = Path(__file__).parents[3]
SETTINGS = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))


def pages(part: object) -> list[str]:
    if isinstance(part, str):
        return [part]
    return [page for item in (part.values() if isinstance(part, dict) else part) for page in pages(item)]  # type: ignore[attr-defined]


def test_every_page_is_in_the_navigation_of_mkdocs_yml_once() -> None:
    listed = pages(SETTINGS["nav"])
    made = {*hooks.WHOLE.values(), *(f"reference/{name}.md" for name in hooks.SECTIONS)}
    expected = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")} | made
    assert not expected - set(listed), "add these pages to nav in mkdocs.yml"
    assert sorted(listed) == sorted(expected)
    assert SETTINGS["strict"] is True
    assert set(SETTINGS["validation"]["links"].values()) == {"warn"}


def test_the_reference_holds_every_public_name() -> None:
    homes = hooks.public_names((ROOT / "agentrl" / "__init__.py").read_text(encoding="utf-8"))
    assert set(homes) == set(agentrl.__all__)
    text = "\n".join(content for _, content in hooks.reference_pages())
    assert all(f"heading: agentrl.{name}\n" in text for name in agentrl.__all__)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_headings_have_the_names_that_github_gives_them(page: Path) -> None:
    titles = [
        line.lstrip("#").strip()
        for part, text in hooks.outside_code(page.read_text())
        if text
        for line in part.split("\n")
        if line.startswith("#")
    ]
    assert anchors(page) == {hooks.slug(title) for title in titles}


@pytest.mark.parametrize(
    ("uri", "text", "expected"),
    [
        ("index.md", "[a](docs/eval.md#on-its-own) [b](CONTRIBUTING.md)", "[a](eval.md#on-its-own) [b](contributing.md)"),
        ("eval.md", "[a](../README.md#on-gpus) [b](play.md)", "[a](index.md#on-gpus) [b](play.md)"),
        ("eval.md", "[a](../envs/code.py) [b](../tests/faults)", "[a](source/envs/code.py.md) [b](source/tests/faults/index.md)"),
        ("eval.md", "[a](#here) [b](https://example.org/x.md)", "[a](#here) [b](https://example.org/x.md)"),
        ("eval.md", "```\n[a](../README.md)\n```\n[a](../README.md)", "```\n[a](../README.md)\n```\n[a](index.md)"),
        ("index.md", "![p](docs/reward.png)", "![p](reward.png)"),
    ],
)
def test_links_are_led_to_their_pages(uri: str, text: str, expected: str) -> None:
    assert hooks.relinked(text, uri) == expected


def test_a_linked_file_and_a_linked_folder_get_a_page() -> None:
    made = dict(
        hooks.source_pages(
            {"docs/x.md": "[a](../envs/code.py) [b](../tests/faults) [c](eval.md) [d](../examples/quickstart.ipynb) [e](../no.py)"}
        )
    )
    assert set(made) == {"source/envs/code.py.md", "source/tests/faults/index.md", "source/examples/quickstart.ipynb.md"}
    assert "class " in made["source/envs/code.py.md"]
    assert "| `test_kills.py` |" in made["source/tests/faults/index.md"]
    assert (
        "~~~~~~~~python\nimport agentrl" in made["source/examples/quickstart.ipynb.md"]
        or "agentrl.train" in made["source/examples/quickstart.ipynb.md"]
    )


def built(folder: Path, body: str) -> list[str]:
    (folder / "index.html").write_text(f"<html><body id='top'>{body}</body></html>")
    (folder / "a.html").write_text("<h2 id='there'>x</h2>")
    return list(check.problems(folder))


@pytest.mark.parametrize(
    "body",
    [
        "<a href='a.html#there'>x</a> <a href='#top'>x</a> <a href='https://example.org'>x</a>",
        "<a href='a.html#__codelineno-1'>x</a> <img src='data:image/png;base64,AA=='> <link rel=canonical href='https://example.org/'>",
    ],
)
def test_a_good_site_has_no_problems(body: str, tmp_path: Path) -> None:
    assert built(tmp_path, body) == []


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("<a href='b.html'>x</a>", "index.html: b.html leads nowhere"),
        ("<a href='a.html#gone'>x</a>", "index.html: a.html#gone leads nowhere"),
        ("<a href='#gone'>x</a>", "index.html: #gone leads nowhere"),
        ("<img src='gone.png'>", "index.html: gone.png leads nowhere"),
        ("<script src='https://cdn.example.org/x.js'></script>", "index.html: loads https://cdn.example.org/x.js"),
        ("<link rel='preconnect' href='https://fonts.example.org'>", "index.html: loads https://fonts.example.org"),
        ("<img srcset='//example.org/x.png 2x'>", "index.html: loads //example.org/x.png"),
    ],
)
def test_problems_are_found(body: str, problem: str, tmp_path: Path) -> None:
    assert built(tmp_path, body) == [problem]


def test_a_style_sheet_that_loads_from_elsewhere_is_found(tmp_path: Path) -> None:
    (tmp_path / "x.css").write_text('@import "https://fonts.example.org/x.css";')
    assert built(tmp_path, "") == ["x.css: loads from elsewhere"]


def test_an_empty_folder_is_no_site(tmp_path: Path) -> None:
    assert check.main([str(tmp_path)]) == 1


def test_versions_stand_side_by_side_and_the_first_page_leads_to_the_newest(tmp_path: Path) -> None:
    for name in ("0.9.1", "0.10.0", "0.10.0.dev1", "0.2.0"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "index.html").write_text("<h1>pages</h1>")
    assert versions.write(tmp_path) == ["0.10.0", "0.10.0.dev1", "0.9.1", "0.2.0"]
    rows = json.loads((tmp_path / "versions.json").read_text(encoding="utf-8"))
    assert [row["version"] for row in rows if "latest" in row["aliases"]] == ["0.10.0"]
    assert list(check.problems(tmp_path)) == []
    assert "url=0.10.0/index.html" in (tmp_path / "index.html").read_text(encoding="utf-8")

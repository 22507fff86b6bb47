"""The vendored files of the viewer's page: what they are, that they are unchanged, and that the page's own modules keep its rules."""

import hashlib
import re
from pathlib import Path

import pytest

from agentrl.viewer.collect import STATIC

VENDOR = STATIC / "vendor"
VERSIONS = {"preact.js": "11.2.0", "hooks.js": "11.2.0", "htm.js": "3.1.1", "uplot.js": "1.6.32", "uplot.css": "1.6.32"}
MOST_BYTES = 70_000
MOST_LINES = 400
OWN = sorted(path for path in STATIC.rglob("*") if path.suffix in (".js", ".css", ".html") and path.parent != VENDOR)


def table() -> dict[str, list[str]]:
    lines = (VENDOR / "LICENSES").read_text().split("=====")[0].splitlines()
    rows = [re.split(r"\s{1,}", line, maxsplit=7) for line in lines if re.match(r"\w+\.(js|css) ", line)]
    return {row[0]: row for row in rows}


def test_every_vendored_file_is_named_with_its_version_and_unchanged() -> None:
    rows = table()
    assert {path.name for path in VENDOR.iterdir()} == {*VERSIONS, "LICENSES"}
    assert {name: row[2] for name, row in rows.items()} == VERSIONS
    for name, row in rows.items():
        data = (VENDOR / name).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (int(row[5]), row[6]), name
    assert "(v1.6.32)" in (VENDOR / "uplot.js").read_text()


def test_the_licences_of_all_packages_are_there() -> None:
    text = (VENDOR / "LICENSES").read_text()
    assert "Copyright (c) 2015-present Jason Miller" in text
    assert "Copyright (c) 2022 Leon Sorokin" in text
    assert "Apache License" in text
    assert "TERMS AND CONDITIONS FOR USE, REPRODUCTION, AND DISTRIBUTION" in text


def test_vendored_code_is_small() -> None:
    assert sum((VENDOR / name).stat().st_size for name in VERSIONS) < MOST_BYTES


@pytest.mark.parametrize("path", OWN, ids=lambda path: str(path.relative_to(STATIC)))
def test_a_module_sets_no_markup_and_names_no_other_address(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not re.findall(
        r"innerHTML|outerHTML|insertAdjacentHTML|dangerouslySetInnerHTML|document\.write|\beval\(|new Function|srcdoc", text
    )
    assert not re.findall(r"(?<![\w.])(?:https?:)?//\w[\w-]*\.\w", text), "an address outside the page"
    assert not re.findall(r" on\w+=\"|javascript:", text)
    assert text.count("\n") < MOST_LINES


def test_the_page_has_no_script_or_style_of_its_own() -> None:
    text = (STATIC / "index.html").read_text()
    assert re.findall(r"<script(.*?)>", text) == [' src="static/vendor/uplot.js"', ' type="module" src="static/main.js"']
    assert "<style" not in text
    assert " style=" not in text

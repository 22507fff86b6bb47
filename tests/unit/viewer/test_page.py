"""The page as one file: its modules joined into one, and answers that cannot leave their element."""

import base64
import hashlib
import html
import json
import re
from pathlib import Path

import pytest

from agentrl.viewer import collect
from agentrl.viewer.collect import bundle, single_page


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(collect, "STATIC", tmp_path)
    (tmp_path / "views").mkdir()
    return tmp_path


def test_modules_come_after_those_that_they_import_and_each_once(modules: Path) -> None:
    (modules / "main.js").write_text('import { two } from "./views/b.js";\nimport { one as first } from "./a.js";\ntwo(first);\n')
    (modules / "views/b.js").write_text('import { one } from "../a.js";\nexport function two() { return one; }\n')
    (modules / "a.js").write_text("export const one = 1;\nconst hidden = 2;\n")
    text = bundle()
    assert re.findall(r"const (m\d) = ", text) == ["m0", "m1", "m2"]
    assert text.count("hidden") == 1
    assert "const { one } = m0;" in text
    assert "const { one: first } = m0;" in text
    assert "return { one };" in text
    assert "return { two };" in text
    assert "import" not in text
    assert "export" not in text


def test_the_forms_of_minified_modules_are_understood(modules: Path) -> None:
    (modules / "main.js").write_text('import whole from "./d.js";\nimport{x as n}from"./e.js";n(whole);')
    (modules / "d.js").write_text("var n=1;export default function(s){return n};")
    (modules / "e.js").write_text("var a=1,b=2;export{a as x,b};")
    text = bundle()
    assert "const whole = m0.default;" in text
    assert "const {x: n} = m1;" in text
    assert "const whole = function(s){return n};" in text
    assert "return { x: a, b };" in text


def test_modules_in_a_circle_are_refused(modules: Path) -> None:
    (modules / "main.js").write_text('import { a } from "./a.js";\n')
    (modules / "a.js").write_text('import { b } from "./main.js";\nexport const a = 1;\n')
    with pytest.raises(ValueError, match=r"main\.js imports itself by way of main\.js and a\.js"):
        bundle()


def test_a_module_that_would_end_its_element_is_refused(modules: Path) -> None:
    (modules / "main.js").write_text('const a = "</SCRIPT>";\n')
    with pytest.raises(ValueError, match="end of a script element"):
        bundle()


def test_answers_cannot_leave_their_element() -> None:
    answers = {"api/run/a": {"text": "</script><script>alert(1)</script><!--"}}
    text = single_page(answers, start='#/run/"><b>')
    inside = re.findall(r'<script type="application/json" id="answers">(.*?)</script>', text, re.DOTALL)
    assert [json.loads(one) for one in inside] == [answers]
    assert "alert(1)</script>" not in text
    assert "<!--" not in text
    assert html.escape('#/run/"><b>', quote=True) in text


def test_numbers_that_are_not_finite_are_null() -> None:
    text = single_page({"api/runs": [float("nan"), float("inf"), 1.5]}, start="#/")
    assert '{"api/runs": [null, null, 1.5]}' in text


def test_the_policy_of_the_file_allows_its_own_scripts_and_styles_only() -> None:
    text = single_page({}, start="#/")
    policy = re.findall(r'http-equiv="Content-Security-Policy" content="(.*?)"', text)[0]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    for pattern in (r"<script>(.*?)</script>", r'<script type="module">(.*?)</script>', r"<style>(.*?)</style>"):
        inside = re.findall(pattern, text, re.DOTALL)[0]
        assert f"'sha256-{base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()}'" in policy
    assert not re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="(?!data:,")', text)

"""docs/loop.md quotes the loops as they are: every block is a part of a file, and each numbered part of the loop is on the page."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import agentrl

ROOT = Path(__file__).parents[3]
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)


def test_the_blocks_of_the_page_are_parts_of_the_files() -> None:
    page = (ROOT / "docs" / "loop.md").read_text(encoding="utf-8")
    synchronous, asynchronous = page.split("## The asynchronous form")
    files = {name: (ROOT / "examples" / name).read_text(encoding="utf-8") for name in ("loop.py", "loop_async.py")}
    for part, name in ((synchronous, "loop.py"), (asynchronous, "loop_async.py")):
        blocks = BLOCK.findall(part)
        assert len(blocks) >= 3
        for block in blocks:
            assert f"\n{block}" in files[name], f"not in {name}:\n{block}"
    numbered = re.findall(r"^ *# (\d\. .*)$", files["loop.py"], re.MULTILINE)
    assert [line for line in numbered if line not in page] == []


def test_the_engine_on_its_page_is_the_example() -> None:
    page = (ROOT / "docs" / "engines.md").read_text(encoding="utf-8")
    (block,) = BLOCK.findall(page)
    assert (ROOT / "examples" / "own_engine.py").read_text(encoding="utf-8").endswith(block)


@pytest.mark.parametrize("name", ["loop.py", "loop_async.py"])
def test_the_settings_of_the_loops_are_accepted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    (settings,) = [
        node
        for node in ast.walk(ast.parse((ROOT / "examples" / name).read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "agentrl.settings"
    ]
    config = eval(ast.unparse(settings), {"agentrl": agentrl})
    assert (config.training.num_steps, config.run.runtime, config.flow.staleness) == (20, "local", int(name == "loop_async.py"))

"""The tutorial's commands, in its own folder, as they stand but for their length."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.e2e import forked
from tests.e2e.runs import ROOT

PAGE = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
COMMANDS = [shlex.split(line) for line in re.findall(r"^(?: {4}|\$ )agentrl (.*)$", PAGE, re.MULTILINE)]


def test_the_commands_of_the_page_are_known() -> None:
    assert [words[0] for words in COMMANDS] == ["play", "check", "train", "inspect", "profile", "eval", "play", "train"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_environment_learns_and_the_other_commands_read_the_run(tmp_path: Path) -> None:
    """Training is as long as on the page; what follows reads this run."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "second_try.py").write_text(code)

    def run(words: list[str], *more: str) -> str:
        placed = [word.replace("second_try.py", str(tmp_path / "second_try.py")).replace("runs/", f"{tmp_path}/runs/") for word in words]
        code, output = forked.run([*placed, *more], {}, 400)
        assert code == 0, output
        return output

    by_name = {words[0]: words for words in reversed(COMMANDS)}  # the first of each
    assert "0 errors, 0 warnings" in run(by_name["check"])
    output = run(by_name["train"], "--runtime", "local")
    before, after = (float(value) for value in re.search(r"evaluation   reward ([\d.]+) to ([\d.]+)", output).groups())  # type: ignore[union-attr]
    assert after >= before + 0.25
    assert "turn 1" in run(by_name["inspect"])
    assert "\nlearner      of a step: training " in run(by_name["profile"])

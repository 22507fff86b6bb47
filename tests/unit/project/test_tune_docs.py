"""The pages about supervised and preference training: their commands are accepted, and their error messages are real."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from agentrl.assets import tiny_model_path
from agentrl.cli.main import main
from agentrl.config.methods import METHODS

ROOT = Path(__file__).parents[3]
OVERVIEW = ROOT / "docs" / "tune.md"
PAGES = sorted((ROOT / "docs" / "tune").glob("*.md"))
COMMANDS = [
    (page.name, line) for page in PAGES for line in re.findall(r"^    agentrl (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
]

GOOD = {"prompt": "1+1?", "chosen": "2", "rejected": "3"}
CHAT = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
FILES = {
    "pairs.jsonl": [GOOD, GOOD, {**GOOD, "rejected": "2"}],
    "chats.jsonl": [{"messages": CHAT}, {"messages": CHAT[:1]}],
}


def test_every_method_has_a_page_with_a_command() -> None:
    assert {page.stem for page in PAGES} - {"settings"} == set(METHODS)
    assert {name.removesuffix(".md") for name, _ in COMMANDS} == set(METHODS)


@pytest.mark.parametrize(("page", "line"), COMMANDS, ids=[line for _, line in COMMANDS])
def test_commands_are_accepted(page: str, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    words = shlex.split(line.replace("runs/warm/model", str(tiny_model_path())))
    assert f"{words[0]}.md" == page
    assert main([*words, "--dry-run"]) == 0
    assert "[[" in capsys.readouterr().err


def test_errors_are_those_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    for name, rows in FILES.items():
        Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    shown = re.findall(r"^\$ agentrl (\w+ --data \w+\.jsonl)\n(agentrl: .+)$", OVERVIEW.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(shown) == len(FILES)
    for command, message in shown:
        assert main(command.split()) == 2
        assert capsys.readouterr().err.strip() == message

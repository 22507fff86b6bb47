"""``agentrl new`` copies a ready-made environment and never overwrites a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.assets import environment_paths
from agentrl.cli.main import main
from agentrl.suites.load import load_agent

ENVS = Path(__file__).parents[3] / "envs"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_every_ready_made_environment_ships_with_the_package() -> None:
    assert list(environment_paths()) == sorted(path.stem for path in ENVS.glob("*.py"))


@pytest.mark.parametrize("words", [[], ["--example", "guess_number"]])
def test_a_copy_loads_and_names_itself(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    example = words[-1] if words else "calculator"
    assert main(["new", "mine.py", *words]) == 0
    assert f"a copy of {example}" in capsys.readouterr().out
    text = Path("mine.py").read_text()
    assert text == (ENVS / f"{example}.py").read_text().replace(f"envs/{example}.py", "mine.py")
    assert "agentrl train --agent mine.py" in text
    assert list(load_agent("mine.py").load().tasks())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["mine.py", "--example", "chess"], "is no ready-made environment"),
        (["mine"], "Write `agentrl new mine.py`"),
        (["old.py"], "exists"),
    ],
)
def test_what_is_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("old.py").write_text("mine")
    assert main(["new", *words]) == 2
    assert message in capsys.readouterr().err
    assert Path("old.py").read_text() == "mine"

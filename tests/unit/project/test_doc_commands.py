"""Every command of the documentation runs as shown, with ``--dry-run``, or is read flag by flag for a reason that is written down."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from agentrl.cli.main import COMMANDS, main
from agentrl.core.errors import ConfigError
from agentrl.suites.registry import scheme_of
from tests.doc_commands import DRY, OTHER_PROGRAMS, PAGES, ROOT, Shown, only_read, read, shown_commands
from tests.sandboxes import problem

SHOWN = [shown for page in PAGES for shown in shown_commands(page)]
OURS = [shown for shown in dict.fromkeys(SHOWN) if shown.program == "agentrl"]
READ_ONLY = {shown for shown in OURS for row in only_read() if shown in row}
TRIED = {shown.words: shown for shown in OURS if shown not in READ_ONLY}


def name(shown: Shown) -> str:
    return f"{shown.page}: {shown.text}"


def test_the_pages_have_commands() -> None:
    assert len(OURS) > 150
    assert {"README.md", "docs/tutorial.md", "docs/tune/sft.md"} <= {shown.page for shown in OURS}


def test_every_program_is_known() -> None:
    unknown = [name(shown) for shown in SHOWN if shown.program not in ("agentrl", *OTHER_PROGRAMS)]
    assert not unknown


@pytest.mark.parametrize("shown", OURS, ids=name)
def test_the_command_and_its_flags_exist(shown: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert shown.words[1] in {*COMMANDS, "--completion", "--help"}
    if shown.words[1] in COMMANDS:
        read(shown.words[1], shown.agentrl)


def test_an_unknown_flag_or_a_wrong_value_is_noticed() -> None:
    for command, words in (("train", ["--zzz", "1"]), ("iterate", ["dpo", "e.py", "--train.zzz", "1"]), ("plan", ["--gpus", "many"])):
        with pytest.raises(ConfigError):
            read(command, words)


@pytest.mark.parametrize("shown", TRIED.values(), ids=name)
def test_the_command_runs(shown: Shown, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    words = [*shown.words[1:]]
    if problem() and any(scheme_of(word).programs(word) for word in words):
        pytest.skip(problem())
    if words[0] in DRY and not {"--dry-run", "--help"} & set(words):
        words.append("--dry-run")
    try:
        code = main(words)
    except SystemExit as ended:
        code = int(ended.code or 0)
    allowed = (0, 1) if words[0] in ("plan", "check") else (0,)  # 1: it does not fit, or has errors, as the page says
    assert code in allowed, f"agentrl {shlex.join(words)}\n{capsys.readouterr().err}"


def test_every_row_of_the_table_has_a_command_and_a_reason() -> None:
    assert all(row.reason for row in only_read())
    unused = [row.match for row in only_read() if not any(shown in row for shown in OURS)]
    assert not unused


@pytest.mark.parametrize("shown", [shown for shown in SHOWN if shown.program in ("make", "python")], ids=name)
def test_targets_modules_and_files_exist(shown: Shown) -> None:
    words = [word for word in shown.words[1:] if not word.startswith("-") or word == "-m"]
    if shown.program == "make":
        targets = {line.partition(":")[0] for line in (ROOT / "Makefile").read_text(encoding="utf-8").splitlines() if ":" in line}
        assert [word for word in words if "=" not in word and word not in targets] == []
    elif words[0] == "-m":
        assert (ROOT / words[1].replace(".", "/")).with_suffix(".py").is_file()
    else:
        assert (ROOT / words[0]).is_file()


def test_the_readme_shows_what_check_says_of_the_broken_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (shown,) = re.findall(r"```text\n\$ agentrl (check [^\n]+)\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    monkeypatch.chdir(ROOT)
    assert main(shlex.split(shown[0])) == 0  # a warning is no error
    assert f"\n\n{shown[1]}\n" in capsys.readouterr().out

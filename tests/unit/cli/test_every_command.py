"""Every command has the same form of help and of errors."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from agentrl.cli.main import COMMANDS, GROUPS, main, usage

REQUIRED = {
    "export": "RUN",
    "get-model": "NAME",
    "inspect": "RUN",
    "merge": "SOURCE",
    "new": "FILE",
    "profile": "RUN",
    "replay": "RUN",
    "scale": "RUN",
    "serve-reward-model": "MODEL",
    "translate": "SOURCE",
}
WORDS = {
    "train": "[ENV]",
    "check": "[ENV]",
    "eval": "[ENV]",
    "play": "[ENV]",
    "sample": "[ENV]",
    "certify": "[MODEL]",
    "serve": "[MODEL]",
    "iterate": "[METHOD] [ENV]",
    "view": "[RUN|FOLDER|FILE]",
    "merge": "SOURCE ...",
    "inspect": "RUN [EPISODE]",
    "doctor": "[RUN]",
    "replay": "RUN [EPISODE ...]",
    "export": "RUN [OUT]",
    "get-model": "NAME [OUT]",
    **{name: word for name, word in REQUIRED.items() if name in ("new", "profile", "scale", "serve-reward-model", "translate")},
}
ENTRY = re.compile(r"^  (--[a-z][\w-]*)(?: .*)?$", re.MULTILINE)


def page(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("agentrl: ")
    return captured.err


def test_help_may_stand_before_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help"]) == 0
    assert capsys.readouterr().out == usage()
    assert page(capsys, "help", "train") == page(capsys, "train", "--help")
    assert page(capsys, "help", "train", "lora") == page(capsys, "train", "--help", "lora")


@pytest.mark.parametrize("columns", [80, 160])
@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_one_form(name: str, columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    text = page(capsys, name, "--help")
    lines = text.splitlines()
    shown = WORDS.get(name, "")
    assert lines[0] == " ".join(filter(None, ["usage: agentrl", name, shown, "[--flag VALUE ...]"]))
    assert lines[1] == ""
    assert lines[2][0].isupper()
    assert max(map(len, lines)) <= columns
    assert [line for line in lines if line != line.rstrip()] == []
    assert not re.search(r"[│╭╰]|\{None\}|\(default|`|\[unset\]|\(required\)", text)
    for word in re.findall(r"[A-Z|]{2,}", shown):
        assert f"\n  {word} " in text
    assert ENTRY.search(text)
    assert ENTRY.search(page(capsys, name, "--help", "all"))


def test_a_default_stands_in_brackets_at_the_end(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    for name, line in (
        ("inspect", "all. (integer from 0) [20]"),
        ("view", "[on; off with --no-browser]"),
        ("dpo", "(number from 0 below 0.5) [0.0]"),
    ):
        assert line in " ".join(page(capsys, name, "--help").split()), name


@pytest.mark.parametrize("name", COMMANDS)
def test_an_unknown_flag_is_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = refused(capsys, name, "--zzz", "1")
    assert text.startswith(f"agentrl: agentrl {'train' if name == 'plan' else name} has no such setting:\n  --zzz  ")
    assert "--help all" in text


@pytest.mark.parametrize(("name", "word"), REQUIRED.items())
def test_a_missing_word_is_named(name: str, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"{word} is not given. Write `agentrl {name} {WORDS[name]}`." in refused(capsys, name)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("train", "--num-steps", "many"), "--num-steps = 'many': must be a valid integer. See `agentrl train --help`."),
        (("train", "--num-steps"), "--num-steps has no value. Write --num-steps VALUE."),
        (("train", "--reward-clip-range", "1"), "--reward-clip-range = '1': needs 2 values. Write --reward-clip-range VALUE VALUE."),
        (("inspect", "run", "--limit", "-3"), "--limit = -3: must be greater than or equal to 0. See `agentrl inspect --help`."),
        (("merge", "a", "--dtype", "int8"), "--dtype = 'int8': must be 'auto', 'float32' or 'bfloat16'. See `agentrl merge --help`."),
        (("plan", "--gpus", "none"), "--gpus = 'none': must be a valid integer. See `agentrl plan --help`."),
        (("scale", "run"), "--num-engines is not given. Write `agentrl scale run --num-engines N`."),
        (("--versoin",), "command = '--versoin': is not a command. Did you mean `agentrl --version`? Commands: train"),
        (("new", "a.py", "b.py"), "b.py  belongs to no flag; `agentrl new --help` shows the form"),
        (("train", "e.py", "--async", "true"), "true  belongs to no flag; what is on or off takes no value: write --name or --no-name"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_an_error_names_the_flag_the_value_and_the_remedy(words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in refused(capsys, *words)


def test_a_removed_current_directory_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    monkeypatch.setenv("PWD", "/here/gone")
    (tmp_path / "gone").rmdir()
    assert refused(capsys, "check", "e.py") == (
        "agentrl: current directory = '/here/gone': was removed. Change to one that exists: paths begin in it, and modules are looked for"
        " there.\n"
    )


@pytest.mark.parametrize("name", COMMANDS)
def test_flags_are_listed_for_completion(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [line.split()[0] for line in page(capsys, name, "--completion").splitlines()]
    assert {"--debug", "--help"} <= set(flags)
    assert len(set(flags)) == len(flags)


def test_choices_are_listed_for_completion(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--dtype auto float32 bfloat16" in page(capsys, "merge", "--completion").splitlines()


@pytest.mark.parametrize("columns", [80, 160])
def test_every_command_is_in_one_group(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    grouped = [name for names in GROUPS.values() for name in names]
    assert sorted(grouped) == sorted(COMMANDS)
    lines = usage().splitlines()
    assert [line.split()[0] for line in lines if line.startswith("  ") and line[2] not in " -C"] == grouped
    assert max(map(len, lines)) <= columns

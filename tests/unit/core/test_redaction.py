"""What looks like a credential is neither stored nor shown; everything else is."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from agentrl.cli import view
from agentrl.config.load import load
from agentrl.config.mapping import differences, to_json
from agentrl.config.methods import METHODS
from agentrl.config.sections import settings_of
from agentrl.core.errors import ConfigError, RemoteError
from agentrl.core.redaction import COLUMNS, redacted, redacted_words
from agentrl.inspect.reader import RunReader
from agentrl.resolve.commands import EVAL, SAMPLE, TRAIN
from agentrl.resolve.tune import TuneCommand
from agentrl.track.recorders import launch


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://me:s3cret@host:80/x", "http://***@host:80/x"),
        ("s3://KEY:SECRET@bucket/run", "s3://***@bucket/run"),
        ("https://host/x?api_key=abc&n=1", "https://host/x?api_key=***&n=1"),
        ("command:agent.py --api-key abc --turns 3", "command:agent.py --api-key *** --turns 3"),
        ("OPENAI_API_KEY=abc python agent.py", "OPENAI_API_KEY=*** python agent.py"),
        ("the token hf_abcdefghijklmnop is wrong", "the token *** is wrong"),
        ("sk-proj-abcdefgh12345", "***"),
        ("Authorization: Bearer abcdefgh.ijkl", "Authorization: Bearer ***"),
        ("--label-key answer --input-key=question", "--label-key answer --input-key=question"),
        ("--task-sampling learnability --max-new-tokens 64", "--task-sampling learnability --max-new-tokens 64"),
        ("http://localhost:8000/v1?n=1", "http://localhost:8000/v1?n=1"),
        ("mail me@example.com about 3 tokens", "mail me@example.com about 3 tokens"),
    ],
)
def test_credentials_in_a_text(text: str, shown: str) -> None:
    assert redacted(text) == shown


def test_words_of_a_command_line() -> None:
    words = ["train", "env.py", "--judge-api-key", "two words", "--token=abc", "--label-key", "answer", "WANDB_API_KEY=abc", "--password"]
    shown = ["train", "env.py", "--judge-api-key", "***", "--token=***", "--label-key", "answer", "WANDB_API_KEY=***", "--password"]
    assert redacted_words(words) == shown
    assert redacted_words(["--api-key", "--async"]) == ["--api-key", "--async"]


def test_settings_that_name_columns_stay_as_they_are() -> None:
    commands = [TRAIN, EVAL, SAMPLE, *(TuneCommand(method) for method in METHODS.values())]
    names = {name for command in commands for name in settings_of(command.settings) if name.endswith("_key")}
    assert names
    assert {name.removesuffix("_key") for name in names} <= COLUMNS


def test_messages_of_errors_have_none() -> None:
    error = ConfigError("--remote-rm-url", "http://me:pw@host", "is not there")
    assert str(error) == "--remote-rm-url = 'http://***@host': is not there"
    assert error.value == "http://me:pw@host", "a program still finds the value"
    assert "pw" not in str(RemoteError("http://me:pw@host/rm: answered 500"))


def test_a_run_directory_holds_none_and_its_settings_are_given_again(tmp_path: Path) -> None:
    words = ["--remote-rm-url", "http://me:s3cret@host:1/rm", "--prompts", str(tmp_path / "rows.jsonl")]
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    config = load(TRAIN, words)
    saved = tmp_path / "config.json"
    saved.write_text(to_json(config))
    assert "s3cret" in config.run.agent
    assert "s3cret" not in saved.read_text()
    with pytest.raises(ConfigError, match=r"--remote-rm-url = .*lacks its credentials, which are written to no file. Give it again"):
        load(TRAIN, ["--config", str(saved)])
    assert load(TRAIN, ["--config", str(saved), *words]).run.agent == config.run.agent
    assert not differences(json.loads(saved.read_text()), config), "a run that is resumed with the same words is the same run"


def test_the_record_of_a_launch_and_the_viewer_have_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["agentrl", "train", "--judge-api-key", "s3cret", "--remote-rm-url", "http://me:s3cret@host/rm"])
    assert launch()["command"] == "agentrl train --judge-api-key '***' --remote-rm-url 'http://***@host/rm'"
    older = {"command": "agentrl train --judge-api-key s3cret", "pid": 1}
    (tmp_path / "launches.jsonl").write_text(json.dumps(older) + "\n")
    (tmp_path / "config.json").write_text(json.dumps({"run": {"agent": "http://me:s3cret@host/rm"}}))
    (tmp_path / "metrics.jsonl").write_text("")
    reader = RunReader(tmp_path)
    shown = json.dumps([reader.launches, reader.directory.settings])
    assert ("s3cret" not in shown, shown.count("***")) == (True, 2)


def test_the_browser_gets_the_key_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(view.webbrowser, "open", opened.append)
    monkeypatch.setattr(view, "REDIRECT_S", 0.2)
    view._open("http://127.0.0.1:1/secret-key/")
    path = Path(opened[0].removeprefix("file://"))
    assert "secret-key" not in opened[0]
    assert path.stat().st_mode & 0o777 == 0o600
    assert "url=http://127.0.0.1:1/secret-key/" in path.read_text()
    deadline = time.monotonic() + 10
    while path.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not path.exists()

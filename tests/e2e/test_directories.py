"""Directories of runs: one writer each, and no harm from an environment that changes the working directory."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from agentrl.cli.main import main
from agentrl.core.directories import held_directory

WANDERER = """
import os, tempfile
import agentrl

class Wanderer(agentrl.AgentInstance):
    '''Change the working directory with every episode.'''

    @classmethod
    def tasks(cls):
        return [agentrl.Task(f"Say {word}.", label=word) for word in ("yes", "no", "up", "down")]

    def step(self, state):
        os.chdir(tempfile.mkdtemp())
        return agentrl.StepResult(len(state.action_text) % 7 / 7, terminated=True)
"""
SMALL = ("--num-steps", "1", "--groups-per-step", "1", "--n-samples-per-prompt", "2", "--max-new-tokens", "4", "--runtime", "local")
ENGINE = ("--engine", "transformers")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wanderer.py").write_text(WANDERER)
    return tmp_path


@pytest.mark.timeout(120)
def test_an_environment_may_change_the_working_directory(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "wanderer.py", "--run-dir", "runs/x", "--save-every", "1", "--skip-checks", "env", *SMALL, *ENGINE]) == 0, (
        capsys.readouterr().err
    )
    said = capsys.readouterr().out
    assert Path.cwd() == folder
    run = folder / "runs" / "x"
    assert {"config.json", "metrics.jsonl", "summary.json", "model", "checkpoints", "tensorboard"} <= {path.name for path in run.iterdir()}
    saved = json.loads((run / "config.json").read_text())
    assert (saved["training"]["run_dir"], saved["run"]["agent"]) == (str(run), str(folder / "wanderer.py"))
    assert "saved        runs/x\n" in said, "people see what they typed"
    os.chdir(folder)
    words = ["eval", "wanderer.py", "--model", "runs/x/model", *ENGINE, "--eval-size", "2", "--eval-samples", "1", "--output", "measured"]
    assert main(words) == 0, capsys.readouterr().err
    assert (folder / "measured" / "eval.json").is_file()
    os.chdir(folder)
    for more in (["--dry-run"], []):
        assert main(["train", "--resume", "runs/x", "--num-steps", "3", "--groups-per-step", "5", *more]) == 2
        told = "agentrl: --resume = 'runs/x': cannot go on, because it would be another run with --groups-per-step (was 1, now 5)"
        assert told in capsys.readouterr().err


def test_who_comes_second_is_told_who_was_first(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = folder / "data.jsonl"
    data.write_text(json.dumps({"prompt": "a", "completion": "b"}) + "\n")
    commands = {
        "--run-dir": (["train", "wanderer.py", *SMALL, *ENGINE], ["sft", "--data", str(data)], ["iterate", "sft", "wanderer.py"]),
        "--output": (["eval", "wanderer.py", *ENGINE], ["sample", "wanderer.py", *ENGINE]),
    }
    with held_directory(Path("taken")) as path:
        for flag, lines in commands.items():
            for words in lines:
                assert main([*words, flag, "taken"]) == 2
                told = capsys.readouterr().err
                assert f"agentrl: {flag} = 'taken': is being written to by process {os.getpid()} on " in told
        assert [file.name for file in path.iterdir()] == [".lock"], "nothing may be mixed"

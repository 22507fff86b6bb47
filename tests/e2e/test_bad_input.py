"""Whatever is wrong with what the user gave: one clear message, exit code 2 before engines start, nothing left behind."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from agentrl.assets import tiny_model_path
from agentrl.cli.main import main
from tests.e2e.runs import ENVS, SMALL, train

GOOD = "from agentrl import AgentInstance, StepResult, Task\n\nclass Env(AgentInstance):\n"
TASKS = "    @classmethod\n    def tasks(cls):\n        return [Task('Say cat', label='cat')]\n"
STEP = "    def step(self, state):\n        return StepResult(1.0, terminated=True)\n"


def refused(capfd: pytest.CaptureFixture[str], *args: str) -> str:
    """The message of a command that is refused with exit code 2, without a traceback."""
    assert main(["train", *args]) == 2
    error = capfd.readouterr().err
    assert error.startswith("agentrl: ")
    assert "Traceback" not in error
    return error


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_nothing_given(capfd: pytest.CaptureFixture[str]) -> None:
    assert "--agent = '': no environment is named" in refused(capfd)


def test_a_flag_without_its_value(capfd: pytest.CaptureFixture[str]) -> None:
    assert "needs a file name" in refused(capfd, "--config")


def test_missing_file(capfd: pytest.CaptureFixture[str]) -> None:
    assert "--agent = 'no/such.py': no such file" in refused(capfd, "--agent", "no/such.py")


def test_class_without_step(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "env.py", GOOD + TASKS)
    assert "class Env has no method step" in refused(capfd, "--agent", file)


def test_file_that_does_not_import(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    message = refused(capfd, "--agent", write(tmp_path / "env.py", "import nothing_of_that_name\n"))
    assert "nothing_of_that_name" in message
    assert "line 1" in message


def test_environment_without_tasks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    message = refused(capfd, "--agent", write(tmp_path / "env.py", GOOD + STEP))
    assert "--prompts" in message
    assert "tasks()" in message


def test_model_that_does_not_exist(capfd: pytest.CaptureFixture[str]) -> None:
    assert "--model = './no/model'" in refused(capfd, "--agent", str(ENVS / "arithmetic.py"), "--model", "./no/model")


@pytest.mark.slow
def test_model_without_tokenizer(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model_path(), model, ignore=shutil.ignore_patterns("tokenizer*", "chat_template*"))
    run = train(tmp_path / "run", "--runtime", "local", "--model", str(model), *SMALL)
    assert run.code == 2, run.output
    assert "tokenizer" in run.output
    assert "Traceback" not in run.output


def test_prompt_longer_than_the_context(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    long = TASKS.replace("Say cat", "cat " * 3000)
    file = write(tmp_path / "env.py", GOOD + long + STEP)
    message = refused(capfd, "--agent", file, "--run-dir", str(tmp_path / "run"), "--runtime", "local")
    assert "the prompt of task '0'" in message
    assert "--max-model-len" in message


def test_prompts_without_the_column(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    prompts = write(tmp_path / "p.jsonl", json.dumps({"question": "x"}) + "\n")
    message = refused(capfd, "--agent", str(ENVS / "arithmetic.py"), "--prompts", prompts, "--run-dir", str(tmp_path / "run"))
    assert "prompt" in message
    assert "question" in message


@pytest.mark.parametrize(
    ("args", "flag"),
    [
        (["--n-samples-per-prompt", "1"], "--n-samples-per-prompt"),
        (["--colocate"], "--colocate"),
    ],
)
def test_settings_that_cannot_work(capfd: pytest.CaptureFixture[str], args: list[str], flag: str) -> None:
    assert flag in refused(capfd, "--agent", str(ENVS / "arithmetic.py"), *args)


def test_directory_of_another_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "metrics.jsonl", "{}")
    assert "already holds a run" in refused(capfd, "--agent", str(ENVS / "arithmetic.py"), "--run-dir", str(tmp_path))
    (tmp_path / "metrics.jsonl").unlink()
    write(tmp_path / "eval.json", "{}")
    assert "already holds an evaluation" in refused(capfd, "--agent", str(ENVS / "arithmetic.py"), "--run-dir", str(tmp_path))


def test_environment_that_returns_the_wrong_thing_stops_the_run(tmp_path: Path) -> None:
    file = write(tmp_path / "env.py", GOOD + TASKS + "    def step(self, state):\n        return {'rewards': float('nan'), 'done': True}\n")
    run = train(tmp_path / "run", "--runtime", "local", "--num-steps", "2", *SMALL, agent=file)
    assert run.code == 1, run.output
    assert "env.py: Env.step" in run.output
    assert "nan" in run.output
    assert "Traceback" not in run.output
    assert run.summary["status"] == "failed"
    assert run.summary["ledger"].get("trained", 0) == 0


def test_unknown_command_names_the_known_ones(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2
    assert "train" in capfd.readouterr().err
    assert main(["--help"]) == 0
    assert "agentrl train" in capfd.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_on_ray_the_cause_is_shown_once_and_without_its_traceback(tmp_path: Path) -> None:
    preload = "    @classmethod\n    def preload(cls):\n        raise FileNotFoundError('the word list is missing')\n"
    file = write(tmp_path / "env.py", GOOD + TASKS + preload + STEP)
    run = train(tmp_path / "run", "--num-steps", "2", "--skip-checks", "env", *SMALL, agent=file)
    assert run.code == 2, run.output
    assert run.output.count("the word list is missing") == 1, run.output
    assert "Traceback" not in run.output
    assert "Unhandled" not in run.output

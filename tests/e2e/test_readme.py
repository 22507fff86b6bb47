"""Every command and every block of README.md works; so does every example."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from agentrl import Task
from agentrl.suites.load import load_agent
from tests.e2e import forked
from tests.e2e.runs import ROOT, SMALL, Run, command, succeeded, train

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, flags=re.DOTALL)
COMMANDS = [
    shlex.split(line.partition("#")[0])
    for kind, text in BLOCKS
    if kind == "bash"
    for line in text.splitlines()
    if line.partition("#")[0].strip()
]
AGENTRL = [words[1:] for words in COMMANDS if words[0].endswith("/agentrl")]
SHORT = ("--runtime", "local", "--num-steps", "1", *SMALL)


def test_every_command_is_of_a_known_kind() -> None:
    assert {words[0] for words in COMMANDS} == {"make", ".venv/bin/agentrl"}
    assert len(AGENTRL) >= 5


def test_make_targets_exist() -> None:
    targets = [words[1] for words in COMMANDS if words[0] == "make"]
    assert targets == ["demo", "test"]
    for target in targets:
        subprocess.run(["make", "--dry-run", target], cwd=ROOT, check=True, capture_output=True)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("words", AGENTRL, ids=" ".join)
def test_command_runs(words: list[str], tmp_path: Path) -> None:
    """As it stands, but for its length and the place of its results."""
    extra = () if {"--help", "--dry-run"} & set(words) else (*SHORT, "--run-dir", str(tmp_path / "run"))
    code, output = forked.run([*words, *extra], {}, 110)
    assert code == 0, f"{command(*words, *extra)}\n{output}"
    if extra:
        assert (tmp_path / "run" / "summary.json").exists()


def test_the_environment_shown_is_the_example(tmp_path: Path) -> None:
    (block,) = [text for kind, text in BLOCKS if kind == "python" and "(AgentInstance)" in text]
    assert len(block.strip().splitlines()) <= 20
    (tmp_path / "shown.py").write_text(block)
    shown, example = load_agent(str(tmp_path / "shown.py")).load(), load_agent(str(ROOT / "examples" / "parity.py")).load()
    assert list(shown.tasks()) == list(example.tasks())
    assert isinstance(shown.tasks()[0], Task)


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)", README):
        assert (ROOT / target).exists(), target


@pytest.mark.timeout(120)
def test_example_in_dictionary_form(tmp_path: Path) -> None:
    prompts = ("--prompts", "examples/reverse.jsonl", "--input-key", "question", "--label-key", "answer")
    run: Run = succeeded(train(tmp_path / "run", *SHORT, *prompts, agent="examples/dictionary_form.py"))
    assert run.metrics[0]["env/tries"] >= 1

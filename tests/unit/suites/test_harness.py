"""Agent programs by name: how they are found, started, shown to their sandbox, and refused."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from agentrl.core.errors import ConfigError, EnvLoadError
from agentrl.harness import DIALECTS, HARNESSES
from agentrl.resolve.commands import load_config
from agentrl.suites.harness import places_of, version_of
from agentrl.suites.load import load_agent
from tests.harness_matrix import COLUMNS, ROOT
from tests.harnesses.support import installed, toy
from tests.unit.rollout.endpoint.support import play_one

EDIT = '<tool_call>\n{"name": "edit", "arguments": {"path": "notes.txt", "old": "one", "new": "three"}}\n</tool_call>'


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setitem(HARNESSES, "toy", toy())  # type: ignore[arg-type]
    return installed(tmp_path)


@pytest.mark.anyio
async def test_a_program_works_in_a_folder_and_is_judged(program: Path, tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "notes.txt").write_text("one")
    (tmp_path / "judge.py").write_text(
        "import os\nprint(float(open('notes.txt').read() == os.environ['AGENTRL_LABEL'] and not os.path.exists('.toy')))\n"
    )
    judge = f"#judge={sys.executable} {tmp_path}/judge.py#files={tmp_path}/files"
    cls: Any = load_agent(f"harness:toy?program={program}{judge}").load()
    _, trajectory = await play_one(cls, "A title", EDIT, "done", sandbox="none")
    assert (trajectory.error, trajectory.reward) == (None, 1.0)
    assert (trajectory.metrics["endpoint/branches"], trajectory.metrics["endpoint/requests"]) == (2.0, 3.0)


@pytest.mark.anyio
async def test_a_reward_function_judges_what_a_program_prints(program: Path, tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text("def reward(completion, label):\n    return float(completion.strip() == label) / 2\n")
    agent = load_agent(f"harness:toy?program={program}#reward={tmp_path}/reward.py")
    _, trajectory = await play_one(agent.load(), "A title", "three", sandbox="none")
    assert (trajectory.error, trajectory.reward) == (None, 0.5)
    assert (
        load_agent(agent.spec).spec
        == agent.spec
        == f"harness:toy?dialect=chat&brief=False&program={program}#reward={tmp_path}/reward.py:reward"
    )


SHOWS = "import os, sys\nprint(open(os.environ['HOME'] + '/.toy/settings.json').read(), sys.argv[1:])\n"


@pytest.fixture
def showing(program: Path) -> Path:
    """A program that prints its settings and its words."""
    program.write_text(f"#!{sys.executable} -S\n{SHOWS}")
    return program


@pytest.mark.anyio
async def test_settings_are_written_and_a_brief_start_has_more_words(showing: Path) -> None:
    cls: Any = load_agent(f"harness:toy?brief=True&program={showing}#judge=echo 1").load()
    printed: list[str] = []

    class Kept(cls):
        async def _judge(self, task: Any, work: Path, output: str) -> Any:
            printed.append(output)
            return await super()._judge(task, work, output)

    await play_one(Kept, "", sandbox="none")
    settings, words = printed[0].split(" [")
    assert json.loads(settings)["context"] == 4096
    assert json.loads(settings)["address"].endswith("/v1")
    assert words.startswith("'--brief', 'policy', 'What is")


@pytest.mark.parametrize(
    ("spec", "problem", "remedy"),
    [
        ("harness:codec", "there is no harness 'codec'", "codex"),
        ("harness:toy?speed=2", "there is no option 'speed'", "harness:NAME"),
        ("harness:toy?brief=yes", "brief = 'yes' is out of range", "harness:NAME"),
        ("harness:toy?dialect=messages", "Toy does not speak it", "It speaks chat."),
        ("harness:toy", "there is no program 'toy'", "npm install -g toy@1.0"),
        ("harness:toy?program=/nowhere/toy", "there is no program '/nowhere/toy'", "?program=PATH"),
    ],
)
def test_what_cannot_be_started_is_refused(spec: str, problem: str, remedy: str, program: Path) -> None:
    with pytest.raises(EnvLoadError) as caught:
        load_agent(spec)
    assert problem in str(caught.value)
    assert remedy in caught.value.remedy


@pytest.mark.linux
def test_reward_is_a_flag_of_programs(program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    (tmp_path / "r.py").write_text("def reward(completion):\n    return 1.0\n")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "go"}\n')
    monkeypatch.chdir(tmp_path)
    words = ["--agent", f"harness:toy?program={program}", "--prompts", "rows.jsonl"]
    agent = load_config([*words, "--reward", "r.py"]).run.agent
    assert agent == f"harness:toy?program={program}#reward={tmp_path}/r.py"
    assert load_config(["--agent", agent, "--reward", "r.py", *words[2:]]).run.agent == agent  # as a resumed run has it
    for more, problem in (((), "nothing says what a session is worth"), (("--reward", "http://a/b"), "is no Python file")):
        with pytest.raises(ConfigError, match=problem):
            load_config([*words, *more])
    with pytest.raises(ConfigError, match="says already what judges"):
        load_config(["--agent", f"command:ls {{prompt}}#judge={sys.executable}", "--reward", "r.py", *words[2:]])


def test_the_folders_of_an_installation_are_shown(tmp_path: Path) -> None:
    package = tmp_path / "node_modules" / "toy"
    (package / "node_modules" / "inner").mkdir(parents=True)
    (package / "package.json").write_text('{"version": "1.2.3"}')
    assert places_of(package / "node_modules" / "inner" / "run.js")[0] == tmp_path / "node_modules"
    assert version_of(toy(), package / "run.js") == "1.2.3"
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "pyvenv.cfg").write_text("home = /opt/python/bin\nversion = 3.12.1\n")
    (venv / "lib" / "python3.12" / "site-packages" / "toy-2.0.dist-info").mkdir(parents=True)
    assert places_of(venv / "bin" / "toy") == [venv, Path("/opt/python")]
    assert version_of(toy(), venv / "bin" / "toy") == "2.0"
    assert (places_of(tmp_path / "toy"), version_of(toy(), tmp_path / "toy")) == ([tmp_path / "toy"], "")


def test_pins_with_hashes_are_those_of_the_table() -> None:
    pinned = "".join((ROOT / "requirements" / name).read_text() for name in ("clients.txt", "aider.txt"))
    for harness in HARNESSES.values():
        assert harness.installer == "npm" or f"\n{harness.package}=={harness.version} \\\n" in pinned


def test_the_page_has_the_versions_of_the_table() -> None:
    lines = (ROOT / "docs" / "harnesses.md").read_text().splitlines()
    for harness in HARNESSES.values():
        rows = [line.split(" | ") for line in lines if line.startswith(f"| {harness.title} | ") and line.count(" | ") == len(COLUMNS) - 1]
        assert {row[1] for row in rows} == {harness.version}
        assert {row[2] for row in rows} <= {DIALECTS[dialect] for dialect in harness.dialects}
        if harness.title in ("Claude Code", "Codex", "opencode"):
            assert {tuple(row[6:9:2]) for row in rows} == {("1", "0")}  # one row, and nothing wasted


def test_each_program_of_the_table_is_complete() -> None:
    for name, harness in HARNESSES.items():
        assert set(harness.dialects) <= set(DIALECTS), name
        assert any("{prompt}" in word for word in harness.task), name
        assert harness.version in harness.install
        assert harness.writes

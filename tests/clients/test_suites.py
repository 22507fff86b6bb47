"""Suites whose environments are programs, each with the real package: episodes, and check, eval and training on the real stack."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from agentrl.assets import tiny_model_path
from agentrl.core.errors import EnvLoadError
from agentrl.core.types import Status
from agentrl.suites.load import load_agent
from tests.clients.test_clients import VENV
from tests.e2e.everywhere import runs_everywhere
from tests.unit.examples.test_agents import play_class

pytestmark = [pytest.mark.clients, pytest.mark.anyio, pytest.mark.timeout(600)]

HERE = Path(__file__).parent
INSPECT = f"inspect:{HERE / 'inspect_sums.py'}"
PYTHON = f"python={VENV}/bin/python"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


async def played(spec: str, *texts: str) -> Any:
    cls: Any = load_agent(spec).load()
    (trajectory,) = await play_class(cls, next(iter(cls.tasks())), *texts)
    return trajectory


async def test_samples_of_an_inspect_task_are_solved_and_scored() -> None:
    right = await played(f"{INSPECT}@sums?{PYTHON}", CALL, "LABEL")
    assert (right.error, right.reward, len(right.turns), right.metrics["match"]) == (None, 1.0, 2, 1.0)
    assert right.metrics["endpoint/branches"] == 1.0
    wrong = await played(f"{INSPECT}@sums?{PYTHON}", "no idea")
    assert (wrong.error, wrong.reward, wrong.status) == (None, 0.0, Status.FINISHED)


async def test_what_inspect_cannot_score_is_a_failure() -> None:
    broken = await played(f"{INSPECT}@broken?{PYTHON}", "3")
    assert (broken.status, broken.reward) == (Status.ENV_ERROR, None)
    assert "no disk" in broken.error
    unnamed = await played(f"{INSPECT}@judged_twice?{PYTHON}", "3")
    assert (unnamed.status, unnamed.reward) == (Status.ENV_ERROR, None)
    assert "the scores are match, includes; name the one that is the reward" in unnamed.error
    named = await played(f"{INSPECT}@judged_twice?{PYTHON}&score=includes", "It is 3, not 4.")
    assert (named.error, named.reward, named.metrics["match"], named.status) == (None, 1.0, 0.0, Status.FINISHED)
    cut = await played(f"{INSPECT}@cut?{PYTHON}", CALL)
    assert (cut.error, cut.reward, cut.status) == (None, 0.0, Status.TRUNCATED)


def test_options_are_arguments_of_the_task_and_a_wrong_one_is_told() -> None:
    assert [task.label for task in load_agent(f"{INSPECT}@sums?last=2&{PYTHON}").load().tasks() or ()] == ["3", "4"]
    with pytest.raises(EnvLoadError, match="could not be listed"):
        load_agent(f"{INSPECT}@nothing?{PYTHON}").load().tasks()


def test_an_inspect_task_is_checked_evaluated_and_trained(tmp_path: Path) -> None:
    runs_everywhere(tmp_path, f"{INSPECT}@sums?{PYTHON}")


@pytest.fixture
def verifiers(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """verifiers in this process; returns the variables that give it to others."""
    folder = str(VENV / "verifiers")
    monkeypatch.syspath_prepend(folder)
    return {"PYTHONPATH": os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), folder)))}


@pytest.mark.usefixtures("verifiers")
async def test_a_rollout_of_verifiers_with_a_tool_is_one_row() -> None:
    right = await played(str(HERE / "verifiers_tool.py"), CALL, "It is LABEL.")
    assert (right.error, right.reward, len(right.turns)) == (None, 1.0, 2)
    assert (right.metrics["calls"], right.metrics["endpoint/branches"]) == (1.0, 1.0)
    assert "3" in right.turns[1].prompt_text
    wrong = await played(str(HERE / "verifiers_tool.py"), "no idea")
    assert (wrong.error, wrong.reward) == (None, 0.0)


V1 = VENV / "verifiers-v1" / "bin" / "python"
SUMS = f"verifiers:verifiers_sums?python={V1}"


@pytest.fixture
def task_sets(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The task set of this folder is importable where verifiers 0.4 is."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(HERE)))))
    return {"PYTHONPATH": os.environ["PYTHONPATH"]}


@pytest.mark.usefixtures("task_sets")
async def test_an_episode_of_a_task_set_has_tools_turns_and_a_score() -> None:
    right = await played(f"{SUMS}&last=1", CALL.replace('"add"', '"sums_add"'), "It is LABEL.")
    assert (right.error, right.reward, len(right.turns), right.metrics["right"]) == (None, 1.0, 2, 1.0)
    assert right.metrics["endpoint/branches"] == 1.0
    assert "3" in right.turns[1].prompt_text
    wrong = await played(f"{SUMS}&num_tasks=1", "no idea")
    assert (wrong.error, wrong.reward, wrong.status) == (None, 0.0, Status.FINISHED)


@pytest.mark.usefixtures("task_sets")
async def test_a_user_of_a_task_set_talks_in_every_turn_and_its_words_are_read() -> None:
    right = await played(f"verifiers:verifiers_talk?python={V1}&num_tasks=1", "0", "2", "LABEL")
    assert (right.error, right.reward, right.status, len(right.turns)) == (None, 1.0, Status.FINISHED, 3)
    assert ["+2" in right.turns[1].prompt_text, "+3" in right.turns[2].prompt_text] == [True, True]
    assert right.metrics["endpoint/branches"] == 1.0


OWN = Path(os.environ.get("VERIFIERS_ENVIRONMENTS", "/nowhere"))
"""The folder ``environments`` of a copy of verifiers' repository."""


@pytest.mark.skipif(not OWN.is_dir(), reason="VERIFIERS_ENVIRONMENTS names no folder with the environments of verifiers' repository")
@pytest.mark.parametrize("name", ["glossary", "scratchpad"])
def test_task_sets_of_its_own_repository_are_checked_evaluated_and_trained(name: str, tmp_path: Path, long_model: Path) -> None:
    runs_everywhere(tmp_path, f"verifiers:{name}?python={V1}&num_tasks=2", env={"PYTHONPATH": str(OWN / name)}, model=long_model)


@pytest.mark.usefixtures("task_sets")
async def test_errors_of_a_task_set_are_shown_whole_and_are_no_reward() -> None:
    broken = await played(f"{SUMS}&is_broken=True", "1")
    assert (broken.status, broken.reward) == (Status.ENV_ERROR, None)
    assert "ValueError" in broken.error
    assert "no disk\nis left" in broken.error
    running = await played(f"{SUMS}&env.agent.harness.id=bash", "1")
    assert (running.status, running.reward) == (Status.ENV_ERROR, None)
    assert "the harness 'bash' of 'agent' runs commands of the model on this machine, outside of a sandbox" in running.error
    with pytest.raises(EnvLoadError, match=r"its samples could not be listed: ValidationError: (.|\n)*last(.|\n)*valid integer"):
        load_agent(f"{SUMS}&last=many").load().tasks()


def test_a_task_set_is_checked_evaluated_and_trained(tmp_path: Path, task_sets: dict[str, str], long_model: Path) -> None:
    runs_everywhere(tmp_path, f"{SUMS}&last=2", env=task_sets, model=long_model)


PUBLISHED = ("verifiers:stardata.envs.constraint_gym", "verifiers:sophistry-bench-sprint?n_items=4&passage_chars=100")
"""Environments that others have published on PyPI."""


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model with a context for prompts of 1,000 characters, of which it makes as many tokens."""
    return long_model_in(tmp_path_factory.mktemp("model") / "long", 4096)


def long_model_in(folder: Path, length: int) -> Path:
    """Write the bundled model with a longer context; its positions are rotations, so it has the same weights."""
    shutil.copytree(tiny_model_path(), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": length}))
    return folder


@pytest.mark.parametrize("spec", [str(HERE / "verifiers_single.py"), str(HERE / "verifiers_tool.py"), *PUBLISHED])
def test_environments_of_verifiers_are_checked_evaluated_and_trained(
    spec: str, tmp_path: Path, verifiers: dict[str, str], long_model: Path
) -> None:
    runs_everywhere(tmp_path, spec, env=verifiers, model=long_model)

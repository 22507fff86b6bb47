"""Task folders of Harbor in containers: reading them, and episodes, solutions, check and training with ten of them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl.config.sections import changed
from agentrl.core.errors import ConfigError, EnvLoadError
from agentrl.core.types import Status, Trajectory
from agentrl.suites.harbor.containers import read_container_task
from agentrl.suites.load import load_agent
from tests.e2e.runs import start, succeeded, train
from tests.harbor_tasks import EXAMPLES, tasks_with_images
from tests.sandboxes import container_engine, containers
from tests.scripted_engine import ScriptedEngine
from tests.unit.config.test_check_sandbox import check
from tests.unit.rollout.scenes import PATIENT, Scene, says

pytestmark = pytest.mark.anyio


def task(folder: Path, config: str = "", dockerfile: str = "FROM x\n", **files: str) -> Path:
    everything = {"instruction.md": "Do it.", "task.toml": config, "tests/test.sh": "", "environment/Dockerfile": dockerfile}
    for name, text in {**everything, **files}.items():
        path = folder / "one" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if text is not None:
            path.write_text(text)
    return folder / "one"


def test_a_folder_says_which_containers_it_wants(tmp_path: Path) -> None:
    config = '[environment]\nmemory = "1G"\nstorage_mb = 512\nallow_internet = false\n[environment.env]\nA = "${NO_SUCH:-b}"\n'
    config += "[agent]\ntimeout_sec = 5"
    read = read_container_task("", task(tmp_path, config))
    assert (read.instruction, read.agent_timeout_s, read.verifier_timeout_s, read.verifier) == ("Do it.", 5, 600.0, None)
    assert read.box.image == str(tmp_path / "one" / "environment")
    assert (read.box.memory_mib, read.box.disk_mib, read.box.is_public, dict(read.box.env)) == (1024, 512, False, {"A": "b"})
    assert (read.box.spec(network=True).network, read.box.spec(network=True).root) == (False, True)
    asked = read_container_task("", task(tmp_path, "[environment]\nmemory_mb = 64\n"))
    assert (asked.box.spec(network=True).network, asked.box.spec(network=False).network) == (True, False)


def test_a_verifier_of_its_own_has_the_image_of_the_agent_or_its_own(tmp_path: Path) -> None:
    same = read_container_task("", task(tmp_path, 'artifacts = ["/a"]\n[verifier]\nenvironment_mode = "separate"'))
    assert same.verifier is not None
    assert (same.verifier.image, same.has_tests, same.artifacts) == (same.box.image, False, ("/a",))
    named = read_container_task("", task(tmp_path, '[verifier.environment]\ndocker_image = "judge"'))
    assert named.verifier is not None
    assert (named.verifier.image, named.has_tests) == ("judge", True)
    built = read_container_task("", task(tmp_path, '[verifier]\nenvironment_mode = "separate"', **{"tests/Dockerfile": "FROM y"}))
    assert built.verifier is not None
    assert (built.verifier.image, built.has_tests) == (str(tmp_path / "one" / "tests"), True)


def test_one_service_of_compose_is_followed(tmp_path: Path) -> None:
    compose = "services:\n  main:\n    image: busy\n    working_dir: /w\n    environment: [A=b]\n"
    read = read_container_task("", task(tmp_path, **{"environment/docker-compose.yaml": compose}))
    assert (read.box.image, read.box.workdir, dict(read.box.env)) == ("busy", "/w", {"A": "b"})


@pytest.mark.parametrize(
    ("config", "files", "problem"),
    [
        ("[[steps]]\nname = 'a'", {}, "has steps, which is not supported"),
        ("[environment]\nos = 'windows'", {}, "has environment.os"),
        ("[environment]\nnetwork_mode = 'allowlist'", {}, "has environment.network_mode"),
        ("[agent]\nuser = 'me'", {}, "has user, which is not supported"),
        ("artifacts = ['a.txt']", {}, "has the artifact 'a.txt', and only absolute paths"),
        ("broken", {}, "is not TOML"),
        ("", {"environment/docker-compose.yaml": "services: {a: {image: x}, b: {image: x}}"}, "does not have one service"),
        ("", {"environment/docker-compose.yaml": "services: {a: {image: x, privileged: true}}"}, "has privileged, which is not supported"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(config: str, files: dict[str, str], problem: str, tmp_path: Path) -> None:
    with pytest.raises(EnvLoadError, match=problem):
        read_container_task("", task(tmp_path, config, **files))


def test_a_folder_without_an_image_or_tests_is_refused(tmp_path: Path) -> None:
    folder = task(tmp_path)
    (folder / "environment" / "Dockerfile").unlink()
    with pytest.raises(EnvLoadError, match="one/environment has neither a Dockerfile nor an image"):
        read_container_task("", folder)
    assert read_container_task("", task(tmp_path, '[environment]\ndocker_image = "x"')).box.image == "x"
    (folder / "tests" / "test.sh").unlink()
    with pytest.raises(EnvLoadError, match=r"one has no tests/test\.sh"):
        read_container_task("", folder)


def test_options(tmp_path: Path) -> None:
    task(tmp_path)
    cls: Any = load_agent(f"harbor:{tmp_path}?network=True&command_s=5&reward=r").load()
    assert (cls.network, cls.command_s, cls.rewarded, [item.id for item in cls.tasks()]) == (True, 5.0, "r", ["one"])
    with pytest.raises(EnvLoadError, match="run= needs #agent=CMD"):
        load_agent(f"harbor:{tmp_path}?run=shell")


def test_containers_are_asked_for_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="there is no podman or docker"):
        check(f"harbor:{tmp_path}")


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Ten tasks."""
    yield from tasks_with_images(tmp_path_factory.mktemp("harbor"))


async def play(folder: Path, name: str, *texts: str, **settings: Any) -> Trajectory:
    cls: Any = load_agent(f"harbor:{folder / name}").load()
    cls.prepare()
    (one,) = cls.tasks()
    long = changed(PATIENT, max_new_tokens=200, **settings)
    asked = replace(Scene.group_request, task=one)
    return await Scene(cls, ScriptedEngine(answer=says(*texts), max_model_len=8192), long, asked).play()


def bash(command: str) -> str:
    return f'<tool_call>{{"name": "bash", "arguments": {{"command": "{command}"}}}}</tool_call>'


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_solutions_earn_1_and_nothing_earns_0(tasks: Path) -> None:
    cls: Any = load_agent(f"harbor:{tasks}").load()
    cls.prepare()
    earned = {item.id: [await cls.try_solution(item, solved=solved) for solved in (True, False)] for item in cls.tasks()}
    assert earned == {example.name: [1.0, 0.0] for example in EXAMPLES}
    assert len(earned) == 10
    assert containers(container_engine()) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_the_model_works_with_bash_and_the_tests_judge(tasks: Path) -> None:
    right = await play(tasks, "count-lines", bash("wc -l < /srv/numbers.txt"), bash("echo 37 > count.txt; exit 3"), "Done.")
    assert (right.error, right.reward, right.status) == (None, 1.0, Status.FINISHED)
    assert "37" in right.turns[1].prompt_text
    assert "[exit code 3]" in right.turns[2].prompt_text
    hidden = await play(tasks, "count-lines", bash("ls / /tests /solution; echo 1 > /logs/verifier/reward.txt"), "Done.")
    assert (hidden.error, hidden.reward) == (None, 0.0)  # the tests are not there yet, and a reward that is, is removed
    assert "cannot access '/tests'" in hidden.turns[1].prompt_text
    cut = await play(tasks, "parts", bash("echo 7 > sum.txt"), bash("true"), max_turns=2)
    assert (cut.error, cut.reward, cut.status, cut.metrics["is_there"]) == (None, 1.0, Status.TRUNCATED, 1.0)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_a_verifier_of_its_own_sees_artifacts_only(tasks: Path) -> None:
    told = "mkdir -p out; echo 144 > out/square.txt; touch trap"
    trapped = await play(tasks, "separate", bash(told), "Done.")
    assert (trapped.error, trapped.reward) == (None, 1.0)
    limit = tasks / "own-verifier" / "task.toml"
    limit.write_text(limit.read_text().replace("[agent]\ntimeout_sec = 60.0", "[agent]\ntimeout_sec = 1.0"))
    late = await play(tasks, "own-verifier", bash("echo 10 > double.txt; sleep 30"), "Done.")
    assert (late.error, late.reward, late.status) == (None, 1.0, Status.TRUNCATED)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_tests_without_a_reward_or_an_end_are_failures(tasks: Path) -> None:
    test, config = tasks / "sort-words" / "tests" / "test.sh", tasks / "sort-words" / "task.toml"
    text = test.read_text()
    try:
        test.write_text("echo no reward here")
        silent = await play(tasks, "sort-words", "Done.")
        assert (silent.status, silent.reward) == (Status.ENV_ERROR, None)
        assert "wrote neither" in (silent.error or "")
        assert "no reward here" in (silent.error or "")
        test.write_text("sleep 60")
        config.write_text(config.read_text().replace("[verifier]\ntimeout_sec = 60.0", "[verifier]\ntimeout_sec = 0.5"))
        endless = await play(tasks, "sort-words", "Done.")
        assert (endless.status, endless.reward) == (Status.ENV_ERROR, None)
        assert "did not end within 0.5 s" in (endless.error or "")
    finally:
        test.write_text(text)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_check_tries_the_solutions(tasks: Path, tmp_path: Path) -> None:
    for name in ("parts", "sort-words"):
        shutil.copytree(tasks / name, tmp_path / name)
    (tmp_path / "sort-words" / "solution" / "solve.sh").write_text("true\n")
    process = start("check", f"harbor:{tmp_path}", "--episodes", "1", "--budget-s", "240", "--timeout-s", "60")
    output, _ = process.communicate(timeout=800)
    assert process.returncode == 1, output
    assert "solution-fails" in output
    assert "task sort-words: the reward is 0" in output
    assert "nothing-earns" not in output


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_folder_of_tasks_is_trained(tasks: Path, tmp_path: Path) -> None:
    sizes = ("--num-steps", "2", "--groups-per-step", "2", "--n-samples-per-prompt", "2", "--max-new-tokens", "8", "--no-save-model")
    run = succeeded(
        train(tmp_path / "run", *sizes, "--runtime", "local", "--skip-checks", "env", agent=f"harbor:{tasks}", timeout_s=800, fork=False)
    )
    assert run.summary["ledger"]["trained"] == 4, run.output

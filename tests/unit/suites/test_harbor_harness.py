"""Task folders of Harbor with an agent program: in a folder that plays the container, and in containers."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrl.core.errors import EnvLoadError, SandboxError
from agentrl.core.types import Status, Trajectory
from agentrl.env.black_box import ModelEndpoint
from agentrl.env.isolation.system import ProcessLimits
from agentrl.env.sandbox.spec import SandboxChoice, use_choice
from agentrl.harness import HARNESSES
from agentrl.suites.harbor import trial
from agentrl.suites.harbor.agent import HarborProgram
from agentrl.suites.load import load_agent
from tests.e2e.runs import succeeded, train
from tests.folder_box import FolderBox, programs
from tests.harbor_tasks import tasks_with_images
from tests.sandboxes import container_engine, containers
from tests.unit.examples.test_agents import play_class

pytestmark = pytest.mark.anyio

AGENT = Path(__file__).parents[3] / "examples" / "command_line" / "agent.py"
CONFIG = (
    '[environment]\ndocker_image = "x"\nmemory_mb = 256\nworkdir = "/app"\nallow_internet = {internet}\n[environment.env]\nPLACE = "lake"\n'
)
TEST = '#!/bin/sh\n[ "$(cat result.txt)" = lemon ]; echo $((1 - $?)) > ../logs/verifier/reward.txt\n'


def program(folder: Path, python: str = f"{sys.executable} -S") -> Path:
    """Write the agent of the examples as a program that is started as mini-swe-agent is."""
    path = folder / "mini"
    task = "sys.argv[-1].removeprefix('--task=')"
    path.write_text(f"#!{python}\n{AGENT.read_text().replace('sys.argv[1]', task)}")
    path.chmod(0o755)
    return path


def written(folder: Path, config: str = CONFIG.format(internet="true"), test: str = TEST) -> Path:
    """Write one task."""
    for name, text in {"instruction.md": "Write lemon to /app/result.txt.", "task.toml": config, "tests/test.sh": test}.items():
        path = folder / "one" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / "one"


@pytest.fixture(autouse=True)
def boxes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[FolderBox]:
    """The containers of a test that has none."""
    if "slow" not in request.keywords:
        monkeypatch.setattr(trial, "Sandbox", FolderBox)
        monkeypatch.setattr(FolderBox, "boxes", [])
    return FolderBox.boxes


async def played(task: Path, runs: Path, *texts: str, options: str = "") -> Trajectory:
    cls: Any = load_agent(f"harbor:{task}{options}#harness=mini-swe-agent?program={runs}").load()
    (trajectory,) = await play_class(cls, next(iter(cls.tasks())), *texts)
    return trajectory


async def test_a_program_works_in_the_container_and_the_tests_judge(tmp_path: Path, boxes: list[FolderBox]) -> None:
    task, runs = written(tmp_path), program(tmp_path)
    right = await played(task, runs, "echo $PLACE; printf lemon > result.txt", "DONE")
    assert (right.error, right.reward, right.status) == (None, 1.0, Status.FINISHED)
    assert "lake" in right.turns[1].prompt_text
    wrong = await played(task, runs, "printf leek > result.txt", "DONE")
    assert (wrong.error, wrong.reward, len(boxes)) == (None, 0.0, 2)
    (ran,) = programs(boxes[0])
    assert (ran.words[0], ran.words[-1]) == (str(runs), "--task=Write lemon to /app/result.txt.")
    assert (ran.had_tests, ran.timeout_s, boxes[0].ran[-1].words[-1]) == (False, math.inf, "/tests/test.sh")
    assert ran.env["HOME"] == str(boxes[0].folder / "home")
    assert ran.env["OPENAI_BASE_URL"] == f"http://{ran.network}/v1"  # the only address that it reaches
    spec = boxes[0].spec
    assert (spec.read, spec.network, spec.root) == ((str(runs),), False, True)
    assert (spec.memory_mib, spec.processes) == (HARNESSES["mini-swe-agent"].memory_mib, 512)
    assert not any(box.is_open for box in boxes)


@pytest.mark.parametrize(("internet", "has_network"), [("true", True), ("false", False)])
async def test_a_task_that_asks_for_the_network_may_have_it(
    internet: str, has_network: bool, tmp_path: Path, boxes: list[FolderBox]
) -> None:
    task = written(tmp_path, CONFIG.format(internet=internet))
    done = await played(task, program(tmp_path), "printf lemon > result.txt", "DONE", options="?network=True")
    assert (done.error, done.reward) == (None, 1.0)
    assert boxes[0].spec.network is has_network
    assert (programs(boxes[0])[0].network is True) is has_network


async def test_a_program_whose_time_is_over_is_judged_by_what_it_has_done(tmp_path: Path, boxes: list[FolderBox]) -> None:
    task = written(tmp_path, CONFIG.format(internet="true") + "[agent]\ntimeout_sec = 2.0\n")
    late = await played(task, program(tmp_path), "printf lemon > result.txt; sleep 30", "DONE")
    assert (late.error, late.reward, late.status) == (None, 1.0, Status.TRUNCATED)


async def test_a_program_that_fails_is_a_failed_episode(tmp_path: Path, boxes: list[FolderBox]) -> None:
    task, runs = written(tmp_path), program(tmp_path)
    runs.write_text("#!/bin/sh\necho out of luck; exit 3\n")
    failed = await played(task, runs)
    assert (failed.status, failed.reward) == (Status.ENV_ERROR, None)
    assert f"{runs}: its process exited with code 3. It printed last:\nout of luck" in (failed.error or "")
    assert not boxes[0].is_open


async def test_a_container_that_fails_at_its_beginning_is_ended(
    tmp_path: Path, boxes: list[FolderBox], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(self: FolderBox, *words: str) -> None:
        raise SandboxError("no disk")

    monkeypatch.setattr(FolderBox, "exec", fail)
    failed = await played(written(tmp_path), program(tmp_path))
    assert (failed.status, failed.reward, "no disk" in (failed.error or "")) == (Status.ENV_ERROR, None, True)
    assert not boxes[0].is_open


async def test_a_verifier_of_its_own_does_not_see_the_program(tmp_path: Path, boxes: list[FolderBox]) -> None:
    config = 'artifacts = ["/app/result.txt"]\n' + CONFIG.format(internet="true") + '[verifier]\nenvironment_mode = "separate"\n'
    right = await played(written(tmp_path, config), program(tmp_path), "printf lemon > result.txt", "DONE")
    assert (right.error, right.reward) == (None, 1.0)
    agent, verifier = boxes
    assert (bool(agent.spec.read), verifier.spec.read, programs(verifier)) == (True, (), [])
    assert {ran.num_open for ran in verifier.ran} == {1}  # the agent's is gone


async def test_a_reward_that_the_program_writes_is_removed(tmp_path: Path, boxes: list[FolderBox]) -> None:
    plant = "mkdir -p ../logs/verifier; echo '{\"reward\": 9}' > ../logs/verifier/reward.json"
    planted = await played(written(tmp_path), program(tmp_path), plant, "DONE")
    assert (planted.error, planted.reward) == (None, 0.0)


async def test_variables_that_are_passed_reach_the_program(tmp_path: Path, boxes: list[FolderBox], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTRL_TEST_PLACE", "shore")
    monkeypatch.setattr(HarborProgram, "process_limits", ProcessLimits(passed=("AGENTRL_TEST_PLACE", "AGENTRL_TEST_NOTHING")))
    told = await played(written(tmp_path), program(tmp_path), "echo $AGENTRL_TEST_PLACE", "DONE")
    assert "shore" in told.turns[1].prompt_text


async def test_all_agents_of_a_run_may_have_the_network(tmp_path: Path, boxes: list[FolderBox]) -> None:
    use_choice(SandboxChoice(network="all"))
    task, llm = written(tmp_path), ModelEndpoint(root="http://127.0.0.1:1", api_key="none")
    runs = program(tmp_path)
    runs.write_text("#!/bin/sh\n")
    cls: Any = load_agent(f"harbor:{task}#harness=mini-swe-agent?program={runs}").load()
    assert (await cls().run(next(iter(cls.tasks())), llm)).reward == 0.0
    assert (boxes[0].spec.network, programs(boxes[0])[0].network) == (True, True)


def test_a_specification_says_all_and_is_read_again(tmp_path: Path) -> None:
    task, runs = written(tmp_path), program(tmp_path)
    agent = load_agent(f"harbor:{task}?reward=r#harness=mini-swe-agent?brief=True&program={runs}")
    assert agent.spec == f"harbor:{task}?reward=r#harness=mini-swe-agent?dialect=chat&brief=True&program={runs}"
    assert load_agent(agent.spec).spec == agent.spec
    cls: Any = agent.load()
    assert (cls.rewarded, cls.network, cls.installed.is_brief, cls.folders) == ("r", False, True, (str(task),))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ("#harness=mini", "there is no harness 'mini'"),
        ("#harness=codex?speed=2", "there is no option 'speed'"),
        ("#harness=codex?program=/nowhere/codex", "there is no program '/nowhere/codex'"),
        ("?command_s=5#harness=codex?program=ls", "there is no option 'command_s'"),
        ("?run=shell#harness=codex?program=ls", "there is no option 'run'"),
    ],
)
def test_what_cannot_be_played_is_refused(options: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(EnvLoadError, match=problem):
        load_agent(f"harbor:{written(tmp_path)}{options}")


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The ten tasks."""
    yield from tasks_with_images(tmp_path_factory.mktemp("harbor"))


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_program_in_the_container_of_its_task_reaches_only_its_model(tasks: Path, tmp_path: Path) -> None:
    runs, task = program(tmp_path, "/usr/bin/python3"), tasks / "count-lines"
    look = "ls /sys/class/net /tests /solution; id -u"
    right = await played(task, runs, look, "wc -l < /srv/numbers.txt > count.txt", "DONE")
    assert (right.error, right.reward, right.status) == (None, 1.0, Status.FINISHED)
    seen = right.turns[1].prompt_text.split("exit code 0\n")[1]
    assert [line for line in seen.split("<|im_end|>")[0].splitlines() if not line.startswith("ls: ")] == ["/sys/class/net:", "lo", "0"]
    assert seen.count("No such file or directory") == 2
    own = await played(tasks / "own-verifier", runs, "echo 10 > double.txt", "DONE")
    assert (own.error, own.reward) == (None, 1.0)
    assert containers(container_engine()) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_program_on_folders_of_tasks_is_trained(tasks: Path, tmp_path: Path) -> None:
    runs = program(tmp_path, "/usr/bin/python3")
    sizes = ("--num-steps", "2", "--groups-per-step", "2", "--n-samples-per-prompt", "2", "--max-new-tokens", "8", "--no-save-model")
    agent = f"harbor:{tasks}#harness=mini-swe-agent?program={runs}"
    run = succeeded(train(tmp_path / "run", *sizes, "--runtime", "local", "--skip-checks", "env", agent=agent, timeout_s=800, fork=False))
    ledger = run.summary["ledger"]
    assert (ledger["submitted"], ledger["trained"]) == (4, 4), run.output
    assert all(row["endpoint/requests"] > 1 for row in run.metrics)
    assert containers(container_engine()) == []

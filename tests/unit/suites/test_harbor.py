"""Task folders of Harbor: a program works in the folder of the task, and the task's tests write the reward."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from agentrl.core.errors import EnvLoadError
from agentrl.core.types import Status, Trajectory
from agentrl.suites.harbor.tasks import read_task, with_paths
from agentrl.suites.load import load_agent
from tests.sandboxes import needs_sandbox
from tests.unit.examples.test_agents import play_class

pytestmark = [pytest.mark.anyio, needs_sandbox]

EXAMPLES = Path(__file__).parents[3] / "examples"
AGENT = f"#agent={sys.executable} -S {EXAMPLES}/command_line/agent.py {{prompt}}"


def written(folder: Path, name: str = "one", **files: str) -> Path:
    """Write a task whose tests give the length of ``/app/result.txt``; names of files have ``__`` for a slash, and ``_`` for a dot."""
    task = folder / name
    texts = {
        "task_toml": "",
        "instruction_md": "Fill /app/result.txt.",
        "environment__Dockerfile": "FROM debian\nWORKDIR /app\n",
        "tests__test_sh": "wc -c < /app/result.txt > /logs/verifier/reward.txt\n",
        **files,
    }
    for key, text in texts.items():
        place, _, file = key.rpartition("__")
        path = task / place.replace("__", "/") / file.replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return task


async def played(spec: str, *texts: str, name: str = "") -> Trajectory:
    cls: Any = load_agent(spec).load()
    task = next(task for task in cls.tasks() if name in ("", task.id))
    (trajectory,) = await play_class(cls, task, *texts)
    return trajectory


async def test_the_tasks_of_a_folder_are_worked_on_and_judged() -> None:
    spec = f"harbor:{EXAMPLES / 'harbor'}{AGENT}"
    cls: Any = load_agent(spec).load()
    prompts = {task.id: task.prompt for task in cls.tasks()}
    assert prompts["greeting"] == "Write the word lemon into the file ./result.txt."
    assert "The file data/prices.csv has" in prompts["column-sum"]
    right = await played(spec, "echo lemon > ./result.txt", "DONE", name="greeting")
    assert (right.error, right.reward, len(right.turns), right.metrics["endpoint/branches"]) == (None, 1.0, 2, 1.0)
    wrong = await played(spec, "pwd", "DONE", name="greeting")
    assert (wrong.error, wrong.reward, wrong.status) == (None, 0.0, Status.FINISHED)
    half = await played(spec, "cat data/*.csv; echo 31 > result.txt", "DONE", name="column-sum")
    assert (half.error, half.reward, half.metrics["number"], half.metrics["right"]) == (None, 0.5, 1.0, 0.0)
    assert "lamp,21" in half.turns[1].prompt_text


@pytest.mark.parametrize("name", ["greeting", "column-sum"])
async def test_the_solutions_of_the_examples_earn_everything(name: str) -> None:
    solution = (EXAMPLES / "harbor" / name / "solution" / "solve.sh").read_text().splitlines()[1].replace("/app/", "")
    trajectory = await played(f"harbor:{EXAMPLES / 'harbor' / name}{AGENT}", solution, "DONE")
    assert (trajectory.error, trajectory.reward) == (None, 1.0)


async def test_what_the_agent_leaves_of_tests_and_rewards_is_removed(tmp_path: Path) -> None:
    task = written(tmp_path, tests__test_sh="test -f /tests/planted && echo 1 > /logs/verifier/reward.txt\n")
    plant = "mkdir -p ../tests ../logs/verifier; touch ../tests/planted; echo 1 > ../logs/verifier/reward.txt; echo '{}' > ../tests/test.sh"
    trajectory = await played(f"harbor:{task}{AGENT}", plant, "DONE")
    assert (trajectory.status, trajectory.reward) == (Status.ENV_ERROR, None)
    assert "wrote neither /logs/verifier/reward.json nor /logs/verifier/reward.txt" in (trajectory.error or "")


async def test_links_that_the_agent_leaves_are_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    (precious / "verifier").mkdir(parents=True)
    for name in ("test.sh", "verifier/reward.txt"):
        (precious / name).write_text("1")
    plant = f"rm -rf ../tests ../logs ../app; for name in tests logs app; do ln -s {precious} ../$name; done"
    test = "test -L /app || test -L /tests || test -L /logs; echo $? > /logs/verifier/reward.txt\n"
    trajectory = await played(f"harbor:{written(tmp_path, tests__test_sh=test)}{AGENT}", plant, "DONE")
    assert (trajectory.error, trajectory.reward) == (None, 1.0)
    assert sorted(str(path.relative_to(precious)) for path in precious.rglob("*")) == ["test.sh", "verifier", "verifier/reward.txt"]
    assert {path.read_text() for path in precious.rglob("*") if path.is_file()} == {"1"}


async def test_an_agent_that_takes_too_long_is_judged_by_what_it_has_done(tmp_path: Path) -> None:
    task = written(tmp_path, task_toml="[agent]\ntimeout_sec = 2.0\n")
    slow = f"sh -c '\"$@\"; sleep 60' sh {AGENT.removeprefix('#agent=')}"
    trajectory = await played(f"harbor:{task}#agent={slow}", "printf 123 > result.txt", "DONE")
    assert (trajectory.error, trajectory.reward, trajectory.status) == (None, 3.0, Status.TRUNCATED)


async def test_tests_that_do_not_end_are_a_failure(tmp_path: Path) -> None:
    task = written(tmp_path, task_toml="[verifier]\ntimeout_sec = 0.5\n", tests__test_sh="sleep 60\n")
    trajectory = await played(f"harbor:{task}{AGENT}", "DONE")
    assert trajectory.reward is None
    assert "one/tests/test.sh did not end within 0.5 s ([verifier] timeout_sec)" in (trajectory.error or "")


@pytest.mark.parametrize(
    ("reward", "problem"),
    [
        ("echo nan > /logs/verifier/reward.txt", "it must be a number"),
        ('echo \'{"a": 1, "b": 2}\' > /logs/verifier/reward.json', "name the one"),
    ],
)
async def test_a_reward_that_is_none_is_a_failure(reward: str, problem: str, tmp_path: Path) -> None:
    trajectory = await played(f"harbor:{written(tmp_path, tests__test_sh=reward)}{AGENT}", "DONE")
    assert trajectory.reward is None
    assert problem in (trajectory.error or "")


async def test_a_reward_among_several_is_named(tmp_path: Path) -> None:
    task = written(tmp_path, tests__test_sh='echo \'{"a": 1, "b": 0.25}\' > /logs/verifier/reward.json; exit 3')
    trajectory = await played(f"harbor:{task}?reward=b{AGENT}", "DONE")
    assert (trajectory.error, trajectory.reward, trajectory.metrics["a"]) == (None, 0.25, 1.0)


DOCKERFILE = """
FROM debian
ENV GREETING=hello PLACE=/project/bin
WORKDIR /project
COPY . .
COPY ["notes.txt", "/data/other.txt"]
WORKDIR src
RUN mkdir -p /project/bin && \\
    echo "$GREETING $PLACE" > /project/bin/said
"""


async def test_a_dockerfile_is_followed_as_far_as_it_fills_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    task = written(
        tmp_path,
        task_toml='[environment.env]\nMODE = "fast"\n[verifier.env]\nKEY = "${JUDGE_KEY}"\nHOW = "${NOT_SET:-well}"\n',
        instruction_md="See /project/src, /data/other.txt and https://example.com/project/src.",
        environment__Dockerfile=DOCKERFILE,
        environment__notes_txt="a note",
        tests__test_sh="[ $KEY$HOW$MODE = secretwellfast ] && wc -l < /project/src/found.txt > /logs/verifier/reward.txt",
    )
    look = "env | grep -c JUDGE_KEY; cat ../notes.txt ../../data/other.txt ../bin/said | tee found.txt; ls ..; echo $MODE"
    trajectory = await played(f"harbor:{task}?run=shell{AGENT}", look, "DONE")
    assert (trajectory.error, trajectory.reward) == (None, 1.0)
    assert "See ., ../../data/other.txt and https://example.com/project/src." in trajectory.turns[0].prompt_text
    seen = trajectory.turns[1].prompt_text
    assert "0\na notea notehello /" in seen
    assert "/project/bin\nbin\nnotes.txt\nsrc\nfast" in seen
    with pytest.raises(EnvLoadError, match=r"one/environment/Dockerfile runs commands.*run=shell"):
        load_agent(f"harbor:{task}{AGENT}").load().tasks()


async def test_without_a_dockerfile_the_files_of_the_environment_are_there(tmp_path: Path) -> None:
    task = written(tmp_path, environment__notes_txt="12345")
    (task / "environment" / "Dockerfile").unlink()
    trajectory = await played(f"harbor:{task}{AGENT}", "cp notes.txt result.txt", "DONE")
    assert (trajectory.error, trajectory.reward) == (None, 5.0)


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({"task_toml": "a ="}, "one/task.toml is not TOML"),
        ({"task_toml": '[[environment.mcp_servers]]\nname = "x"'}, r"one/task.toml has environment\.mcp_servers"),
        ({"task_toml": "[[steps]]\nname = 'a'"}, "has steps, which needs a container"),
        ({"environment__docker-compose_yaml": ""}, "has docker-compose.yaml, which needs a container"),
        ({"environment__Dockerfile": "COPY --from=build /a /b"}, "copies from elsewhere"),
        ({"environment__Dockerfile": "COPY nothing /app"}, "names no file of environment/"),
        ({"environment__Dockerfile": "COPY ../task.toml /app"}, "names no file of environment/"),
        ({"environment__Dockerfile": "COPY Dockerfile /usr/bin/"}, "fills /usr/bin, which is this machine's"),
        ({"environment__Dockerfile": "ONBUILD x"}, "ONBUILD is not known"),
    ],
)
def test_what_needs_a_container_is_refused(files: dict[str, str], problem: str, tmp_path: Path) -> None:
    with pytest.raises(EnvLoadError, match=problem):
        load_agent(f"harbor:{written(tmp_path, **files)}{AGENT}").load().tasks()


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("harbor:{folder}#agent=echo", "is not told its task"),
        ("harbor:{folder}?run=docker#agent=echo {{prompt}}", "run = 'docker' is unknown"),
        ("harbor:{folder}?image=x#agent=echo {{prompt}}", "there is no option 'image'"),
        ("harbor:{folder}/nowhere#agent=echo {{prompt}}", "there is no folder"),
        ("harbor:{folder}/one/tests#agent=echo {{prompt}}", "there is no task in"),
    ],
)
def test_a_wrong_specification_is_refused_at_once(spec: str, problem: str, tmp_path: Path) -> None:
    written(tmp_path)
    with pytest.raises(EnvLoadError, match=problem):
        load_agent(spec.format(folder=tmp_path))


def test_a_folder_without_tests_is_refused(tmp_path: Path) -> None:
    shutil.rmtree(written(tmp_path) / "tests")
    with pytest.raises(EnvLoadError, match=r"one has no tests/test\.sh"):
        load_agent(f"harbor:{tmp_path}{AGENT}").load().tasks()


def test_another_process_in_another_folder_finds_the_same_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, "two")
    written(tmp_path, "one")
    monkeypatch.chdir(tmp_path)
    spec = load_agent(f"harbor:.?reward=a{AGENT}").spec
    monkeypatch.chdir(os.sep)
    assert spec == f"harbor:{tmp_path}?reward=a{AGENT}".replace("{prompt}", "'{prompt}'")
    assert [task.id for task in load_agent(spec).load().tasks() or ()] == ["one", "two"]


def test_paths_are_replaced_where_they_are_paths() -> None:
    text = "/app /app/a.txt '/app/b' x=/app:/apps $HOME/app http://a/app /app-old ./app /app. /app.py"
    assert with_paths(text, {"/app": "R"}) == "R R/a.txt 'R/b' x=R:/apps $HOME/app http://a/app /app-old ./app R. /app.py"


def test_the_limits_of_the_task_are_read(tmp_path: Path) -> None:
    task = read_task("harbor:x", written(tmp_path, task_toml="[agent]\ntimeout_sec = 7\n[verifier]\ntimeout_sec = 8\n"))
    assert (task.agent_timeout_s, task.verifier_timeout_s, task.workdir, task.steps) == (7, 8.0, "/app", ())

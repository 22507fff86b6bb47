"""Tasks to train on and tasks to evaluate on have none in common."""

import json
from pathlib import Path
from typing import Any

import pytest

from agentrl import Task
from agentrl.config.schema import TrainConfig
from agentrl.core.errors import ConfigError, DataError
from agentrl.env.agent_spec import AgentSpec
from agentrl.env.tasks import PEEK
from agentrl.resolve.commands import load_config
from agentrl.rollout.tasks import eval_tasks, missing_labels, open_tasks
from agentrl.suites.load import load_agent

ENV = """import itertools
from agentrl import AgentInstance, StepResult, Task
class Env(AgentInstance):
    @classmethod
    def tasks(cls):
        return {tasks}
{more}
    def step(self, state): ...
"""
TWENTY = "[Task(f'p{i}', i) for i in range(20)]"
ENDLESS = "(Task(f'p{i}', i) for i in itertools.count())"


def setting(folder: Path, *flags: Any, tasks: str = TWENTY, eval_body: str = "") -> tuple[TrainConfig, AgentSpec]:
    more = f"    @classmethod\n    def eval_tasks(cls):\n        return {eval_body}\n" if eval_body else ""
    path = folder / "env.py"
    path.write_text(ENV.format(tasks=tasks, more=more))
    return load_config(["--agent", str(path), *map(str, flags)]), load_agent(str(path))


def ids(tasks: list[Task]) -> list[str]:
    return [task.id for task in tasks]


def jsonl(path: Path, count: int) -> Path:
    path.write_text("".join(json.dumps({"prompt": f"{path.stem} {i}", "label": i}) + "\n" for i in range(count)))
    return path


def test_held_out_tasks_are_never_trained_on(tmp_path: Path) -> None:
    config, agent = setting(tmp_path, "--eval-size", 6)
    held, source = eval_tasks(config.data, agent, seed=config.run.seed), open_tasks(config.data, agent, seed=config.run.seed)
    drawn = {source.draw().id for _ in range(3 * 14)}
    assert (len(held), source.num_tasks) == (6, 14)
    assert drawn.isdisjoint(ids(held))
    assert drawn | set(ids(held)) == {str(i) for i in range(20)}
    assert {task.id for task in source.first(100)} == drawn
    assert ids(eval_tasks(config.data, agent, seed=config.run.seed)) == ids(held)
    assert [task.position for task in held] == list(range(6))
    assert all(task.label == int(task.id) for task in held)
    other, _ = setting(tmp_path, "--eval-size", 6, "--seed", 1)
    assert ids(eval_tasks(other.data, agent, seed=other.run.seed)) != ids(held)


def test_without_asking_nothing_is_held_out(tmp_path: Path) -> None:
    config, agent = setting(tmp_path)
    assert open_tasks(config.data, agent, seed=config.run.seed).num_tasks == 20
    with pytest.raises(ConfigError, match="Give --eval-size N to hold out N training tasks, or --eval-prompts"):
        eval_tasks(config.data, agent, seed=config.run.seed)


def test_the_first_of_endless_tasks_are_held_out(tmp_path: Path) -> None:
    config, agent = setting(tmp_path, "--eval-size", 5, tasks=ENDLESS)
    assert ids(eval_tasks(config.data, agent, seed=config.run.seed)) == ["0", "1", "2", "3", "4"]
    source = open_tasks(config.data, agent, seed=config.run.seed)
    assert ids(source.first(2)) == ["5", "6"]
    drawn = [source.draw() for _ in range(3)]
    assert [(task.id, task.position) for task in drawn] == [("5", 0), ("6", 1), ("7", 2)]
    source.restore({"epoch": 0, "position": PEEK + 10})
    assert source.draw().id == str(PEEK + 15)


def test_tasks_of_the_environment_to_evaluate_on(tmp_path: Path) -> None:
    config, agent = setting(tmp_path, eval_body="[Task('e', id=f'e{i}') for i in range(8)]")
    assert ids(eval_tasks(config.data, agent, seed=config.run.seed)) == [f"e{i}" for i in range(8)]
    config, agent = setting(tmp_path, "--eval-size", 3, eval_body="[Task('e', id=f'e{i}') for i in range(8)]")
    assert len(set(ids(eval_tasks(config.data, agent, seed=config.run.seed)))) == 3
    assert open_tasks(config.data, agent, seed=config.run.seed).num_tasks == 20


def test_endless_tasks_to_evaluate_on_need_a_number(tmp_path: Path) -> None:
    config, agent = setting(tmp_path, eval_body=ENDLESS)
    with pytest.raises(ConfigError, match="seems to have no end"):
        eval_tasks(config.data, agent, seed=config.run.seed)
    config, agent = setting(tmp_path, "--eval-size", 3, eval_body=ENDLESS)
    assert ids(eval_tasks(config.data, agent, seed=config.run.seed)) == ["0", "1", "2"]


def test_a_file_to_evaluate_on_comes_first(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "test.jsonl", 4)
    config, agent = setting(tmp_path, "--eval-prompts", path, eval_body="[Task('e')]")
    assert [task.prompt for task in eval_tasks(config.data, agent, seed=config.run.seed)] == [f"test {i}" for i in range(4)]
    assert open_tasks(config.data, agent, seed=config.run.seed).num_tasks == 20


def test_prompts_in_a_file_are_held_out(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "train.jsonl", 10)
    config, agent = setting(tmp_path, "--prompts", path, "--eval-size", 2)
    held = {task.prompt for task in eval_tasks(config.data, agent, seed=config.run.seed)}
    trained = {task.prompt for task in open_tasks(config.data, agent, seed=config.run.seed).first(100)}
    assert (len(held), len(trained)) == (2, 8)
    assert held.isdisjoint(trained)


def test_holding_out_everything_is_refused(tmp_path: Path) -> None:
    config, agent = setting(tmp_path, "--eval-size", 20)
    with pytest.raises(ConfigError, match="leaves nothing to train on of 20 tasks"):
        open_tasks(config.data, agent, seed=config.run.seed)


@pytest.mark.parametrize(("body", "expected"), [("[]", "holds no task"), ("5", "gave a int"), ("1 / 0", "eval_tasks.*ZeroDivisionError")])
def test_tasks_to_evaluate_on_that_cannot_be_used(tmp_path: Path, body: str, expected: str) -> None:
    config, agent = setting(tmp_path, eval_body=body)
    with pytest.raises((DataError, ConfigError), match=expected):
        eval_tasks(config.data, agent, seed=config.run.seed)


def test_a_missing_file_to_evaluate_on_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--eval-prompts = .*no such file"):
        setting(tmp_path, "--eval-prompts", tmp_path / "nothing.jsonl")


def test_data_sets_are_drawn_in_their_proportions(tmp_path: Path) -> None:
    a, b = jsonl(tmp_path / "a.jsonl", 30), jsonl(tmp_path / "b.jsonl", 30)
    config, agent = setting(tmp_path, "--prompts", f"{a},{b}", "--prompt-data-probs", "0.75,0.25", "--eval-size", 4)
    source, held = open_tasks(config.data, agent, seed=config.run.seed), eval_tasks(config.data, agent, seed=config.run.seed)
    drawn = [source.draw() for _ in range(100)]
    assert [sum(task.metadata["source"] == name for task in drawn) for name in "ab"] == [75, 25]
    assert sorted(task.metadata["source"] for task in held) == ["a", "a", "a", "b"]
    assert {task.id for task in drawn}.isdisjoint(ids(held))
    assert source.num_tasks == 56


def test_without_proportions_data_sets_are_one_collection(tmp_path: Path) -> None:
    a, b = jsonl(tmp_path / "a.jsonl", 30), jsonl(tmp_path / "b.jsonl", 10)
    config, agent = setting(tmp_path, "--prompts", f"{a}, {b}")
    source = open_tasks(config.data, agent, seed=config.run.seed)
    assert source.num_tasks == len({source.draw().id for _ in range(40)}) == 40


def test_a_template_is_put_around_the_prompts_of_both(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", 2)
    config, agent = setting(tmp_path, "--prompts", path, "--eval-prompts", path, "--input-template", "Q: {}!")
    assert (
        open_tasks(config.data, agent, seed=config.run.seed).first(1)[0].prompt
        == eval_tasks(config.data, agent, seed=config.run.seed)[0].prompt
        == "Q: a 0!"
    )


REWARD = "def reward(completion, label): return 1.0\n"
BY_COLUMN = "def reward(completions, answer, **kwargs): return [1.0]\n"
BY_LABEL = "def reward(completions, solution): return [1.0]\n"


@pytest.mark.parametrize(
    ("row", "code", "said"),
    [
        ({"prompt": "a", "answer": "b"}, REWARD, "Write --label-key answer."),
        ({"prompt": "a", "answer": "b"}, ENV.format(tasks="None", more=""), "Write --label-key answer."),
        ({"prompt": "a", "x": "b"}, REWARD, "the column beside the prompt is x"),
        ({"prompt": "a"}, REWARD, "there is no column beside the prompt"),
        ({"prompt": "a", "x": "b"}, ENV.format(tasks="None", more=""), None),
        ({"prompt": "a", "label": 0}, REWARD, None),
        ({"prompt": "a", "answer": "b"}, BY_COLUMN, None),
        ({"prompt": "a", "solution": "b"}, BY_LABEL, None),
        ({"prompt": "a", "answer": "b"}, BY_LABEL, "Write --label-key answer."),
        ({"prompt": "a", "answer": "b"}, f"import agentrl\n{BY_COLUMN}reward = agentrl.combine_rewards(right=reward)\n", None),
    ],
)
def test_tasks_without_any_label_are_said_where_the_reward_is_given_one(
    tmp_path: Path, row: dict[str, Any], code: str, said: str | None
) -> None:
    (tmp_path / "env.py").write_text(code)
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    config = load_config(["--agent", str(tmp_path / "env.py"), "--prompts", str(tmp_path / "rows.jsonl")])
    agent = load_agent(config.run.agent)
    found = missing_labels(config.data, agent, open_tasks(config.data, agent, seed=config.run.seed).first(10))
    assert found is None if said is None else said in ". ".join(found or ())

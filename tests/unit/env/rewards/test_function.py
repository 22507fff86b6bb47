"""Reward functions as environments: both forms, several with weights, and what they may not return."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from agentrl import combine_rewards
from agentrl.core.errors import ConfigError, EnvLoadError, NotScoredError
from agentrl.core.types import GroupRequest, Status, Task, Trajectory
from agentrl.env.isolation.wire import decode, encode_error, without_error
from agentrl.env.rewards.function import reward_environment
from agentrl.suites.load import load_agent
from tests.scripted_engine import ScriptedEngine
from tests.unit.rollout.scenes import Scene, says

pytestmark = pytest.mark.anyio


async def play(value: Any, text: str = "three") -> Trajectory:
    """One episode; `value` is a file's path or a reward."""
    cls = load_agent(str(value)).load() if isinstance(value, Path) else reward_environment(value, "reward", file="r.py")
    return await Scene(cls, ScriptedEngine(answer=says(text))).play()


def write(folder: Path, text: str) -> Path:
    path = folder / "rewards.py"
    path.write_text(text)
    return path


@pytest.mark.parametrize("prefix", ["", "async "])
async def test_a_plain_scorer(tmp_path: Path, prefix: str) -> None:
    trajectory = await play(write(tmp_path, f"{prefix}def reward(completion, label): return completion == label\n"))
    assert (trajectory.status, trajectory.reward, trajectory.score, trajectory.error) == (Status.FINISHED, 1.0, 1.0, None)


@pytest.mark.parametrize("prefix", ["", "async "])
async def test_a_reward_func(tmp_path: Path, prefix: str) -> None:
    text = (
        "import numpy as np\n"
        f"{prefix}def reward_func(queries, prompts, labels, **kwargs):\n"
        "    assert queries[0].startswith(prompts[0]) and prompts[0].endswith('assistant\\n')\n"
        "    right = np.array([float(q[len(p):] == l) for q, p, l in zip(queries, prompts, labels)])\n"
        "    return {'rewards': right - 0.5, 'scores': right, 'extra_logs': {'right': right, 'mean': right.mean()}}\n"
    )
    trajectory = await play(write(tmp_path, text))
    assert (trajectory.reward, trajectory.score, trajectory.error) == (0.5, 1.0, None)
    assert trajectory.metrics == {"right": 1.0, "mean": 1.0}


async def test_plain_functions_run_beside_each_other_and_not_on_the_loop() -> None:
    import threading

    barrier = threading.Barrier(4)

    def reward(completion: str, label: str) -> float:
        barrier.wait(5)
        return 1.0

    results = await asyncio.gather(*(play(reward) for _ in range(4)))
    assert [trajectory.reward for trajectory in results] == [1.0] * 4


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (float("nan"), "r.py: reward returned reward = nan: must be finite"),
        (None, "r.py: reward returned reward = None: must be a number"),
        ("1", "must be a number"),
        ([1.0, 2.0], "must be a number"),
        ({}, "must be a number"),
    ],
)
async def test_a_plain_scorers_bad_value(value: Any, expected: str) -> None:
    trajectory = await play(lambda completion, label: value)
    assert (trajectory.status, trajectory.reward) == (Status.ENV_ERROR, None)
    assert expected in (trajectory.error or "")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, "return a dictionary with rewards"),
        ([1.0], "return a dictionary with rewards"),
        ({"reward": [1.0]}, "did you mean 'rewards'?"),
        ({"scores": [1.0]}, "the key 'rewards' is missing"),
        ({"rewards": [1.0, 2.0]}, "must have 1 entries, one per query; it has 2"),
        ({"rewards": []}, "it has 0"),
        ({"rewards": [float("inf")]}, "rewards[0] = inf: must be finite"),
        ({"rewards": "high"}, "rewards = 'high': must be a number"),
        ({"rewards": [1.0], "scores": [float("nan")]}, "scores[0] = nan: must be finite"),
        ({"rewards": [1.0], "scores": [None]}, "scores[0] = None"),
        ({"rewards": [1.0], "extra_logs": {"a": [None]}}, "extra_logs['a'][0] = None"),
        ({"rewards": [1.0], "extra_logs": [1]}, "extra_logs = [1]"),
    ],
)
async def test_a_reward_funcs_bad_answer(value: Any, expected: str) -> None:
    def reward_func(queries: Any, prompts: Any, labels: Any) -> Any:
        return value

    trajectory = await play(reward_func)
    assert (trajectory.status, trajectory.reward) == (Status.ENV_ERROR, None)
    assert expected in (trajectory.error or "")


async def test_a_raised_error_names_file_function_and_line(tmp_path: Path) -> None:
    trajectory = await play(write(tmp_path, "def reward(completion, label):\n    return 1 / 0\n"))
    assert trajectory.status is Status.ENV_ERROR
    assert "reward.step raised ZeroDivisionError" in (trajectory.error or "")
    assert 'rewards.py", line 2, in reward' in (trajectory.error or "")


async def test_a_reward_that_hangs_is_a_timeout(tmp_path: Path) -> None:
    trajectory = await play(write(tmp_path, "import time\ndef reward(completion, label): time.sleep(5)\n"))
    assert (trajectory.status, trajectory.reward) == (Status.TIMEOUT, None)


async def short(completion: str, label: str) -> float:
    await asyncio.sleep(0)
    return float(len(completion) < 6)


def right(completion: str, label: str) -> bool:
    return completion == label


@pytest.mark.parametrize("first", [short, lambda completion, label: float(len(completion) < 6)])
async def test_several_rewards_with_weights(first: Any) -> None:
    reward = combine_rewards(right=right, short=(first, 0.5))
    trajectory = await play(reward, "three")
    assert (trajectory.reward, trajectory.score, trajectory.error) == (1.5, 1.0, None)
    assert trajectory.reward_parts == {"right": 1.0, "short": 0.5}
    assert trajectory.metrics == {"reward/right": 1.0, "reward/short": 1.0}
    wrong = await play(reward, "two")
    assert (wrong.reward, wrong.score) == (0.5, 0.0)


async def test_one_bad_part_fails_the_sum() -> None:
    trajectory = await play(combine_rewards(right=right, odd=lambda completion, label: None))
    assert trajectory.status is Status.ENV_ERROR
    assert "reward odd returned reward = None" in (trajectory.error or "")


NONE = "def reward(completions, **columns): return [None]\n"


@pytest.mark.parametrize("prefix", ["", "async "])
async def test_none_of_trls_form_means_that_no_reward_applies(tmp_path: Path, prefix: str) -> None:
    trajectory = await play(write(tmp_path, prefix + NONE))
    assert (trajectory.status, trajectory.reward) == (Status.NOT_SCORED, None)
    assert "rewards.py: reward returned None: it does not apply to this answer" in (trajectory.error or "")
    assert not trajectory.status.failed
    assert not trajectory.status.trainable
    with pytest.raises(NotScoredError, match="it does not apply"):  # as it comes out of an environment's own process
        without_error(decode(encode_error(NotScoredError(trajectory.error)), "r.py"))


@pytest.mark.parametrize("value", [None, [None, None], []])
async def test_none_in_place_of_a_list_is_a_failure_as_in_trl(value: Any) -> None:
    def reward(completions: Any, **columns: Any) -> Any:
        return value

    assert (await play(reward)).status is Status.ENV_ERROR


@pytest.mark.parametrize("first", [short, lambda completion, label: float(len(completion) < 6)])
async def test_parts_that_do_not_apply_are_left_out_of_the_sum(first: Any) -> None:
    def code(completions: Any, **columns: Any) -> Any:
        return [None]

    trajectory = await play(combine_rewards(code=(code, 4.0), right=right, short=(first, 0.5)), "three")
    assert (trajectory.reward, trajectory.score) == (1.5, 1.0)
    assert trajectory.reward_parts == {"right": 1.0, "short": 0.5}
    assert (await play(combine_rewards(code=code, same=code))).status is Status.NOT_SCORED


async def test_parts_keep_their_own_logs_and_may_be_in_both_forms() -> None:
    def reward_func(queries: Any, prompts: Any, labels: Any) -> Any:
        return {"rewards": [0.25], "scores": [1.0], "extra_logs": {"length": [5]}}

    trajectory = await play(combine_rewards(model=(reward_func, 2.0), right=right), "two")
    assert (trajectory.reward, trajectory.score) == (0.5, 1.0)
    assert trajectory.metrics == {"model/length": 5.0, "reward/model": 0.25, "reward/right": 0.0}


@pytest.mark.parametrize("parts", [{}, {"a": 3}, {"a": (right, "1")}, {"a": (right, True)}, {"a": lambda: 1}, {"a": int}])
def test_what_cannot_be_combined(parts: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"combine_rewards|reward a"):
        combine_rewards(**parts)


async def test_a_combined_reward_in_a_file(tmp_path: Path) -> None:
    text = (
        "from agentrl import combine_rewards, verifiers\n"
        "reward = combine_rewards(right=(verifiers.exact_match, 1.0), form=(verifiers.matches('[a-z]+'), 0.1))\n"
    )
    assert (await play(write(tmp_path, text))).reward == pytest.approx(1.1)


def test_a_file_may_bring_its_tasks(tmp_path: Path) -> None:
    text = "from agentrl import Task\ndef tasks(): return [Task('a'), Task('b')]\ndef reward(completion, label): return 1\n"
    cls = load_agent(str(write(tmp_path, text))).load()
    assert [task.prompt for task in cls.tasks()] == ["a", "b"]
    assert load_agent(str(write(tmp_path, "def reward(completion, label): return 1\n"))).name == "reward"


def test_an_environment_comes_before_a_reward(tmp_path: Path) -> None:
    text = "def reward(completion, label): return 1\nclass Env:\n    def reset(self, s): ...\n    def step(self, s): ...\n"
    path = write(tmp_path, text)
    assert load_agent(str(path)).name == "Env"
    assert load_agent(f"{path}:reward").spec == f"{path}:reward"


def test_a_reward_may_have_any_name_if_it_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, "def judge(completion, label): return 1\ndef rewards(): ...\n")
    assert load_agent(f"{path}:judge").name == "judge"
    with pytest.raises(EnvLoadError, match="no environment and no reward"):
        load_agent(str(path))


def test_two_rewards_in_a_file_must_be_told_apart(tmp_path: Path) -> None:
    path = write(tmp_path, "def reward(completion, label): ...\ndef reward_func(queries, prompts, labels): ...\n")
    with pytest.raises(EnvLoadError, match="several rewards: reward_func, reward"):
        load_agent(str(path))
    assert load_agent(f"{path}:reward_func").name == "reward_func"


COLUMNS = Task("What is 1 + 2?", "three", id="sum", metadata={"level": 2, "data_source": "sums"})


async def played(tmp_path: Path, text: str, task: Task = COLUMNS) -> Trajectory:
    cls = load_agent(str(write(tmp_path, text))).load()
    return await Scene(
        cls, ScriptedEngine(answer=says("three")), group_request=GroupRequest(group_id=3, task=task, n_samples_per_prompt=2, version=0)
    ).play()


@pytest.mark.parametrize(
    "text",
    [
        "def reward(completions, **kwargs): return [float(n == 2) for n in kwargs['level']]",
        "def reward(completions, label, level, **kwargs): return [float(c == l and n == 2) for c, l, n in zip(completions, label, level)]",
        "def reward(prompts, completions, solution): return [float(completions == solution and prompts[0][:4] == 'What')]",
        "async def reward(completions, ground_truth): return [float(completions == ground_truth)]",
        "def reward(data_source, solution_str, ground_truth, extra_info=None): return float(data_source + solution_str == 'sumsthree')",
        "def reward(solution_str, ground_truth, **kwargs): return {'score': float(solution_str == ground_truth), 'long': False}",
        "def reward(completion, label, level): return float(completion == label and level == 2)",
        "def reward(completion, label, *, metadata, prompt='', other=None): return float(metadata['level'] == 2 and prompt[:4] == 'What')",
        "def reward(completion, label, **columns): return float(columns['level'] == 2)",
        "def reward(label, completion): return float(completion == 'three')",
        "def reward_func(queries, prompts, labels, **kwargs): return {'rewards': [float(queries[0] == prompts[0] + labels[0])]}",
    ],
)
async def test_each_systems_form_is_called_in_its_own_way(tmp_path: Path, text: str) -> None:
    trajectory = await played(tmp_path, text + "\n")
    assert (trajectory.status, trajectory.reward, trajectory.error) == (Status.FINISHED, 1.0, None)


async def test_chat_prompts_give_trls_form_messages(tmp_path: Path) -> None:
    task = Task([{"role": "user", "content": "What is 1 + 2?"}], "three")
    text = "def reward(prompts, completions): return [float(completions[0][0]['content'] == 'three' and prompts[0][0]['role'] == 'user')]\n"
    assert (await played(tmp_path, text, task)).reward == 1.0


async def test_a_column_that_is_not_there_is_named_with_those_that_are(tmp_path: Path) -> None:
    trajectory = await played(tmp_path, "def reward(completion, label, difficulty): return 1.0\n")
    assert trajectory.status is Status.ENV_ERROR
    assert "parameter 'difficulty'" in (trajectory.error or "")
    assert "its columns: data_source, level" in (trajectory.error or "")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("def reward(prompts, responses): return 1.0", "the parameter 'prompts' stands for a list"),
        ("def reward(responses, labels): return 1.0", "the parameter 'responses' stands for a list"),
        ("def reward(completion): return 1.0", "takes no completion and label"),
        ("def reward_func(queries): return 1.0", "takes queries, prompts and labels"),
        ("def judge(completion, label): return 1.0", "it defines judge. To judge with judge, write --agent"),
        ("x = 1", "defines no environment and no reward. Write a class"),
        ("def a(completions): return [1.0]\ndef b(completions): return [0.0]", "several rewards: a, b. Name one: "),
    ],
)
def test_what_fits_no_form_is_refused_by_the_name_of_its_parameter(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_agent(str(write(tmp_path, text + "\n"))).load()
    assert problem in str(caught.value)


async def test_the_only_function_of_completions_in_a_file_is_its_reward_under_any_name(tmp_path: Path) -> None:
    text = "def _clean(completions): return completions\ndef accuracy_reward(completions, **kwargs): return [0.5]\n"
    assert (await played(tmp_path, text)).reward == 0.5

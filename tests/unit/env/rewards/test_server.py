"""Reward models behind real sockets: batching, failures, and the same rewards as the same function in a file."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl import combine_rewards, remote_reward
from agentrl.core.errors import ConfigError, EnvLoadError
from agentrl.core.types import GroupRequest, Status, Task, Trajectory
from agentrl.env.rewards.function import reward_environment
from agentrl.suites.load import load_agent
from tests.scripted_engine import ScriptedEngine
from tests.servers import Request, serve
from tests.unit.rollout.scenes import PATIENT, Scene, says

pytestmark = pytest.mark.anyio

FORMS = {
    "plain": "def reward(completion, label): return score(completion, label)\n",
    "async": "async def reward(completion, label): return score(completion, label)\n",
    "reward_func": (
        "def reward_func(queries, prompts, labels):\n"
        "    return {'rewards': [score(q[len(p):], l) for q, p, l in zip(queries, prompts, labels)]}\n"
    ),
}
SCORE = "def score(completion, label): return 1.0 if completion == label else len(completion) / 100\n"
ANSWERS = ["three", "it is three", "3", "\u00e9 <|im_start|>", " three"]


async def play(cls: type[Any], text: str = "three", label: Any = "three") -> Trajectory:
    group_request = GroupRequest(group_id=3, task=Task("What is 1+2?", label=label, id="sum"), n_samples_per_prompt=1, version=0)
    return await Scene(cls, ScriptedEngine(answer=says(text)), PATIENT, group_request).play()


async def group(cls: type[Any], *labels: Any) -> list[Trajectory]:
    return await asyncio.gather(*(play(cls, label=label) for label in labels))


def env(*urls: str, timeout_s: float = 10.0, batch_size: int = 64) -> type[Any]:
    return reward_environment(remote_reward(*urls, timeout_s=timeout_s, batch_size=batch_size), "RewardServer")


def judging(rule: Callable[[str, str, Any], Any]) -> Callable[[Request], Any]:
    """A server that gives each item what the rule says; an exception of the rule's is a 400."""

    async def handler(request: Request) -> None:
        body = request.json
        try:
            rewards = [rule(*item) for item in zip(body["query"], body["prompts"], body["labels"], strict=True)]
        except ValueError:
            await request.answer({"detail": "bad label"}, status=400)
        else:
            await request.answer({"rewards": rewards, "scores": rewards, "extra_logs": {"asked": [1.0] * len(rewards)}, "model": "rm"})

    return handler


async def test_file_scorer_and_server_give_the_same_rewards(tmp_path: Path) -> None:
    space: dict[str, Any] = {}
    exec(SCORE, space)

    def rule(query: str, prompt: str, label: str) -> float:
        return float(space["score"](query[len(prompt) :], label))

    rewards = {}
    for name, text in FORMS.items():
        path = tmp_path / f"{name}.py"
        path.write_text(SCORE + text)
        rewards[name] = [(await play(load_agent(str(path)).load(), answer)).reward for answer in ANSWERS]
    async with serve(judging(rule)) as server:
        rewards["server"] = [(await play(env(server.url), answer)).reward for answer in ANSWERS]
    assert rewards["plain"][0] == 1.0
    assert len(set(rewards["plain"])) > 3
    assert all(found == rewards["plain"] for found in rewards.values())


async def test_answers_of_concurrent_episodes_travel_together() -> None:
    async with serve(judging(lambda query, prompt, label: label / 100)) as server:
        cls = env(server.url, timeout_s=10, batch_size=16)
        found = await group(cls, *range(40))
        assert [trajectory.reward for trajectory in found] == [label / 100 for label in range(40)]
        assert found[0].metrics == {"asked": 1.0}
        sizes = [len(request.json["query"]) for request in server.requests]
        assert sum(sizes) == 40
        assert len(sizes) <= 6
        assert max(sizes) <= 16


async def test_a_batch_of_one_is_sent_alone() -> None:
    async with serve(judging(lambda query, prompt, label: 0.5)) as server:
        await group(env(server.url, batch_size=1), 1, 2, 3)
        assert [len(request.json["query"]) for request in server.requests] == [1, 1, 1]


@pytest.mark.parametrize("bad", [None, "high", [], float("nan")])
async def test_one_bad_item_does_not_spoil_the_others(bad: Any) -> None:
    async with serve(judging(lambda query, prompt, label: bad if label == 2 else label / 10)) as server:
        found = await group(env(server.url), 1, 2, 3)
    assert [trajectory.reward for trajectory in found] == [0.1, None, 0.3]
    assert found[1].status is Status.ENV_ERROR
    assert server.url in (found[1].error or "")


async def test_a_refused_item_does_not_spoil_the_others() -> None:
    async with serve(judging(lambda query, prompt, label: int(label) / 10)) as server:
        found = await group(env(server.url), "1", "x", "3")
    assert [trajectory.reward for trajectory in found] == [0.1, None, 0.3]
    assert "answered 400" in (found[1].error or "")
    assert "bad label" in (found[1].error or "")


async def test_a_label_that_json_cannot_say_fails_alone() -> None:
    async with serve(judging(lambda query, prompt, label: 1.0)) as server:
        found = await group(env(server.url), 1, {1, 2}, 3)
    assert [trajectory.reward for trajectory in found] == [1.0, None, 1.0]
    assert "label = {1, 2}" in (found[1].error or "")


@pytest.mark.parametrize(
    ("status", "value", "expected"),
    [
        (500, None, "answered 500"),
        (404, None, "answered 404"),
        (200, [1.0], "return a dictionary with rewards"),
        (200, {"scores": [1.0]}, "'rewards' is missing"),
        (200, {"rewards": [1.0, 2.0, 3.0]}, "it has 3"),
        (200, {"rewards": [1.0], "scores": ["high"]}, "scores[0] = 'high'"),
    ],
)
async def test_a_failure_is_an_error_and_never_a_zero(status: int, value: Any, expected: str) -> None:
    async def handler(request: Request) -> None:
        await request.answer(value, status=status)

    async with serve(handler) as server:
        found = await group(env(server.url, timeout_s=1.0), 1)
    assert [(trajectory.status, trajectory.reward, trajectory.score) for trajectory in found] == [(Status.ENV_ERROR, None, None)]
    assert expected in (found[0].error or "")


async def test_a_silent_server_fails_within_its_deadline_and_leaves_nothing_running() -> None:
    async def silent(request: Request) -> None:
        await asyncio.sleep(60)

    async with serve(silent) as server:
        before = asyncio.all_tasks()
        start = asyncio.get_running_loop().time()
        found = await group(env(server.url, timeout_s=0.25), 1, 2)
        assert asyncio.get_running_loop().time() - start < 2
        assert {trajectory.status for trajectory in found} == {Status.ENV_ERROR}
        assert "within 0.225 s" in (found[0].error or "")
        left = [task for task in asyncio.all_tasks() - before if "connected" not in repr(task)]
        assert left == []


async def test_a_busy_server_is_asked_again() -> None:
    count = 0

    async def handler(request: Request) -> None:
        nonlocal count
        count += 1
        await request.answer({"rewards": [1.0] * len(request.json["query"])}, status=503 if count == 1 else 200)

    async with serve(handler) as server:
        found = await group(env(server.url), 1, 2)
    assert [trajectory.reward for trajectory in found] == [1.0, 1.0]
    assert count == 2


async def test_cancelled_episodes_end_their_requests() -> None:
    async def silent(request: Request) -> None:
        await asyncio.sleep(60)

    async with serve(silent) as server:
        cls = env(server.url, timeout_s=30)
        episodes = [asyncio.create_task(play(cls)) for _ in range(3)]
        await asyncio.sleep(0.1)
        assert len(server.requests) == 1
        for episode in episodes:
            episode.cancel()
        await asyncio.wait(episodes)
        assert all(episode.cancelled() for episode in episodes)
        assert cls.reward._client is None
        assert [task for task in asyncio.all_tasks() if task.get_name() == "reward batch"] == []
        assert all(trajectory.reward is None for trajectory in [await play(env(server.url, timeout_s=0.25))])


async def test_a_server_as_a_part_of_a_sum() -> None:
    async with serve(judging(lambda query, prompt, label: 0.5)) as server:
        reward = combine_rewards(right=lambda completion, label: completion == label, model=(remote_reward(server.url), 2.0))
        trajectory = await play(reward_environment(reward, "reward"))
    assert (trajectory.reward, trajectory.score, trajectory.error) == (2.0, 1.0, None)
    assert trajectory.metrics == {"model/asked": 1.0, "reward/right": 1.0, "reward/model": 0.5}


async def test_the_same_class_serves_one_event_loop_after_another() -> None:
    def once() -> float | None:
        async def body() -> float | None:
            async with serve(judging(lambda query, prompt, label: 0.5)) as server:
                cls.reward._urls[:] = [server.url]
                return (await play(cls)).reward

        return asyncio.run(body())

    cls = env("http://127.0.0.1:1")
    assert [await asyncio.to_thread(once) for _ in range(2)] == [0.5, 0.5]


async def test_the_specification_of_servers() -> None:
    async with serve(judging(lambda query, prompt, label: 0.25)) as server:
        spec = load_agent(f"reward:{server.url},{server.url}/second#timeout_s=9.5&batch_size=4")
        assert (await play(spec.load())).reward == 0.25
    assert (spec.name, spec.load().tasks()) == ("RewardServer", None)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("reward:", "is not the address of a server"),
        ("reward:host:80", "is not the address of a server"),
        ("reward:http://user:pass@host", "user name or password"),
        ("reward:http://host#timeout=3", "there is no option 'timeout'"),
        ("reward:http://host#timeout_s=soon", "could not convert"),
    ],
)
def test_a_specification_that_cannot_be_used(spec: str, expected: str) -> None:
    with pytest.raises(EnvLoadError, match=expected) as caught:
        load_agent(spec)
    assert isinstance(caught.value, ConfigError)

"""A judge behind an OpenAI-compatible address: verdicts, retries, cache, costs, and failures that are no rewards."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl import combine_rewards, judge
from agentrl.core.errors import ConfigError
from agentrl.core.types import Status
from agentrl.env.rewards.function import reward_environment
from agentrl.env.rewards.judge import JudgeReward
from tests.servers import Request, serve
from tests.unit.env.rewards.test_server import group, play

pytestmark = pytest.mark.anyio

TEMPLATE = "Question: {prompt}\nAnswer: {completion}\nRight: {label}\nRate it from 0 to 10."


def replying(*replies: str | int) -> Callable[[Request], Any]:
    """A service that gives these replies in turn, the last one for ever; a number is a refusal with that status."""
    left = list(replies)

    async def handler(request: Request) -> None:
        reply = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(reply, int):
            await request.answer({"error": "busy"}, status=reply, Retry_After="0")
            return
        usage = {"prompt_tokens": 1000, "completion_tokens": 100}
        await request.answer({"choices": [{"message": {"role": "assistant", "content": reply}}], "usage": usage})

    return handler


def judged(url: str, **settings: Any) -> tuple[JudgeReward, type[Any]]:
    reward = judge(TEMPLATE, model="big", base_url=f"{url}/v1", **settings)
    return reward, reward_environment(reward, "judge")


async def test_the_last_number_of_the_reply_on_its_scale_is_the_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    async with serve(replying("Of 10 points I give 7.5")) as server:
        _, cls = judged(server.url, api_key_env="JUDGE_KEY")
        trajectory = await play(cls)
    assert (trajectory.reward, trajectory.score) == (0.75, 0.75)
    (request,) = server.requests
    assert (request.path, request.headers["authorization"]) == ("/v1/chat/completions", "Bearer secret")
    assert request.json["messages"] == [
        {"role": "user", "content": "Question: What is 1+2?\nAnswer: three\nRight: three\nRate it from 0 to 10."}
    ]
    assert (request.json["model"], request.json["temperature"]) == ("big", 0.0)


async def test_the_same_text_is_judged_once_also_in_a_later_run(tmp_path: Path) -> None:
    async with serve(replying("4")) as server:
        reward, cls = judged(server.url, cache=tmp_path / "judge.jsonl", price=(2.0, 10.0))
        found = await group(cls, "three", "three", "two")
        assert [trajectory.reward for trajectory in found] == [0.4] * 3
        assert len(server.requests) == 2
        counts = reward.counts
        assert (counts.calls, counts.cached, counts.prompt_tokens) == (2, 1, 2000)
        assert counts.cost == pytest.approx(2 * (1000 * 2.0 + 100 * 10.0) / 1e6)
        (tmp_path / "judge.jsonl").open("a").write('{"key": "cut sho')
        _, later = judged(server.url, cache=tmp_path / "judge.jsonl")
        assert (await play(later)).metrics["judge/cached"] == 1.0
        assert len(server.requests) == 2


async def test_a_verdict_counts_for_its_scale_alone(tmp_path: Path) -> None:
    async with serve(replying("4")) as server:
        for scale, expected in (((0, 10), 0.4), ((0, 5), 0.8)):
            _, cls = judged(server.url, cache=tmp_path / "judge.jsonl", scale=scale)
            assert (await play(cls)).reward == expected
        assert len(server.requests) == 2


async def test_a_reply_without_a_number_is_asked_again_and_a_busy_service_too() -> None:
    async with serve(replying(503, "It is fine.", "11", "8")) as server:
        reward, cls = judged(server.url, attempts=4)
        assert (await play(cls)).reward == 0.8
    assert [len(request.json["messages"]) for request in server.requests] == [1, 1, 3, 3]
    assert reward.counts.unreadable == 2


@pytest.mark.parametrize(("reply", "problem"), [("no idea", "no number from 0 to 10"), (500, "answered 500"), (401, "answered 401")])
async def test_a_judge_that_fails_makes_a_failed_episode(reply: str | int, problem: str) -> None:
    async with serve(replying(reply)) as server:
        _, cls = judged(server.url, attempts=2)
        trajectory = await play(cls)
    assert (trajectory.status, trajectory.reward) == (Status.ENV_ERROR, None)
    assert problem in (trajectory.error or "")
    assert "secret" not in json.dumps(trajectory.error)


async def test_costs_have_a_limit() -> None:
    async with serve(replying("5")) as server:
        _, cls = judged(server.url, price=(1000.0, 0.0), max_cost=1.0)
        first = await play(cls, label="a")
        second = await play(cls, label="b")
    assert first.reward == 0.5
    assert (second.status, second.reward) == (Status.ENV_ERROR, None)
    assert "max_cost is 1" in (second.error or "")


async def test_a_judge_is_a_part_of_a_combined_reward() -> None:
    async with serve(replying("10")) as server:
        part = judge(TEMPLATE, model="big", base_url=server.url)
        reward = combine_rewards(right=lambda completion, label: completion == label, clear=(part, 0.5))
        trajectory = await play(reward_environment(reward, "both"))
    assert (trajectory.reward, trajectory.reward_parts) == (1.5, {"right": 1.0, "clear": 0.5})


async def test_a_column_that_the_task_lacks_is_named() -> None:
    reward = judge("{completion} {rubric}", model="big", base_url="http://127.0.0.1:1")
    trajectory = await play(reward_environment(reward, "judge"))
    assert trajectory.status is Status.ENV_ERROR
    assert "{rubric}" in (trajectory.error or "")


def test_arguments_that_cannot_be_used_are_refused() -> None:
    for given, problem in (
        ({"prompt_template": "{prompt}"}, "no {completion}"),
        ({"model": ""}, "names no model"),
        ({"scale": (1, 1)}, "lower and a higher"),
        ({"pattern": "("}, "no regular expression"),
        ({"base_url": "ftp://x"}, "not the address"),
    ):
        with pytest.raises(ConfigError, match=problem):
            judge(**{"prompt_template": "{completion}", "model": "m", **given})  # type: ignore[arg-type]

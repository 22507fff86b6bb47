"""Fields beside those of the services, and images: the same in every dialect."""

from __future__ import annotations

import logging
from copy import deepcopy
from typing import Any

import pytest

from agentrl import ModelEndpoint, Task
from agentrl.core.types import Status
from agentrl.rollout.chat import ChatCodec
from tests.unit.rollout.endpoint.support import ADD, CALL, caller, play_one, text_of, user
from tests.unit.rollout.templates import tokenizer

pytestmark = pytest.mark.anyio

BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"model": "m", "messages": [user("one")]},
    "responses": {"model": "m", "input": "one"},
    "messages": {"model": "m", "max_tokens": 9, "messages": [user("one")]},
}
DIALECTS = pytest.mark.parametrize("path", sorted(BODIES))
PICTURE = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
URL = f"data:image/png;base64,{PICTURE['data']}"
PARTS: dict[str, list[Any]] = {
    "chat/completions": [{"type": "text", "text": "See:"}, {"type": "image_url", "image_url": {"url": URL}}],
    "responses": [{"type": "input_text", "text": "See:"}, {"type": "input_image", "image_url": URL}],
    "messages": [{"type": "text", "text": "See:"}, {"type": "image", "source": PICTURE}],
}


async def answers(path: str, *changes: dict[str, Any], **options: Any) -> tuple[Any, Any, list[Any]]:
    """Play an episode that sends a body with each of these changes; returns what was played, and the answers."""
    got: list[Any] = []

    async def run(task: Task, llm: ModelEndpoint) -> float:
        async with caller(llm) as client:
            for change in changes:
                answer = await client.post(path, json={**BODIES[path], **change})
                got.append((answer.status_code, answer.json()))
        return 1.0

    return *(await play_one(run, "three", **options)), got


@DIALECTS
async def test_unknown_fields_are_ignored_with_one_warning(path: str, caplog: pytest.LogCaptureFixture) -> None:
    changes = {"client_metadata": {"a": 1}, "brand_new": True}
    with caplog.at_level(logging.WARNING):
        _, trajectory, got = await answers(path, changes, {**changes, "nothing": None}, {})
    assert [status for status, _ in got] == [200] * 3
    told = [record.getMessage() for record in caplog.records]
    assert told == [
        f"requests of the agent have the field {name}, which the endpoint does not know and ignores"
        for name in ("client_metadata", "brand_new")
    ]
    assert (trajectory.error, trajectory.metrics["endpoint/ignored_fields"]) == (None, 4)


@DIALECTS
@pytest.mark.parametrize(
    ("name", "value", "harmless"),
    [("min_p", 0.1, 0), ("repetition_penalty", 1.1, 1.0), ("logit_bias", {"5": 1}, {}), ("guided_regex", "a+", None), ("n", 2, 1)],
)
async def test_fields_that_would_change_the_tokens_are_refused_by_name(path: str, name: str, value: Any, harmless: Any) -> None:
    _, trajectory, (refused, taken) = await answers(path, {name: value}, {name: harmless})
    assert (refused[0], taken[0]) == (400, 200)
    assert refused[1]["error"]["message"].startswith(f"{name} = ")
    assert trajectory.metrics["endpoint/ignored_fields"] == 0


@DIALECTS
async def test_top_k_is_obeyed_where_nothing_is_weighed_by_ratios(path: str) -> None:
    stage, trajectory, got = await answers(path, {"top_k": 5}, {"top_k": -1}, {"top_k": "5"})
    assert [status for status, _ in got] == [200, 200, 400]
    assert [request.sampling.top_k for request in stage.engine.requests] == [5, 0]
    assert trajectory.error is None


@DIALECTS
async def test_top_k_is_refused_where_it_would_bias_importance_ratios(path: str) -> None:
    stage, _, got = await answers(path, {"top_k": 5}, {"top_k": 0}, is_training=True, weighs_ratios=True)
    assert [status for status, _ in got] == [400, 200]
    assert "top_k = 5: cannot be honoured" in got[0][1]["error"]["message"]
    assert "importance ratio" in got[0][1]["error"]["message"]
    assert [request.sampling.top_k for request in stage.engine.requests] == [0]


THINKS = {"chat_template_kwargs": {"enable_thinking": False}}


@DIALECTS
@pytest.mark.parametrize("change", [THINKS, {"enable_thinking": False}])
async def test_variables_of_the_chat_template_are_obeyed(path: str, change: dict[str, Any]) -> None:
    thinking = deepcopy(tokenizer("qwen_tools"))
    thinking.chat_template += "{% if add_generation_prompt and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
    codec = ChatCodec(thinking)
    stage, trajectory, got = await answers(path, {}, change, codec=codec)
    assert [status for status, _ in got] == [200, 200]
    plain, unthinking = (text_of(request.prompt_ids, codec) for request in stage.engine.requests)
    assert unthinking == f"{plain}<think>\n\n</think>\n\n"
    assert trajectory.error is None


@DIALECTS
async def test_variables_that_the_chat_template_does_not_read_change_nothing(path: str) -> None:
    stage, _, got = await answers(path, {}, {"chat_template_kwargs": {"mood": "good"}})
    first, second = stage.engine.requests
    assert [status for status, _ in got] == [200, 200]
    assert first.prompt_ids.tolist() == second.prompt_ids.tolist()


@DIALECTS
@pytest.mark.parametrize("change", [{"enable_thinking": "no"}, {"chat_template_kwargs": []}, {"chat_template_kwargs": {"tools": []}}])
async def test_wrong_variables_are_refused_by_name(path: str, change: dict[str, Any]) -> None:
    _, trajectory, got = await answers(path, change)
    if change == {"chat_template_kwargs": []}:  # an empty value is none
        assert got[0][0] == 200
        return
    assert got[0][0] == 400
    assert next(iter(change)) in got[0][1]["error"]["message"]
    assert trajectory.status is Status.ENV_ERROR


@DIALECTS
async def test_images_are_left_out_with_one_warning(path: str, caplog: pytest.LogCaptureFixture) -> None:
    message = {"role": "user", "content": PARTS[path]}
    change = {"input" if path == "responses" else "messages": [message]}
    with caplog.at_level(logging.WARNING):
        stage, trajectory, got = await answers(path, change, change)
    assert [status for status, _ in got] == [200, 200]
    assert "user\nSee:\n[image omitted]<|im_end|>" in text_of(stage.engine.requests[0].prompt_ids)
    assert [record.getMessage() for record in caplog.records] == [
        "requests of the agent have images; the model reads '[image omitted]' in their place"
    ]
    assert (trajectory.error, trajectory.metrics["endpoint/images_omitted"]) == (None, 2)


async def test_images_among_the_results_of_a_tool_are_left_out() -> None:
    async def run(task: Task, llm: ModelEndpoint) -> float:
        async with llm.anthropic() as client:
            tool = {"name": "add", "input_schema": ADD["function"]["parameters"]}
            first = await client.messages.create(model="m", max_tokens=400, tools=[tool], messages=[user("one")])
            result = {"type": "tool_result", "tool_use_id": first.content[0].id, "content": [{"type": "image", "source": PICTURE}]}
            messages: list[Any] = [user("one"), {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
            await client.messages.create(model="m", max_tokens=400, tools=[tool], messages=messages)
        return 1.0

    stage, trajectory = await play_one(run, CALL, "three")
    assert trajectory.error is None
    assert "<tool_response>\n[image omitted]\n</tool_response>" in text_of(stage.engine.requests[1].prompt_ids)

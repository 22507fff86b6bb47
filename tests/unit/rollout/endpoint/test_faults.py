"""Clients that repeat, leave, come late or never stop: nothing is lost, nothing is trained twice, no failure is a reward of 0."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from agentrl import ModelEndpoint, Task
from agentrl.core.errors import EngineError
from agentrl.core.types import FinishReason, Status
from agentrl.learner.batch import merge_turns
from agentrl.rollout.endpoint.desk import MAX_BODY
from agentrl.rollout.endpoint.server import EndpointServer
from agentrl.rollout.endpoint.session import LINGER_S
from tests.scripted_engine import ScriptedEngine
from tests.unit.rollout.endpoint.support import Stage, agent, caller, play_one, says, user

pytestmark = pytest.mark.anyio

BODY: dict[str, Any] = {"model": "m", "messages": [user("one")]}


async def ask(client: Any, text: str = "one") -> str:
    return str((await client.chat.completions.create(model="m", messages=[user(text)])).choices[0].message.content)


@pytest.mark.row(22, "the same request twice at once with one idempotency key, and again after its answer")
async def test_requests_with_one_idempotency_key_are_joined() -> None:
    async def run(task: Task, llm: ModelEndpoint) -> float:
        async with caller(llm) as client:
            key = {"idempotency-key": "k1"}
            both = await asyncio.gather(*(client.post("chat/completions", json=BODY, headers=key) for _ in range(2)))
            assert both[0].json() == both[1].json()
            assert (await client.post("chat/completions", json=BODY)).json()["id"] != both[0].json()["id"]
        return 1.0

    stage, trajectory = await play_one(run, "three", delay=lambda request: 0.3)
    assert (trajectory.error, len(stage.engine.requests), len(merge_turns(trajectory))) == (None, 2, 2)
    assert (trajectory.metrics["endpoint/requests"], trajectory.metrics["endpoint/retries"]) == (3, 1)
    assert trajectory.metrics["endpoint/branches/sampled_again"] == 1


@pytest.mark.row(22, "the same request three times at once from a client that marks nothing, of a branch with a name: {name}")
@pytest.mark.parametrize("name", ["", "voter"])
async def test_votes_of_clients_that_mark_nothing_are_samples_of_their_own(name: str) -> None:
    async def run(task: Task, llm: ModelEndpoint) -> float:
        async with caller(llm.branch(name) if name else llm) as client:
            headers = {"idempotency-key": "k1"} if name else {}
            answers = await asyncio.gather(*(client.post("chat/completions", json=BODY, headers=headers) for _ in range(3)))
        return float(len({answer.json()["choices"][0]["message"]["content"] for answer in answers}))

    stage, trajectory = await play_one(run, "three", "four", "five", delay=lambda request: 0.2)
    assert (trajectory.error, trajectory.reward, len(stage.engine.requests), len(merge_turns(trajectory))) == (None, 3.0, 3, 3)
    assert trajectory.metrics["endpoint/retries"] == 0


@pytest.mark.row(22, "a client closes its connection and sends the same again while the engine works on it")
async def test_a_request_joins_the_same_one_whose_connection_is_closed() -> None:
    async def run(task: Task, llm: ModelEndpoint) -> float:
        async with caller(llm) as client:
            with pytest.raises(httpx.ReadTimeout):
                await client.post("chat/completions", json=BODY, timeout=0.2)
            answer = await client.post("chat/completions", json=BODY)
        return float(answer.json()["choices"][0]["message"]["content"] == "three")

    stage, trajectory = await play_one(run, "three", delay=lambda request: 0.6)
    assert (trajectory.error, trajectory.reward, len(stage.engine.requests)) == (None, 1.0, 1)
    assert (trajectory.metrics["endpoint/retries"], trajectory.metrics["endpoint/abandoned"]) == (1, 0)


@pytest.mark.row(22, "the same request three times at once, each marked as a first try")
async def test_requests_marked_as_first_tries_are_samples_of_their_own() -> None:
    async def run(task: Task, llm: ModelEndpoint) -> float:
        async with llm.openai() as client:
            await asyncio.gather(*(ask(client) for _ in range(3)))
        return 1.0

    stage, trajectory = await play_one(run, "three", "four", "five", delay=lambda request: 0.3)
    assert (trajectory.error, len(stage.engine.requests), len(merge_turns(trajectory))) == (None, 3, 3)
    assert trajectory.metrics["endpoint/retries"] == 0


@pytest.mark.row(22, "a client leaves before its answer, stream {stream}")
@pytest.mark.parametrize("stream", [False, True])
async def test_what_was_sampled_for_a_client_that_left_is_recorded_and_not_trained(stream: bool) -> None:
    async def run(task: Task, llm: ModelEndpoint) -> float:
        async with caller(llm, timeout=0.4) as client:
            with pytest.raises(httpx.ReadTimeout):
                await client.post("chat/completions", json={**BODY, "stream": stream})
        await asyncio.sleep(LINGER_S + 0.2)  # until then a retry would join it
        async with llm.openai() as client:
            assert await ask(client, "two") == "five"
        return 1.0

    stage, trajectory = await play_one(
        run, "three four one two", "five", delay=lambda request: 0.0 if request.request_id[-1] == "1" else 60.0
    )
    assert trajectory.error is None
    left, good = trajectory.turns
    assert (left.masked, left.finish_reason, good.masked, good.fresh) == ("abandoned", FinishReason.ABORTED, "", True)
    assert len(left.token_ids) > 0
    (row,) = merge_turns(trajectory)
    assert row.tokens.tolist() == [*stage.engine.requests[1].prompt_ids, *good.token_ids]
    assert trajectory.num_tokens == len(good.token_ids)
    assert trajectory.metrics["endpoint/abandoned"] == 1


async def call(server: EndpointServer, llm: ModelEndpoint, body: Any, leaves: asyncio.Event) -> list[dict[str, Any]]:
    """One request straight to the ASGI application, by a client that leaves at an event."""
    sent, bodies = list[dict[str, Any]](), [json.dumps(body).encode()]

    async def receive() -> dict[str, Any]:
        if bodies:
            return {"type": "http.request", "body": bodies.pop()}
        await leaves.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    headers = [(b"authorization", f"Bearer {llm.api_key}".encode())]
    await server({"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": headers}, receive, send)
    return sent


@pytest.mark.row(22, "a client leaves while its answer is sent, and asks again: {again}")
@pytest.mark.parametrize("again", [True, False])
async def test_an_answer_that_nobody_got_is_given_again_or_not_trained(again: bool) -> None:
    async def run(task: Task, llm: ModelEndpoint) -> float:
        leaves, stays = asyncio.Event(), asyncio.Event()
        first = await call(server, llm, BODY, stays)
        answer = json.loads(first[1]["body"])["choices"][0]["message"]
        more = {"model": "m", "messages": [user("one"), answer, user("more")]}
        stage.engine.answer = lambda request: [leaves.set(), *says("four")(request)][1:]
        assert await call(server, llm, more, leaves) == []
        if again:
            assert json.loads((await call(server, llm, more, stays))[1]["body"])["choices"][0]["message"]["content"] == "four"
        return 1.0

    server = EndpointServer()
    stage = Stage(agent(run), ScriptedEngine(answer=says("three"), max_model_len=4096))
    await stage.engine.start()
    (trajectory,) = await stage.play(server)
    await server.close()
    assert (trajectory.error, len(stage.engine.requests)) == (None, 2)
    assert [turn.masked for turn in trajectory.turns] == (["", ""] if again else ["", "undelivered"])
    assert [len(row.turns) for row in merge_turns(trajectory)] == ([2] if again else [1])
    assert trajectory.metrics["endpoint/delivered"] == (1.0 if again else 0.5)
    tokens = np.concatenate([turn.prompt_ids if place % 2 == 0 else turn.token_ids for turn in trajectory.turns for place in range(2)])
    assert tokens.tolist()[-len(trajectory.turns[-1].token_ids) :] == trajectory.turns[-1].token_ids.tolist()


@pytest.mark.row(22, "a call after the end of the episode")
async def test_a_late_call_is_refused_with_410() -> None:
    late: list[int] = []

    async def run(task: Task, llm: ModelEndpoint) -> float:
        async def after() -> None:
            await asyncio.sleep(0.3)
            async with caller(llm) as client:
                late.append((await client.post("chat/completions", json=BODY)).status_code)

        async with llm.openai() as client:
            await ask(client)
        tasks.append(asyncio.create_task(after()))
        return 1.0

    tasks: list[asyncio.Task[None]] = []
    server = EndpointServer()
    stage = Stage(agent(run), ScriptedEngine(answer=says("three"), max_model_len=4096))
    await stage.engine.start()
    (trajectory,) = await stage.play(server)
    await tasks[0]
    await server.close()
    assert (late, len(trajectory.turns), len(stage.engine.requests)) == ([410], 1, 1)


@pytest.mark.row(22, "a call under way at the end of the episode")
async def test_a_call_under_way_at_the_end_is_dropped() -> None:
    async def run(task: Task, llm: ModelEndpoint) -> float:
        async with llm.openai() as client:
            await ask(client)
            waiting = asyncio.create_task(ask(client, "two"))
            await asyncio.sleep(0.5)
            kept.append(waiting)
            return 1.0

    kept: list[Any] = []
    _, trajectory = await play_one(run, "three four", delay=lambda request: 0.0 if request.request_id[-1] == "0" else 60.0)
    assert (trajectory.error, [turn.masked for turn in trajectory.turns]) == (None, ["", "abandoned"])
    await asyncio.wait(kept)


@pytest.mark.row(22, "an agent that never calls")
async def test_an_agent_that_never_calls_is_a_failure_with_its_reason() -> None:
    async def run(task: Task, llm: ModelEndpoint) -> float:
        return 0.0

    _, trajectory = await play_one(run, "three")
    assert (trajectory.status, trajectory.reward) == (Status.ENV_ERROR, None)
    assert "it sent no request to the address that it was given" in (trajectory.error or "")


@pytest.mark.row(22, "an agent that never ends")
async def test_an_agent_that_never_ends_is_ended() -> None:
    async def run(task: Task, llm: ModelEndpoint) -> float:
        async with llm.openai() as client:
            await ask(client)
        await asyncio.sleep(600)
        return 1.0

    _, trajectory = await play_one(run, "three", episode_timeout_s=2.0)
    assert (trajectory.status, trajectory.reward, len(trajectory.turns)) == (Status.TIMEOUT, None, 1)


@pytest.mark.row(22, "an agent that calls 10,000 times with --max-requests 7, and catches the refusal: {catches}")
@pytest.mark.parametrize("catches", [True, False])
async def test_an_agent_that_calls_without_end_is_refused_and_truncated(catches: bool) -> None:
    async def run(task: Task, llm: ModelEndpoint) -> float:
        async with llm.openai() as client:
            for number in range(10_000):
                try:
                    await ask(client, f"{number}")
                except openai.PermissionDeniedError:
                    if catches:
                        return 0.5
                    raise
        return 1.0

    stage, trajectory = await play_one(run, "three", max_requests=7)
    assert len(stage.engine.requests) == 7
    assert (trajectory.status, trajectory.reward) == ((Status.TRUNCATED, 0.5) if catches else (Status.ENV_ERROR, None))
    assert catches or "more than 7 requests (--max-requests)" in (trajectory.error or "")


@pytest.mark.row(22, "a request fails in the engine, and its client marks the retry")
async def test_a_retry_makes_a_failure_of_the_engine_good() -> None:
    def fails_first(request: Any) -> Any:
        return EngineError("busy") if request.request_id.endswith("-0") else says("three")(request)

    async def run(task: Task, llm: ModelEndpoint) -> float:
        async with llm.openai() as client:
            return float(await ask(client) == "three")

    _, trajectory = await play_one(run, answer=fails_first)
    assert (trajectory.status, trajectory.reward, trajectory.metrics["endpoint/retries"]) == (Status.FINISHED, 1.0, 1.0)


@pytest.mark.row(22, "a request fails in the engine, and the agent hides it")
async def test_a_failure_of_the_engine_is_no_reward_even_if_the_agent_hides_it() -> None:
    def fails_later(request: Any) -> Any:
        return says("three")(request) if request.request_id.endswith("-0") else EngineError("gone")

    async def run(task: Task, llm: ModelEndpoint) -> float:
        async with llm.openai(max_retries=0) as client:
            await ask(client)
            with pytest.raises(openai.InternalServerError):
                await ask(client, "two")
        return 0.0

    _, trajectory = await play_one(run, answer=fails_later)
    assert (trajectory.status, trajectory.reward) == (Status.ENGINE_ERROR, None)
    assert "gone" in (trajectory.error or "")


@pytest.mark.row(22, "two requests go on from one answer at once")
async def test_two_continuations_of_one_conversation_are_two_branches() -> None:
    async def run(task: Task, llm: ModelEndpoint) -> float:
        async with llm.openai() as client:
            messages: list[Any] = [user("one"), {"role": "assistant", "content": await ask(client)}]
            create = client.chat.completions.create
            await asyncio.gather(*(create(model="m", messages=[*messages, user(text)]) for text in ("two", "three")))
        return 1.0

    _, trajectory = await play_one(run, "three", delay=lambda request: 0.2)
    assert [len(row.turns) for row in merge_turns(trajectory)] == [2, 1]
    assert trajectory.metrics["endpoint/branches/forked"] == 1


@pytest.mark.row(22, "requests without a key, with a wrong one, or with a body that is too large or no JSON")
async def test_without_the_key_of_a_live_episode_every_route_is_401() -> None:
    async def run(task: Task, llm: ModelEndpoint) -> float:
        async with httpx.AsyncClient(trust_env=False, base_url=llm.root) as client:
            routes = [("POST", "/v1/chat/completions"), ("POST", "/v1/responses"), ("POST", "/messages?beta=true"), ("GET", "/v1/models")]
            for method, path in [*routes, ("HEAD", "/"), ("GET", "/nowhere")]:
                for key in ("", "Bearer x", f"Bearer {llm.api_key}x", f"Bearer {llm.api_key[:-1]}"):
                    assert (await client.request(method, path, headers={"authorization": key})).status_code == 401
            client.headers["x-api-key"] = llm.api_key
            assert (await client.head("/")).status_code == 200
            assert (await client.get("/nowhere")).status_code == 404
            assert (await client.post("/v1/messages/count_tokens", json={"messages": [user("one")]})).json()["input_tokens"] > 1
            assert (await client.post("/any/prefix/chat/completions", content=b"{")).status_code == 400
            assert (await client.post("/v1/chat/completions", content=b" " * (MAX_BODY + 1))).status_code == 413
            assert (await client.post("/chat/completions", json=BODY)).status_code == 200
        return 1.0

    _, trajectory = await play_one(run, "three")
    assert trajectory.error is None


@pytest.mark.row(22, "64 episodes at once")
async def test_64_episodes_at_once_keep_apart() -> None:
    async def run(task: Task, llm: ModelEndpoint) -> float:
        async with llm.openai() as client:
            messages: list[Any] = [user(llm.api_key[-8:])]
            for _ in range(3):
                answer = await client.chat.completions.create(model="m", messages=messages)
                messages += [answer.choices[0].message, user("more")]
        return 1.0

    server = EndpointServer()
    stage = Stage(agent(run), ScriptedEngine(max_model_len=4096, answer=lambda request: list(request.request_id.encode())))
    await stage.engine.start()
    episodes = await asyncio.gather(*(stage.play(server, index) for index in range(64)))
    await server.close()
    for index, (trajectory,) in enumerate(episodes):
        assert (trajectory.error, len(merge_turns(trajectory))) == (None, 1)
        expected = [list(f"3-0-{index}-{number}".encode()) for number in range(3)]
        assert [turn.token_ids.tolist() for turn in trajectory.turns] == expected


@pytest.mark.row(22, "a request of another episode takes 600 s")
async def test_no_request_waits_for_that_of_another_episode() -> None:
    async def run(task: Task, llm: ModelEndpoint) -> float:
        async with llm.openai() as client:
            return float(await ask(client) == "three")

    server = EndpointServer()
    engine = ScriptedEngine(answer=says("three"), max_model_len=4096, delay=lambda request: 600.0 if request.session == "3-0-0" else 0.0)
    stage = Stage(agent(run), engine)
    await stage.engine.start()
    stuck = asyncio.create_task(stage.play(server, 0))
    await asyncio.sleep(0.2)
    episodes = await asyncio.gather(*(stage.play(server, index) for index in range(1, 9)))
    assert [trajectory.reward for (trajectory,) in episodes] == [1.0] * 8
    assert not stuck.done()
    stuck.cancel()
    await asyncio.wait({stuck})
    await server.close()


@pytest.mark.row(22, "a prompt of 14 MB")
async def test_a_prompt_that_cannot_fit_is_refused_before_it_is_tokenised() -> None:
    async def run(task: Task, llm: ModelEndpoint) -> float:
        async with caller(llm) as client:
            huge = {"model": "m", "messages": [user("one two three " * 1_000_000)]}
            refused = await client.post("chat/completions", json=huge)
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
            headers = {"x-agentrl-branch": "writer"}
            assert (await client.post("chat/completions", json=BODY, headers=headers)).status_code == 200
        return 1.0

    stage, trajectory = await play_one(run, "three")
    assert trajectory.error is None
    assert [exchange.branch for exchange in stage.episodes[0].session.exchanges if exchange.answered] == ["writer"]
    assert trajectory.metrics["endpoint/refused"] == 1

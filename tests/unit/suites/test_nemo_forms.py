"""NeMo Gym's servers with /reset and /step, and its agent servers, whose model server a relay stands for."""

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from agentrl.core.errors import EnvLoadError
from agentrl.core.types import Status, Task, Trajectory
from agentrl.env.responses import PARAMS, chat_of
from agentrl.suites.load import load_agent
from tests.servers import Request, serve
from tests.unit.examples.test_agents import play_class
from tests.unit.suites.remote import call, metric, outcome, play, said, script

pytestmark = pytest.mark.anyio

COOKIE = {"Set_Cookie": "s=1; Path=/"}
LOOK = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}


def task(*, tools: bool = False) -> Task:
    row = {PARAMS: {"input": [{"role": "user", "content": "Play."}], "tools": [LOOK] if tools else []}, "level": 3}
    return Task(chat_of(row[PARAMS]), metadata=row, id="game")


async def game(request: Request) -> None:
    """Wants to be greeted first, and pays for the word "win"; a call of a tool is answered."""
    if request.path == "/reset":
        assert request.json["level"] == 3
        await request.answer({"observation": "Say hello.", "info": {}}, **COOKIE)
        return
    if request.path == "/close_session":
        await request.answer({}, status=404)
        return
    output = request.json["response"]["output"]
    calls = [item for item in output if item["type"] == "function_call"]
    text = "".join(item["content"][0]["text"] for item in output if item["type"] == "message")
    won = "win" in text
    outputs = [{"call_id": item["call_id"], "output": f"{item['name']}: a door"} for item in calls]
    answer = {"observation": None if calls or won else "Go on.", "reward": 1.0 * won - 0.25, "terminated": won, "truncated": "cut" in text}
    await request.answer({**answer, "info": {"tool_outputs": outputs, "length": len(text)}}, **COOKIE)


async def played(player: Callable[[int, str], str], *, tools: bool = False, **settings: Any) -> Trajectory:
    async with serve(game) as server:
        cls: Any = load_agent(f"nemo-gym:{server.url}?form=gymnasium").load()
        trajectory = await play(cls, task(tools=tools), player, **settings)
        assert [request.path for request in server.requests[:2]] == ["/reset", "/step"]
        return trajectory


async def test_a_gymnasium_like_server_judges_each_turn() -> None:
    trajectory = await played(script("Hello", "I win"))
    assert outcome(trajectory) == ("finished", 0.5)
    assert [turn.reward for turn in trajectory.turns] == [-0.25, 0.75]
    assert "Play.<|im_end|>\n<|im_start|>user\nSay hello." in trajectory.turns[0].prompt_text
    assert "Go on." in trajectory.turns[1].prompt_text
    assert metric(trajectory, "length") == 5.0


async def test_calls_get_the_outputs_that_the_server_names() -> None:
    broken = "<tool_call>{not json}</tool_call>"
    trajectory = await played(script(call("look"), broken + call("look"), "I win"), tools=True)
    assert outcome(trajectory)[0] == "finished", trajectory.error
    assert said(trajectory).count("look: a door") == 2
    assert "Error: " in trajectory.turns[2].prompt_text
    assert '"name": "look"' in trajectory.turns[0].prompt_text  # the tools are described


async def test_a_server_may_cut_an_episode_and_so_may_the_limit_of_turns() -> None:
    assert outcome(await played(script("cut"))) == ("truncated", -0.25)
    assert outcome(await played(script("Hello", "Hello"), max_turns=2)) == ("truncated", -0.5)


async def test_an_answer_without_a_reward_is_a_failure() -> None:
    async def silent(request: Request) -> None:
        await request.answer({"observation": "Go."}, **COOKIE)

    async with serve(silent) as server:
        cls: Any = load_agent(f"nemo-gym:{server.url}?form=gymnasium").load()
        trajectory = await play(cls, task(), script("Hello"))
    assert (trajectory.status, trajectory.reward) == (Status.ENV_ERROR, None)
    assert "reward" in (trajectory.error or "")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def agent_server(port: int, **answer: Any) -> Callable[[Request], Any]:
    """An agent that asks the model server at a port twice."""

    async def run(request: Request) -> None:
        params = request.json[PARAMS]
        items = list(params["input"])
        async with httpx.AsyncClient(trust_env=False) as client:
            for _ in range(2):
                body = {"input": items, "metadata": params["metadata"]}
                reply = await client.post(f"http://127.0.0.1:{port}/v1/responses", json=body)
                assert reply.status_code == 200, reply.text
                items = [*items, *reply.json()["output"], {"role": "user", "content": "Sure?"}]
        text = items[-2]["content"][0]["text"]
        await request.answer({"reward": float(text == "yes"), "num_calls": 2, **answer})

    return run


async def agent_played(port: int, *texts: str, **answer: Any) -> Trajectory:
    async with serve(agent_server(port, **answer)) as server:
        cls: Any = load_agent(f"nemo-gym:{server.url}?form=agent&model_port={port}").load()
        (trajectory,) = await play_class(cls, task(), *texts)
        return trajectory


async def test_an_agent_server_reaches_the_model_of_its_episode_through_the_relay() -> None:
    trajectory = await agent_played(free_port(), "well", "yes")
    assert (trajectory.error, trajectory.reward, len(trajectory.turns)) == (None, 1.0, 2)
    assert (trajectory.metrics["endpoint/branches"], trajectory.metrics["num_calls"]) == (1.0, 2.0)
    assert "agentrl_key" not in "".join(turn.prompt_text for turn in trajectory.turns)


async def test_episodes_share_a_relay_and_the_port_is_free_afterwards() -> None:
    port = free_port()
    trajectories = await asyncio.gather(*(agent_played(port, "well", text) for text in ("yes", "no", "yes", "no")))
    assert [(trajectory.error, trajectory.reward) for trajectory in trajectories] == [(None, 1.0), (None, 0.0)] * 2
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))


async def test_a_port_that_something_else_has_is_told() -> None:
    async def other(request: Request) -> None:
        await request.answer({})

    async with serve(other) as server:
        trajectory = await agent_played(int(server.url.rpartition(":")[2]), "yes")
    assert trajectory.reward is None
    assert "no relay of agentrl listens on port" in (trajectory.error or "")


async def test_a_masked_sample_is_a_failure() -> None:
    trajectory = await agent_played(free_port(), "yes", mask_sample=True)
    assert (trajectory.status, trajectory.reward) == (Status.ENV_ERROR, None)


async def test_the_relay_passes_nothing_on_without_an_episode() -> None:
    from agentrl.suites.nemo_relay import relay

    port = free_port()
    async with relay(port), httpx.AsyncClient(trust_env=False, base_url=f"http://127.0.0.1:{port}") as client:
        for metadata in ({}, {"agentrl_key": "http://10.0.0.1:80/v1 key"}, {"agentrl_key": "http://127.0.0.1:1/v1@evil key"}):
            answer = await client.post("/v1/responses", json={"metadata": metadata})
            assert (answer.status_code, "name no" in answer.json()["error"]["message"]) == (401, True)
        assert (await client.post("/v1/responses", content=b"{")).status_code == 401
        assert (await client.get("/v1/models")).status_code == 404


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("form=other", "form = 'other' is unknown"),
        ("form=agent", "model_port = None is no port"),
        ("form=agent&model_port=1&max_steps=3", "has no option 'max_steps'"),
        ("form=agent&model_port=1&timeout_s=-1", "timeout_s = -1 is out of range"),
    ],
)
def test_wrong_options_are_told(options: str, told: str) -> None:
    with pytest.raises(EnvLoadError, match=told):
        load_agent(f"nemo-gym:http://127.0.0.1:1?{options}")

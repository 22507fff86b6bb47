"""Recorded requests of black-box agents are driven again offline; a graph that behaves otherwise is found at its request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from agentrl import ModelEndpoint, Task
from agentrl.assets import tiny_model_path
from agentrl.cli.replay import main
from agentrl.config.mapping import to_json
from agentrl.config.schema import TrainConfig
from agentrl.config.sections import changed
from agentrl.core.differences import Difference
from agentrl.core.errors import EngineError, StructureError
from agentrl.core.summaries import GroupSummary
from agentrl.core.types import GroupRequest
from agentrl.inspect.requests import replay_requests
from agentrl.resolve.parts import episode_plan
from agentrl.rollout.chat import ChatCodec
from agentrl.rollout.endpoint import graph, session
from agentrl.rollout.worker import EpisodeWorker
from agentrl.suites.load import load_agent
from agentrl.track.jsonl import encode
from agentrl.track.sinks import TrajectoryRecorder
from tests.scripted_engine import ScriptedEngine
from tests.unit.rollout.endpoint.support import ADD, ASKS, CALL, CODEC, SETTINGS, play_one, user
from tests.unit.rollout.templates import tokenizer

Log = dict[str, Any]

KEYS: list[str] = []


async def uses_a_tool(task: Task, llm: ModelEndpoint) -> float:
    """A tool call, its result, and then another answer to the first question."""
    KEYS.append(llm.api_key)
    async with llm.openai() as client:
        messages: list[Any] = [{"role": "system", "content": "Be quick."}, user(task.prompt)]
        first = (await client.chat.completions.create(model="m", messages=messages, tools=[ADD], stop=["END"])).choices[0].message
        result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "3"}
        more = [*messages, first, result]
        await client.chat.completions.create(model="m", messages=more, tools=[ADD], max_tokens=50)
        await client.chat.completions.create(model="m", messages=[*messages, user("And without tools?")])
    return 1.0


async def goes_wrong(task: Task, llm: ModelEndpoint) -> float:
    """Two requests at once, a client that leaves, a prompt that is too long, and conversations that the service keeps."""
    async with llm.openai(max_retries=0) as client:
        await asyncio.gather(*(client.chat.completions.create(model="m", messages=[user(text)]) for text in ("one", "two")))
        with pytest.raises(openai.BadRequestError, match="tokens"):
            await client.chat.completions.create(model="m", messages=[user("long " * 5000)])
        with pytest.raises(openai.InternalServerError):
            await client.chat.completions.create(model="m", messages=[user("fail")])
        await client.chat.completions.create(model="m", messages=[user("fail")])
        begun = await client.responses.create(model="m", input="three", instructions="Be quick.")
        await client.responses.create(model="m", input="four", instructions="Be quick.", previous_response_id=begun.id)
    headers = {"authorization": f"Bearer {llm.branch('search').api_key}"}
    async with httpx.AsyncClient(base_url=llm.base_url, headers=headers, trust_env=False, timeout=0.5) as client:
        with pytest.raises(httpx.ReadTimeout):
            await client.post("chat/completions", json={"model": "m", "messages": [user("leave")]})
    return 1.0


async def recorded(run: Any, *texts: str, **changes: Any) -> Log:
    stage, trajectory = await play_one(run, *texts, record_requests=True, **changes)
    assert trajectory.error is None
    log = stage.episodes[0].requests
    assert log is not None
    written: Log = json.loads(encode(log))
    return written


async def again(log: Log, codec: ChatCodec = CODEC) -> Difference | None:
    return await replay_requests(log, codec=codec, settings=SETTINGS)


def delays(*slow: str) -> Callable[[Any], float]:
    return lambda request: 60.0 if any(text in CODEC.decode(request.prompt_ids.tolist()) for text in slow) else 0.0


@pytest.mark.anyio
async def test_recorded_requests_replay_and_hold_no_key() -> None:
    log = await recorded(uses_a_tool, CALL, "three", "four")
    assert await again(log) is None
    assert [row["outcome"] for row in log["requests"]] == ["answered"] * 3
    assert all(row["delivered"] for row in log["requests"])
    assert [(turn["context"], turn["turn"], turn["branch_reason"]) for turn in log["turns"]] == [
        (0, 0, ""),
        (0, 1, ""),
        (1, 0, "tools changed"),
    ]
    assert len(log["messages"]) == 5  # each once, however often it was sent
    assert log["requests"][0]["stop"] == ["END"]
    secret = KEYS[-1].split("-", 2)[2]  # it may hold a minus itself
    assert secret not in json.dumps(log)


@pytest.mark.anyio
async def test_failures_replay_as_they_were() -> None:
    failed: list[str] = []

    def answer(request: Any) -> Any:
        if "fail" in CODEC.decode(request.prompt_ids.tolist()) and not failed:
            failed.append("once")
            return EngineError("broken")
        return [*CODEC.encode_text("three four one two"), *CODEC.turn_end_ids]

    log = await recorded(goes_wrong, answer=answer, delay=delays("leave"))
    assert await again(log) is None
    outcomes = [row["outcome"] for row in log["requests"]]
    assert outcomes == [
        *("answered", "answered", "400 context_length_exceeded", "500 engine_error"),
        *("answered", "answered", "answered", "499 client_left"),
    ]
    assert [row["delivered"] for row in log["requests"]] == [outcome == "answered" for outcome in outcomes]
    assert [turn["masked"] for turn in log["turns"]] == ["", "", "", "", "", "abandoned"]
    assert (log["requests"][-1]["branch"], log["requests"][-2]["previous"][:5]) == ("search", "resp_")


async def forces_forms(task: Task, llm: ModelEndpoint) -> float:
    """A forced call, a free answer behind it, and a form that the engine refuses."""
    async with llm.openai() as client:
        create, messages = client.chat.completions.create, list[Any]([user("one")])
        messages.append((await create(model="m", messages=messages, tools=[ADD], tool_choice="required")).choices[0].message)
        messages.append({"role": "tool", "tool_call_id": messages[-1].tool_calls[0].id, "content": "3"})
        await create(model="m", messages=messages, tools=[ADD])
        with pytest.raises(openai.BadRequestError, match="no grammar"):
            await create(model="m", messages=[user("two")], response_format={"type": "json_object"})
    return 1.0


@pytest.mark.anyio
async def test_forced_forms_replay_as_they_were() -> None:
    def answer(request: Any) -> Any:
        if request.structure is not None and request.structure.json_schema:
            return StructureError("no grammar")
        return [*CODEC.encode_text("three" if request.structure is None else CALL), *CODEC.turn_end_ids]

    log = await recorded(forces_forms, answer=answer)
    assert await again(log) is None
    assert [row["outcome"] for row in log["requests"]] == ["answered", "answered", "400 unsupported_value"]
    assert [turn["masked"] for turn in log["turns"]] == ["constrained", ""]
    assert log["requests"][0]["constraint"]["must_call"] is True


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("owner", "name", "behaviour", "number", "what", "got"),
    [
        (graph.MessageGraph, "_tail", lambda *given: None, 1, "branch", "branch 2, turn 1, opened because of 'template'"),
        (graph.MessageGraph, "_reason", lambda *given: "edited", 2, "branch", "branch 2, turn 1, opened because of 'edited'"),
        (graph.Place, "echoed", lambda *given: None, 1, "branch", ""),
        (session.EndpointSession, "_check_size", lambda *given: 1 / 0, 0, "branch", "no turn"),
    ],
)
async def test_changed_behaviour_of_the_endpoint_is_found(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, behaviour: Any, number: int, what: str, got: str
) -> None:
    log = await recorded(uses_a_tool, CALL, "three", "four")
    monkeypatch.setattr(owner, name, behaviour)
    found = await again(log)
    assert found is not None
    assert (found.turn, found.what) == (number, what)
    assert found.expected != found.got
    assert not got or found.got == got


@pytest.mark.anyio
async def test_another_chat_template_is_found_in_the_prompt() -> None:
    log = await recorded(uses_a_tool, CALL, "three", "four")
    found = await again(log, ChatCodec(tokenizer("chatml")))
    assert found is not None
    assert (found.turn, found.what) == (0, "prompt")
    assert found.expected_ids != found.got_ids


@pytest.mark.anyio
async def test_an_answer_that_is_no_longer_masked_is_found() -> None:
    log = await recorded(uses_a_tool, CALL, "three", "four")
    log["turns"][2]["masked"] = "undelivered"
    assert await again(log) == Difference(turn=2, what="mask", expected="masked: undelivered", got="trained")
    log["requests"][2]["delivered"] = False
    assert await again(log) is None


async def played(agent: str, config: TrainConfig, num_samples: int) -> GroupSummary:
    engine = ScriptedEngine(answer=lambda request: [20 + sum(request.request_id.encode()) % 30, 21, 22], max_model_len=512)
    worker = EpisodeWorker(engine, load_agent(agent), episode_plan(config).with_model(str(tiny_model_path())))
    await worker.start()
    try:
        task = Task("1+2=?", label="3", id="sum")
        group_request = GroupRequest(group_id=0, task=task, n_samples_per_prompt=num_samples, version=0, record=num_samples - 1)
        return (await worker.run_group(group_request))[0]
    finally:
        await worker.close()


def write_run(path: Path, num_samples: int = 3) -> None:
    """Write the directory of a run with the records of one group."""
    path.mkdir()
    file = path / "asks.py"
    file.write_text(ASKS)
    config = changed(TrainConfig(), agent=str(file), model=str(tiny_model_path()), max_new_tokens=8, record="all", record_requests=True)
    (path / "config.json").write_text(to_json(config))
    recorder = TrajectoryRecorder(path / "trajectories.jsonl", requests=path / "requests.jsonl")
    recorder.write(asyncio.run(played(str(file), config, num_samples)))
    recorder.close()


def test_the_command_drives_the_requests_of_a_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    write_run(run)
    assert len((run / "requests.jsonl").read_text().splitlines()) == 2  # as many as --record asks for
    assert main([str(run), "--all"]) == 0
    assert "2 from the recorded requests" in capsys.readouterr().out
    assert main([str(run), "0-0-1"]) == 0
    assert "every prompt, branch and mask is the same" in capsys.readouterr().out
    monkeypatch.setattr(graph, "_shared", lambda first, second: 0)
    assert main([str(run), "0-0-1"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "differs at request 3: branch" in said
    assert "opened because of 'sampled again'" in said
    assert main([str(run), "--all"]) == 1
    monkeypatch.undo()
    (run / "requests.jsonl").unlink()
    assert main([str(run), "--all"]) == 0  # now with the agent


def test_a_log_that_cannot_be_used_is_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    write_run(run, num_samples=2)
    (log,) = map(json.loads, (run / "requests.jsonl").read_text().splitlines())
    del log["messages"]
    (run / "requests.jsonl").write_text(encode(log) + "\n")
    assert main([str(run), "--all"]) == 2
    assert "its log of requests cannot be used: KeyError" in " ".join(capsys.readouterr().out.split())

"""Every template of the installed packages: dialogues reach the model in the template's own rendering, or in a form that is named."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentrl import ModelEndpoint, Policy, ResetResult, StepResult, Task
from agentrl.config.sections import changed
from agentrl.core.errors import ConfigError
from agentrl.env.tools.environment import with_tools
from agentrl.rollout.chat import ChatCodec
from tests.scripted_engine import ScriptedEngine
from tests.unit.rollout.endpoint.support import caller, play
from tests.unit.rollout.families import DIALOGUES, REFUSED, SOURCES, TOOLS, codec_of, family, form_of, own_renderings
from tests.unit.rollout.scenes import PATIENT, Scene, env_class
from tests.unit.rollout.test_execution import executor

LONG = changed(PATIENT, max_episode_tokens=8000)
USABLE = [name for name in SOURCES if name not in REFUSED]


def whole(codec: ChatCodec, dialogue: str) -> tuple[str, str]:
    """The prompt of a dialogue, and the form in which it was written."""
    first, *rest = DIALOGUES[dialogue]
    codec.forms.clear()
    text = codec.decode(codec.encode_chat([{**first, "tools": TOOLS} if dialogue == "tool description" else first, *rest]))  # type: ignore[list-item]
    return text, next(iter(codec.forms.values()))


@pytest.mark.parametrize("name", USABLE)
@pytest.mark.parametrize("dialogue", DIALOGUES)
def test_a_prompt_is_the_templates_own_rendering_or_in_a_named_form(name: str, dialogue: str) -> None:
    text, form = whole(codec_of(name), dialogue)
    if form_of(name, dialogue) == "own":
        assert form == "as they are"
        assert text in own_renderings(name, dialogue)
    for message in DIALOGUES[dialogue]:
        content = message["content"] if isinstance(message["content"], str) else "What is"
        assert content in text
        assert all(
            call["function"]["name"] in text and str(call["function"]["arguments"]["a"]) in text for call in message.get("tool_calls", ())
        )


@pytest.mark.parametrize("name", USABLE)
@pytest.mark.parametrize(
    "dialogue", [name for name, messages in DIALOGUES.items() if any(part["role"] == "assistant" for part in messages)]
)
def test_what_is_appended_to_a_turn_is_the_end_of_the_templates_own_rendering(name: str, dialogue: str) -> None:
    codec, messages = codec_of(name), DIALOGUES[dialogue]
    last = max(place for place, message in enumerate(messages) if message["role"] == "assistant")
    history, new = messages[: last + 1], messages[last + 1 :]
    tail = codec.decode(codec.encode_next(new, -1, history))  # type: ignore[arg-type]
    assert all(message["content"] in tail for message in new)
    assert [tail.index(f"RESULT-{place}") for place in range(2) if f"RESULT-{place}" in tail] == sorted(
        tail.index(f"RESULT-{place}") for place in range(2) if f"RESULT-{place}" in tail
    )
    if form_of(name, dialogue, appended=True) == "own":
        called = (
            {**messages[last], "content": ""} if messages[last].get("tool_calls") else messages[last]
        )  # gemma4 puts the text behind results
        without = [*messages[:last], called, *new]
        assert any(text.endswith(tail) for text in (*own_renderings(name, dialogue), *own_renderings(name, dialogue, without)))


@pytest.mark.parametrize("name", USABLE)
def test_no_token_within_a_turn_ends_it(name: str) -> None:
    codec, made = codec_of(name), family(name)
    reasoning = {"reasoning_content": "One.", "thinking": "One."}
    answers: list[dict[str, Any]] = [
        {"content": "Three.", **reasoning},
        {"content": "", "tool_calls": DIALOGUES["call and result"][1]["tool_calls"], **reasoning},
    ]
    for answer in answers:
        asked = [{"role": "user", "content": "?"}]
        try:
            heads = [made.apply_chat_template(asked, tokenize=False, add_generation_prompt=opens) for opens in (False, True)]
            turn = made.apply_chat_template([*asked, {"role": "assistant", **answer}], tokenize=False)
        except Exception:
            continue
        begin = max(sum(turn.startswith(head[:length]) for length in range(1, len(head) + 1)) for head in heads)
        end = max(turn.rfind("Three."), turn.rfind("17"))
        assert not set(codec.encode_text(turn[begin:end])) & set(codec.end_token_ids) or end < begin


@pytest.mark.parametrize("name", USABLE)
@pytest.mark.anyio
async def test_the_endpoint_gives_the_model_the_same_prompts(name: str) -> None:
    codec = codec_of(name)
    bodies = {dialogue: {"model": "m", "messages": [_as_sent(part) for part in messages]} for dialogue, messages in DIALOGUES.items()}
    bodies["tool description"]["tools"] = TOOLS
    problems = []

    async def run(task: Task, llm: ModelEndpoint) -> float:
        async with caller(llm) as client:
            for body in bodies.values():
                reply = await client.post("/chat/completions", json=body)
                problems.extend([] if reply.status_code == 200 else [reply.text])
        return 1.0

    stage, _ = await play(run, "Something else.", codec=codec, max_requests=len(bodies))
    assert not problems
    assert len(stage.engine.requests) == len(bodies)
    for request, dialogue in zip(stage.engine.requests, bodies, strict=True):
        expected = whole(codec, dialogue)[0].replace("What is it?", "What is\n it?")  # the endpoint puts texts of one message into lines
        assert codec.decode(request.prompt_ids.tolist()) == expected, dialogue


def _as_sent(message: dict[str, Any]) -> dict[str, Any]:
    """A message as a client of the API sends it: arguments are JSON text."""
    sent = {key: value for key, value in message.items() if not (message["role"] == "tool" and key == "name")}
    if "tool_calls" in sent:
        called = [{**call["function"], "arguments": json.dumps(call["function"]["arguments"])} for call in sent["tool_calls"]]
        sent["tool_calls"] = [{**call, "function": function} for call, function in zip(sent["tool_calls"], called, strict=True)]
    return sent


@pytest.mark.parametrize("name", USABLE)
@pytest.mark.anyio
async def test_environments_and_executors_give_the_model_the_same_prompts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    codec = codec_of(name)
    monkeypatch.setattr("tests.unit.rollout.scenes.CODEC", codec)
    expected = {dialogue: whole(codec, dialogue)[0] for dialogue in DIALOGUES}
    chats: dict[str, Any] = {**DIALOGUES, "tool description": with_tools(DIALOGUES["tool description"], TOOLS)}

    async def encode_all(task: Task, llm: Policy) -> float:
        found = {dialogue: llm.decode(llm.encode_prompt(messages)) for dialogue, messages in chats.items()}
        await llm.generate(llm.encode("?"))
        return float(found == expected)

    assert (await Scene(executor(encode_all), settings=LONG).play()).reward == 1.0
    for dialogue, messages in chats.items():
        env = env_class(lambda state: StepResult(1.0, terminated=True), reset=lambda self, state, chat=messages: ResetResult(chat))
        trajectory = await Scene(env, ScriptedEngine(max_model_len=8192), LONG).play()
        assert [turn.prompt_text for turn in trajectory.turns] == [expected[dialogue]], trajectory.error


@pytest.mark.parametrize("name", REFUSED)
def test_a_template_that_cannot_be_used_is_refused_with_a_remedy(name: str) -> None:
    with pytest.raises(ConfigError, match=r"leaves out the text of a user's message.*--chat-template FILE"):
        ChatCodec(family(name))

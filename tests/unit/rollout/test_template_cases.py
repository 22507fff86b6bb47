"""What went wrong with real templates, case by case, and tokenizers and models that cannot be used."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from agentrl import Message, ModelEndpoint, Task, ToolEnv
from agentrl.config.sections import changed
from agentrl.core.errors import ConfigError, EnvResultError
from agentrl.env.tools.calls import ToolCall, parse_tool_calls
from agentrl.env.tools.channels import Channels, split_channels
from agentrl.rollout.chat import ChatCodec
from agentrl.rollout.codecs import make_codec
from agentrl.rollout.endpoint.answers import JsonAnswerParser
from agentrl.rollout.episode_plan import EpisodePlan
from agentrl.rollout.plan import ModelConfig
from agentrl.rollout.template import ChatTemplate
from tests.scripted_engine import ScriptedEngine
from tests.unit.rollout.endpoint.support import caller, play_one
from tests.unit.rollout.endpoint.support import says as says_at_endpoint
from tests.unit.rollout.families import ASKED, CALLED, RESULTS, TOOLS, call, codec_of, family, said
from tests.unit.rollout.scenes import PATIENT, Scene
from tests.unit.rollout.templates import tokenizer

CHANNELS = (
    "<|channel|>analysis<|message|>I add.<|end|><|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
)
CHANNELS_CALL = CHANNELS + '{"a": 1}<|call|>'
FINAL = "<|channel|>analysis<|message|>Done.<|end|><|start|>assistant<|channel|>final<|message|>3<|return|>"


def one(name: str, text: str) -> int:
    (found,) = codec_of(name).encode_text(text)
    return found


def behind(name: str, *messages: Any, last: str = "", history: Any = ()) -> str:
    codec = codec_of(name)
    return codec.decode(codec.encode_next(messages, one(name, last) if last else -1, history))


def test_gpt_oss_the_end_of_a_channel_is_no_end_of_a_turn() -> None:
    ends = {codec_of("gptoss").decode([token]) for token in codec_of("gptoss").end_token_ids}
    assert {"<|return|>", "<|call|>"} <= ends
    assert "<|end|>" not in ends
    named = ChatCodec(family("gptoss"), end_token_ids=[one("gptoss", "<|end|>")])
    assert one("gptoss", "<|end|>") not in named.end_token_ids


def test_gpt_oss_results_come_from_the_tool_and_a_turn_that_ended_is_not_ended_again() -> None:
    result = {**RESULTS[0], "name": "add"}
    assert behind("gptoss", result, last="<|call|>", history=[ASKED, CALLED]) == (
        '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"RESULT-0"<|end|><|start|>assistant'
    )
    assert behind("gptoss", said("user", "Two?"), last="<|return|>") == "<|start|>user<|message|>Two?<|end|><|start|>assistant"
    assert behind("gptoss", said("user", "Two?")).startswith("<|end|><|start|>user")


def test_gpt_oss_turns_are_taken_apart() -> None:
    assert split_channels("<tool_call>{}</tool_call>") is None
    assert split_channels(CHANNELS_CALL) == Channels("I add.", "", (("add", '{"a": 1}'),))
    assert parse_tool_calls(CHANNELS_CALL) == [ToolCall("add", {"a": 1})]
    assert parse_tool_calls(CHANNELS_CALL.removesuffix("<|call|>")) == [ToolCall("add", {"a": 1})]
    assert parse_tool_calls(FINAL) == []
    parts = JsonAnswerParser().parse(FINAL, TOOLS)
    assert (parts.reasoning, parts.text, parts.calls) == ("Done.", "3", ())
    assert JsonAnswerParser().parse(CHANNELS_CALL, TOOLS).calls == (("add", '{"a": 1}'),)


def add(a: int) -> int:
    """Add to two.

    Args:
        a: One.
    """
    return a + 2


class Sums(ToolEnv):
    tools = (add,)

    def judge(self, state: Any) -> float:
        return float(state.action_text.endswith("3"))


@pytest.mark.anyio
async def test_gpt_oss_calls_tools_in_a_step_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = codec_of("gptoss")
    monkeypatch.setattr("tests.unit.rollout.scenes.CODEC", codec)

    def answer(request: Any) -> list[int]:
        return codec.encode_text((CHANNELS_CALL, FINAL)[int(request.request_id.rsplit("-", 1)[1])])

    trajectory = await Scene(Sums, ScriptedEngine(answer=answer, max_model_len=4096), changed(PATIENT, max_new_tokens=300)).play()
    assert trajectory.error is None
    assert trajectory.reward == 1.0
    assert "type add = (" in trajectory.turns[0].prompt_text
    assert trajectory.turns[1].prompt_text == (
        '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"3"<|end|><|start|>assistant'
    )


@pytest.mark.anyio
async def test_gpt_oss_calls_tools_at_the_endpoint() -> None:
    codec = codec_of("gptoss")

    async def run(task: Task, llm: ModelEndpoint) -> float:
        async with caller(llm) as client:
            messages: list[Any] = [ASKED]
            reply = (await client.post("/chat/completions", json={"model": "m", "messages": messages, "tools": TOOLS})).json()
            called = reply["choices"][0]["message"]
            messages += [called, said("tool", "3", tool_call_id=called["tool_calls"][0]["id"])]
            reply = (await client.post("/chat/completions", json={"model": "m", "messages": messages, "tools": TOOLS})).json()
        return float(reply["choices"][0]["message"]["content"] == "3")

    answer = says_at_endpoint(CHANNELS_CALL.removesuffix("<|call|>"), FINAL.removesuffix("<|return|>"), codec=codec)
    _, trajectory = await play_one(run, answer=answer, codec=codec)
    assert trajectory.reward == 1.0
    assert len(trajectory.turns) == 2
    assert '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"3"<|end|>' in trajectory.turns[1].prompt_text


@pytest.mark.parametrize("name", ["phi3", "cohere2"])
def test_phi3_and_cohere2_a_result_reaches_the_model_as_the_users(name: str) -> None:
    assert "RESULT-0" in behind(name, RESULTS[0], history=[ASKED, CALLED])
    assert "RESULT-0" in codec_of(name).decode(codec_of(name).encode_chat([ASKED, CALLED, RESULTS[0]]))  # type: ignore[list-item]


@pytest.mark.parametrize("name", ["gptoss", "deepseekv3", "cohere2"])
def test_a_later_system_message_reaches_the_model(name: str) -> None:
    assert "Be quick." in behind(name, said("system", "Be quick."), said("user", "Two?"))


def test_lfm2_calls_of_a_history_are_kept_with_a_parser_of_its_own() -> None:
    codec = ChatCodec(family("lfm2"), template_tools=True)
    text = codec.decode(codec.encode_chat([{**ASKED, "tools": TOOLS}, CALLED, RESULTS[0]]))  # type: ignore[list-item]
    assert '{"name": "add", "arguments": {"a": 17}}' in text


def test_llama_3_1_two_calls_in_one_message_become_two_messages() -> None:
    twice = said("assistant", "", tool_calls=[call("add", 17), call("sub", 18, 1)])
    text = codec_of("llama3_1").decode(codec_of("llama3_1").encode_chat([ASKED, twice, *RESULTS]))  # type: ignore[list-item]
    assert [text.index(part) for part in ('"add"', "RESULT-0", '"sub"', "RESULT-1")] == sorted(
        text.index(part) for part in ('"add"', "RESULT-0", '"sub"', "RESULT-1")
    )


def test_results_are_in_the_order_of_their_calls_whatever_the_template() -> None:
    twice = said("assistant", "", tool_calls=[call("add", 17), call("sub", 18, 1)])
    for name in ("qwen3", "lfm2", "phi3"):
        text = behind(name, RESULTS[1], RESULTS[0], history=[ASKED, twice])
        assert text.index("RESULT-0") < text.index("RESULT-1")


def test_qwen_2_5_the_line_break_between_text_and_call_is_the_templates() -> None:
    looked = said("assistant", "Let me look.", tool_calls=[call("add", 17)])
    text = codec_of("qwen2_5").decode(codec_of("qwen2_5").encode_chat([ASKED, looked, RESULTS[0]]))  # type: ignore[list-item]
    assert 'Let me look.\n<tool_call>\n{"name": "add"' in text


def test_what_is_lost_in_every_form_is_refused_with_role_template_and_remedy() -> None:
    made = copy.deepcopy(tokenizer("chatml"))
    made.chat_template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content[:40] }}<|im_end|>\n{% endfor %}"
    codec = ChatCodec(made)
    long = Message(role="user", content="x" * 41)
    for refused in (lambda: codec.encode_chat([long]), lambda: codec.encode_next([long], 5)):
        with pytest.raises(
            EnvResultError, match=r"the chat template of .* leaves out the text of the message of the role user.*--chat-template"
        ):
            refused()


@pytest.mark.anyio
async def test_the_forms_that_hold_are_recorded() -> None:
    codec = ChatCodec(family("gemma"))
    codec.encode_chat([said("system", "Be brief."), ASKED])  # type: ignore[list-item]
    assert codec.forms == {("system", "user"): "all but the assistant's as the user's"}


def test_a_tokenizer_without_an_end_token_is_refused() -> None:
    made = copy.deepcopy(tokenizer("none"))
    made.eos_token = None
    made.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    with pytest.raises(ConfigError, match=r"--model.*no token ends a turn.*Set eos_token in tokenizer_config\.json"):
        ChatCodec(made)


def test_a_generation_config_with_a_token_that_is_none_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"generation_config\.json: eos_token_id = 99999 is no token of its tokenizer, which has [\d,]+\. Correct"
    ):
        ChatCodec(tokenizer("qwen"), end_token_ids=[99999])


def test_a_vocabulary_smaller_than_the_tokenizer_is_refused(tmp_path: Path) -> None:
    settings = changed(EpisodePlan(), model=str(tmp_path))
    for size, refused in ((2, True), (5000, False)):
        (tmp_path / "config.json").write_text(json.dumps({"vocab_size": size}))
        if refused:
            with pytest.raises(ConfigError, match=r"--model = .*vocab_size = 2 in config\.json.*resize its embeddings"):
                make_codec(tokenizer("qwen"), settings)
        else:
            assert make_codec(tokenizer("qwen"), settings).encode_question("?")


def test_a_template_that_raises_for_everything_is_refused_at_once() -> None:
    made = copy.deepcopy(tokenizer("qwen"))
    made.chat_template = "{{ raise_exception('no!') }}"
    with pytest.raises(ConfigError, match=r"--model.*refuses messages of the roles user: no!.*--chat-template FILE"):
        ChatCodec(made)


def test_a_users_template_thinking_and_variables_reach_the_codec(tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text(
        "{% for m in messages %}[{{ m.role }}{{ level }}] {{ m.content }}<|im_end|>{% endfor %}{% if enable_thinking %}T{% endif %}"
    )
    model = ModelConfig(chat_template=str(file), chat_template_kwargs='{"level": 3}', thinking="on")
    codec = ChatCodec(tokenizer("qwen"), template=ChatTemplate(tokenizer("qwen"), model))
    assert codec.decode(codec.encode_question("Hi")) == "[user3] Hi<|im_end|>T"
    assert codec.decode(codec.encode_next([Message(role="user", content="Ho")], codec.turn_end_ids[0])) == "[user3] Ho<|im_end|>T"

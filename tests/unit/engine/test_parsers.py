"""vLLM's parsers behind the endpoint."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import pytest

from agentrl.core.errors import ConfigError
from agentrl.core.protocols import Structure
from agentrl.engine import parsers
from agentrl.engine.parsers import answer_parser, fit_parser
from agentrl.env.tools.calls import ToolCall, parse_tool_calls
from agentrl.rollout.call_proof import ARGUMENTS, written_calls
from agentrl.rollout.chat import ChatCodec
from agentrl.rollout.endpoint.answers import JsonAnswerParser, split_thought
from agentrl.rollout.endpoint.splitter import AnswerSplitter
from agentrl.rollout.plan import EndpointConfig
from tests.unit.rollout.endpoint.support import ADD, CALL
from tests.unit.rollout.families import PARSERS, REFUSED, SOURCES, TOOLS, TOOLS_TOLD, family
from tests.unit.rollout.templates import tokenizer

AUTO, USER = EndpointConfig(), {"role": "user", "content": "What is one plus two?"}


def test_the_parser_of_json_needs_no_vllm() -> None:
    assert isinstance(answer_parser(EndpointConfig(), None), JsonAnswerParser)


@pytest.mark.slow
def test_parsers_of_vllm_take_answers_apart() -> None:
    parser = answer_parser(EndpointConfig(tool_parser="hermes"), tokenizer("qwen_tools"))
    for text in (f"So:\n{CALL}", f"{CALL}\n{CALL}", "three", "<tool_call>{", f"<think>\nHm.\n</think>\n\n{CALL}"):
        ours = JsonAnswerParser().parse(text, [ADD])
        theirs = parser.parse(text, [ADD])
        assert theirs.calls == ours.calls
    pythonic = answer_parser(EndpointConfig(tool_parser="pythonic"), tokenizer("qwen_tools"))
    assert pythonic.parse("[add(a=1, b=2)]", [ADD]).calls == (("add", '{"a": 1, "b": 2}'),)
    assert pythonic.parse("[add(a=1, b=2)]", []).text == "[add(a=1, b=2)]"


@pytest.mark.slow
def test_parsers_of_vllm_know_the_grammar_of_their_calls() -> None:
    hermes = answer_parser(EndpointConfig(tool_parser="hermes", reasoning_parser="deepseek_r1"), tokenizer("qwen_tools"))
    structure = hermes.structure(None, [ADD])
    assert structure is not None
    tag = json.loads(structure.structural_tag)["format"]
    assert '"required": ["a", "b"]' in json.dumps(tag)
    both = hermes.structure({"type": "object"}, [ADD])
    assert both is not None
    assert json.loads(both.structural_tag)["format"]["elements"] == [{"type": "json_schema", "json_schema": {"type": "object"}}, tag]
    assert hermes.parse('{"a": 1}', [ADD], reasons=False).text == '{"a": 1}'
    pythonic = answer_parser(EndpointConfig(tool_parser="pythonic"), tokenizer("qwen_tools"))
    assert pythonic.structure(None, [ADD]) is None
    assert pythonic.structure({"type": "object"}, []) == Structure(json_schema='{"type": "object"}')


@pytest.mark.slow
def test_an_unknown_parser_is_answered_with_a_similar_name() -> None:
    with pytest.raises(ConfigError, match="hermes") as raised:
        answer_parser(EndpointConfig(tool_parser="hermess"), None)
    assert raised.value.field == "--tool-parser"


def told(codec: ChatCodec) -> str:
    """The prompt of a question with a tool."""
    return codec.decode(codec.encode_chat([{**USER, "tools": TOOLS}]))  # type: ignore[list-item]


def by_template(name: str) -> str:
    made: Any = family(name)
    for content in (USER["content"], [{"type": "text", "text": USER["content"]}]):
        rendered = str(made.apply_chat_template([{**USER, "content": content}], tools=TOOLS, tokenize=False, add_generation_prompt=True))
        if USER["content"] in rendered:
            return rendered
    return ""


@pytest.mark.parametrize("name", TOOLS_TOLD)
def test_calls_in_json_are_proven_without_vllm(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parsers, "_registered", None)
    codec = ChatCodec(family(name))
    assert fit_parser(codec, AUTO) == ""
    assert codec.tool_parser == "json"
    assert told(codec) == by_template(name)


@pytest.mark.parametrize("name", ["llama3", "gemma", "lfm2", "phi3"])
def test_without_calls_or_descriptions_of_a_template_the_system_message_asks_for_json(name: str) -> None:
    codec = ChatCodec(family(name))
    before = told(codec)
    assert "You may call tools" in before
    assert fit_parser(codec, AUTO) in ("the template describes no tools", "the template does not write calls whole")
    assert (codec.tool_parser, told(codec)) == ("json", before)


def test_without_vllm_the_reason_is_named_and_json_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parsers, "find_spec", lambda name: None)
    codec = ChatCodec(family("qwen3_5_nothink"))
    before = told(codec)
    assert "vLLM" in fit_parser(codec, AUTO)
    assert told(codec) == before
    assert "You may call tools" in before


def test_json_that_is_asked_for_stays_for_a_template_with_a_form_of_its_own() -> None:
    codec = ChatCodec(family("qwen3_5_nothink"))
    assert fit_parser(codec, EndpointConfig(tool_parser="json")) == "the parser json does not read the calls that the template writes"
    assert "You may call tools" in told(codec)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SOURCES if name not in REFUSED])
def test_the_parser_of_a_template_is_found_and_reads_exactly_its_calls(name: str) -> None:
    codec = ChatCodec(family(name))
    problem = fit_parser(codec, AUTO)
    assert codec.tool_parser == PARSERS.get(name, "json")
    assert (problem == "") == (name in PARSERS or name in TOOLS_TOLD)
    if problem:
        assert "You may call tools" in told(codec)
        return
    assert told(codec) == by_template(name)
    tools = [{"type": "function", "function": {"name": tool, "parameters": {}}} for tool in ARGUMENTS]
    for text, called in written_calls(codec):
        assert [call for call, _ in codec.parser.parse(text, tools).calls] == [tool for tool, _ in called]
        assert not codec.parser.parse("Nothing to call.", tools).calls


@pytest.mark.slow
def test_calls_in_thinking_are_not_made_and_those_behind_it_are() -> None:
    codec = ChatCodec(family("qwen3_5_think"))
    assert fit_parser(codec, AUTO) == ""
    call = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n</function>\n</tool_call>"
    parts = codec.parser.parse(f"I may {call}\n</think>\n\n{call}", [ADD])
    assert parts.reasoning == f"I may {call}"
    assert parts.calls == (("add", '{"a": 1, "b": 2}'),)
    ids = [*codec.encode_text(f"Hm.\n</think>\n\n{call}"), *codec.turn_end_ids]
    answer = codec.decode_answer(ids, [ADD])
    assert parse_tool_calls(answer) == [ToolCall("add", {"a": 1, "b": 2})]
    assert parse_tool_calls(codec.decode_answer(ids, [])) != parse_tool_calls(answer)
    assert codec.parser.parse("<tool_call>\n<function=", [ADD]).calls == ()


TOLD = "{% for tool in tools or () %}<tool>{{ tool.function | tojson }}</tool>\n{% endfor %}"
OPENED = "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
TURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}{% if m.tool_calls %}CALLS{% endif %}<|im_end|>\n{% endfor %}"
)
MINIMAX = (
    '<minimax:tool_call>\n{% for c in m.tool_calls %}<invoke name="{{ c.function.name }}">\n'
    '{% for k, v in c.function.arguments.items() %}<parameter name="{{ k }}">{{ v if v is string else v | tojson }}</parameter>\n'
    "{% endfor %}</invoke>\n{% endfor %}</minimax:tool_call>"
)
KIMI = (
    "<|tool_calls_section_begin|>{% for c in m.tool_calls %}<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>"
    "{{ c.function.arguments | tojson }}<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>"
)


@pytest.mark.slow
@pytest.mark.parametrize(("calls", "parser", "problem"), [(MINIMAX, "minimax_m2", ""), (KIMI, "json", "does not write calls whole")])
def test_forms_of_families_whose_templates_no_package_carries(calls: str, parser: str, problem: str) -> None:
    made = copy.deepcopy(tokenizer("chatml"))
    tokens = sorted(set(re.findall(r"<\|tool_\w+\|>|</?minimax:tool_call>", calls)))
    made.add_special_tokens({"additional_special_tokens": [*tokens, "<think>", "</think>"]})
    made.chat_template = TOLD + TURNS.replace("CALLS", calls) + OPENED
    codec = ChatCodec(made)
    assert problem in fit_parser(codec, AUTO)
    assert codec.tool_parser == parser
    assert ("You may call tools" in told(codec)) == bool(problem)


@pytest.mark.slow
def test_a_parser_without_its_special_tokens_is_passed_over() -> None:
    made = copy.deepcopy(tokenizer("chatml"))
    made.chat_template = SOURCES["lfm2_2_5"]
    codec = ChatCodec(made)
    assert fit_parser(codec, AUTO) == "no parser of vLLM reads the calls that the template writes"
    assert "You may call tools" in told(codec)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SOURCES if name in PARSERS])
def test_text_before_calls_in_a_models_own_form_is_streamed(name: str) -> None:
    codec = ChatCodec(family(name))
    assert fit_parser(codec, AUTO) == ""
    tools = [{"type": "function", "function": {"name": tool, "parameters": {}}} for tool in ARGUMENTS]
    for call, _ in written_calls(codec):
        for text in (f"Three, <b>four</b> and five.\n\n{split_thought(call)[1].strip()}", "Three, <b>four</b> and five."):
            splitter = AnswerSplitter(codec.parser, tools)
            deltas = [delta for letter in text for delta in splitter.feed(letter)]
            assert "".join(delta.text for delta in deltas) == "Three, <b>four</b> and five."
            whole, rest = splitter.end(text)
            parsed = codec.parser.parse(text, tools)
            assert whole.calls == parsed.calls
            assert whole == parsed or "<|message|>" in call  # a form in which a text before a call has a header of its own
            assert [delta.kind for delta in rest] == ["call"] * len(whole.calls)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek_r1", "qwen3"])
def test_reasoning_that_a_parser_of_vllm_reads_is_streamed(name: str) -> None:
    made = copy.deepcopy(tokenizer("chatml"))
    made.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    parser = answer_parser(EndpointConfig(reasoning_parser=name), made)
    text = "Hm, so.\n</think>\n\nthree"
    splitter = AnswerSplitter(parser, [], opening="<think>")
    deltas = [delta for letter in f"\n{text}" for delta in splitter.feed(letter)]
    whole, rest = splitter.end(f"\n{text}")
    assert (whole.reasoning, whole.text, rest) == ("Hm, so.", "three", [])
    assert "".join(delta.text for delta in deltas) == "Hm, so.three"

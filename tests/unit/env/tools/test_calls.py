"""Tool calls in what a model wrote."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.env.tools.calls import BadCall, ToolCall, parse_tool_calls

ADD = ToolCall("add", {"a": 1, "b": 2})
OBJECT = '{"name": "add", "arguments": {"a": 1, "b": 2}}'


@pytest.mark.parametrize(
    "text",
    [
        OBJECT,
        '{"tool":"add","args":{"a":1,"b":2}}',
        '{"args":{"a":1,"b":2},"tool":"add"}',
        '{"name":"add","parameters":{"a":1,"b":2}}',
        '{"name":"add","arguments":"{\\"a\\":1,\\"b\\":2}"}',
        '{"type":"function","function":{"name":"add","arguments":"{\\"a\\":1,\\"b\\":2}"}}',
        f"<tool_call>\n{OBJECT}\n</tool_call>",
        f"I will add.\n<tool_call>{OBJECT}</tool_call>\nWait.",
        f"<tool_call>{OBJECT}",
        f"```json\n{OBJECT}\n```",
        f"Let me see: {OBJECT} and then",
        f"[{OBJECT}]",
        f'<think>or {{"tool":"sub","args":[]}}?</think>\n{OBJECT}',
    ],
)
def test_one_call_in_every_format(text: str) -> None:
    assert parse_tool_calls(text) == [ADD]


def test_arguments_in_order() -> None:
    assert parse_tool_calls('{"tool":"add","args":[1,2]}') == [ToolCall("add", (1, 2))]
    assert parse_tool_calls('{"tool":"now"}') == [ToolCall("now", {})]


@pytest.mark.parametrize("form", ["{0}\n{0}", "{0};{0}", "[{0},{0}]", "<tool_call>{0}</tool_call><tool_call>{0}</tool_call>"])
def test_several_calls_keep_their_order(form: str) -> None:
    other = OBJECT.replace('"a": 1', '"a": 5')
    text = form.format(OBJECT).replace(OBJECT, other, 1)
    assert [call.arguments["a"] for call in parse_tool_calls(text)] == [5, 1]


@pytest.mark.parametrize(
    "text", ["", "56", "{", "[", '{"x": 1}', '{"name": "Ada"}', "[1, 2]", "the add tool", '"tool"', "null", "[" * 100_000]
)
def test_plain_answers_are_no_calls(text: str) -> None:
    assert parse_tool_calls(text) == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"tool":"add","args":[1,', "not valid JSON"),
        ("<tool_call>add(1, 2)</tool_call>", "not valid JSON"),
        ("<tool_call></tool_call>", "not valid JSON"),
        ("<tool_call>7</tool_call>", "an object"),
        ('<tool_call>{"arguments":{}}</tool_call>', "names no tool"),
        ('{"tool":3,"args":[]}', "names no tool"),
        ('{"tool":"add","args":7}', "no object or list"),
        ('{"name":"add","arguments":"{a:1}"}', "arguments of add are not valid JSON"),
        ("<tool_call>" + "[" * 100_000, "not valid JSON"),
        ('{"tool":"add","args":[' + "9" * 5000 + "]}", "not valid JSON"),
        ('{"tool":"add","args":["\\ud800"]}', "half a character"),
        ('{"tool":"add\\udc00","args":[]}', "half a character"),
        ('{"name":"add","arguments":"{\\"a\\": {\\"b\\": \\"\\\\ud83d\\"}}"}', "half a character"),
    ],
)
def test_what_was_meant_as_a_call_is_told_what_is_wrong(text: str, problem: str) -> None:
    (call,) = parse_tool_calls(text)
    assert isinstance(call, BadCall)
    assert problem in call.problem


def test_a_good_call_beside_a_bad_one_is_kept() -> None:
    good, bad = parse_tool_calls(f"<tool_call>{OBJECT}</tool_call><tool_call>oops</tool_call>")
    assert good == ADD
    assert isinstance(bad, BadCall)


KEYS = st.sampled_from(["tool", "name", "function", "args", "arguments", "parameters", "type"]) | st.text(max_size=3)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=8,
)
PIECES = st.sampled_from(
    ["<tool_call>", "</tool_call>", "```json", "```", "<think>", "</think>", '{"tool":', '"args"', "{", "}", "[", "\\", '"']
)


@given(st.lists(PIECES | JSON.map(json.dumps) | st.text(max_size=5), max_size=8).map("".join))
def test_whatever_is_written_nothing_is_raised(text: str) -> None:
    for call in parse_tool_calls(text):
        assert isinstance(call, BadCall) or isinstance(call.name, str)


@pytest.mark.parametrize(
    "spelled", ["<|message|>", "<|channel|>final<|message|>", "<|start|>assistant to=functions.add<|message|>{}<|call|>"]
)
@pytest.mark.parametrize("form", ["{}", "<tool_call>{}</tool_call>", "I write it. <tool_call>{}</tool_call>"])
def test_a_call_may_spell_the_marks_of_channels(form: str, spelled: str) -> None:
    (call,) = parse_tool_calls(form.replace("{}", json.dumps({"name": "write", "arguments": {"text": spelled}})))
    assert call == ToolCall("write", {"text": spelled})


@given(name=st.text(min_size=1), arguments=st.dictionaries(st.text(), JSON.filter(lambda v: v == v), max_size=3))
def test_a_well_formed_call_is_read_back(name: str, arguments: dict[str, object]) -> None:
    text = json.dumps({"name": name, "arguments": arguments})
    for form in (text, f"<tool_call>{text}</tool_call>"):
        if "</think>" not in form and "tool_call>" not in text:
            assert json.dumps(parse_tool_calls(form)[0].arguments) == json.dumps(arguments)

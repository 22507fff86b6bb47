"""What is given out of an answer while it is sampled is the beginning of what the whole answer is."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.rollout.endpoint.answers import JsonAnswerParser, Parts
from agentrl.rollout.endpoint.live import TokenText, cut_at_stop
from agentrl.rollout.endpoint.neutral import Delta
from agentrl.rollout.endpoint.splitter import AnswerSplitter
from tests.unit.rollout.endpoint.support import ADD, CALL, CODEC

CHANNELS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>three"
PARSER = JsonAnswerParser()
ARGUMENTS = '{"a": 1, "b": 2}'
BARE = '{"name": "add", "arguments": {"a": 1, "b": 2}}'
PIECES = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", CALL, BARE, "```", "```json\n", "`", "{", "[", '{"name"', '"tool":'),
    *("Hm.", " ", "\n", "\n\n", "three ", "to=", "to=functions.add", "<|channel|>analysis", "<|channel|>final", "<|channel|>commentary"),
    *("<|message|>", "<|end|>", "<|call|>", "<|start|>assistant", "<", "a < b", "<tool", "é", '{"a": 1}', '{"x": 1}'),
]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=9).map("".join)


def fed(splitter: AnswerSplitter, pieces: list[str]) -> list[Delta]:
    return [delta for piece in pieces for delta in splitter.feed(piece)]


def joined(deltas: list[Delta]) -> Parts:
    """What a client puts together."""
    text, reasoning, calls = "", "", list[tuple[str, str]]()
    for delta in deltas:
        if delta.kind == "text":
            text += delta.text
        elif delta.kind == "reasoning":
            reasoning += delta.text
        elif delta.kind == "call":
            calls.append((delta.text, delta.arguments or ""))
        else:
            calls[-1] = calls[-1][0], calls[-1][1] + delta.text
    return Parts(text=text, reasoning=reasoning, calls=tuple(calls))


@settings(max_examples=400, deadline=None)
@given(TEXTS, st.lists(st.integers(0, 80)), st.booleans(), st.sampled_from(["", "<think>"]), st.sampled_from([None, 1]))
def test_pieces_are_the_beginning_of_the_whole_however_a_text_is_cut(
    text: str, cuts: list[int], has_tools: bool, opening: str, most: int | None
) -> None:
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[begin:end] for begin, end in pairwise(places)]
    tools = [ADD] if has_tools else []
    found = []
    for parts in (pieces, list(text), [text]):
        splitter = AnswerSplitter(PARSER, tools, opening=opening, most_calls=most)
        deltas = fed(splitter, parts)
        whole, rest = splitter.end(text)
        found.append(whole)
        seen = joined(deltas + rest)
        assert (seen.text, seen.calls) == (whole.text, whole.calls)
        assert whole.reasoning.startswith(seen.reasoning)
        assert seen.reasoning == whole.reasoning or "<|message|>" in text
    assert found[0] == found[1] == found[2]
    expected = PARSER.parse(opening + text, tools)
    if "</think>" not in text and "<|message|>" not in text:
        assert found[0] == Parts(text=expected.text, reasoning=expected.reasoning, calls=expected.calls[:most])


@pytest.mark.parametrize(
    ("text", "settled"),
    [
        ("three", Parts(text="three")),
        ("<think>\nHm.\n", Parts(text="", reasoning="Hm.")),
        ("<think>\nHm.\n</think>\n\nthree ", Parts(text="three", reasoning="Hm.")),
        ("<think>Hm.</thi", Parts(text="", reasoning="Hm.")),
        ("<thi", Parts(text="")),
        (f"Both: <b>\n{CALL}\n<tool_", Parts(text="Both: <b>", calls=(("add", ARGUMENTS),))),
        (f"One:\n{CALL[:-1]}", Parts(text="One:")),
        ("I call <tool", Parts(text="I call")),
        ("I call <tool.", Parts(text="I call <tool.")),
        (f"Let me see: {BARE}", Parts(text="Let me see:")),
        ('So {"x": 1} it is', Parts(text='So {"x": 1} it is')),
        ("Code:\n```python\nx = [1]", Parts(text="Code:\n```python\nx = [1]")),
        ("Code:\n```json\n[1, 2]", Parts(text="Code:")),
        (
            CHANNELS,
            Parts(text="three", reasoning="Hm."),
        ),
    ],
)
def test_what_is_settled_of_an_answer(text: str, settled: Parts) -> None:
    for pieces in ([text], list(text)):
        assert joined(fed(AnswerSplitter(PARSER, [ADD]), pieces)) == settled


def test_what_stands_behind_a_call_is_no_text_where_the_whole_reads_otherwise_than_what_was_given() -> None:
    text = f"So {BARE}</tool_call><|call|>\n\n</think>```{BARE}<|channel|>final"  # what stands before </think> is a thought, seen too late
    splitter = AnswerSplitter(PARSER, [ADD])
    deltas = fed(splitter, list(text))
    whole, rest = splitter.end(text)
    assert whole == joined(deltas + rest) == Parts(text="So", calls=(("add", ARGUMENTS),))


def test_a_thought_that_is_seen_too_late_stays_text_where_the_text_behind_it_begins_alike() -> None:
    text = "</tool_call><tool_call></think></tool_call>"
    for pieces in ([text], list(text)):
        splitter = AnswerSplitter(PARSER, [ADD])
        deltas = fed(splitter, pieces)
        whole, rest = splitter.end(text)
        assert whole == joined(deltas + rest) == Parts(text=text)


def test_a_thought_behind_the_text_is_kept_where_channels_tell_them_apart() -> None:
    text = "<|channel|>final<|message|>three<|end|><|start|>assistant<|channel|>analysis<|message|>Hm.<|end|>"
    splitter = AnswerSplitter(PARSER, [ADD])
    assert joined(fed(splitter, list(text))).text == "three"
    assert splitter.end(text)[0] == PARSER.parse(text, [ADD]) == Parts(text="three", reasoning="Hm.")


def test_without_tools_everything_is_text_at_once() -> None:
    splitter = AnswerSplitter(PARSER, [])
    assert joined(fed(splitter, list(f"{BARE} {CALL} "))) == Parts(text=f"{BARE} {CALL} ")


def test_a_call_that_is_held_to_its_form_flows_from_its_arguments_on() -> None:
    splitter = AnswerSplitter(PARSER, [ADD], reasons=False)
    text = CALL.replace('{"a": 1, "b": 2}', '{"a":1,"b":{"c":2}}')
    deltas = fed(splitter, list(text))
    assert deltas[0] == Delta("call", "add")
    assert len(deltas) > 10
    whole, rest = splitter.end(text)
    assert (
        whole
        == joined(deltas + rest)
        == PARSER.parse(text, [ADD], reasons=False)
        == Parts(text="", calls=(("add", '{"a":1,"b":{"c":2}}'),))
    )
    cut, begin = AnswerSplitter(PARSER, [ADD], reasons=False), text[: text.index('":2}')]
    deltas = fed(cut, list(begin))
    whole, rest = cut.end(begin)
    assert (whole.calls, joined(deltas + rest).calls) == ((("add", '{"a":1,"b":{"c'),),) * 2


def test_reasoning_that_nothing_opened_stays_text_in_a_stream() -> None:
    text = "Hm.\n</think>\n\nthree"
    streamed = AnswerSplitter(PARSER, [])
    deltas = fed(streamed, list(text))
    assert streamed.end(text)[0] == joined(deltas) == Parts(text=text)
    assert AnswerSplitter(PARSER, []).end(text)[0] == Parts(text="three", reasoning="Hm.")
    opened = AnswerSplitter(PARSER, [], opening="<think>")
    assert joined(fed(opened, list(text))) == Parts(text="three", reasoning="Hm.")


def test_an_answer_that_ends_in_its_reasoning_is_reasoning() -> None:
    assert PARSER.parse("<think>\nHm. I", []) == Parts(text="", reasoning="Hm. I")
    assert PARSER.parse("<think>a</think>b</think>c", [ADD]) == Parts(text="b</think>c", reasoning="a")


@pytest.mark.parametrize("most", [1, 2, None])
def test_no_more_calls_are_given_out_than_are_wanted(most: int | None) -> None:
    text = "\n".join([CALL] * 3)
    for pieces in ([text], list(text), []):
        splitter = AnswerSplitter(PARSER, [ADD], most_calls=most)
        deltas = fed(splitter, pieces)
        whole, rest = splitter.end(text)
        assert joined(deltas + rest).calls == whole.calls == (("add", ARGUMENTS),) * (most or 3)


def test_calls_before_a_malformed_one_stand() -> None:
    text = f'So:\n{CALL}\n<tool_call>\n{{"name": "add", "argu'
    assert PARSER.parse(text, [ADD]) == Parts(text="So:", calls=(("add", ARGUMENTS),))
    bad = "So:\n<tool_call>{</tool_call>"
    assert PARSER.parse(f"{bad}{CALL}", [ADD]) == Parts(text=f"{bad}{CALL}")


@given(st.text(max_size=30), st.lists(st.integers(1, 4), min_size=1))
def test_text_of_tokens_comes_in_whole_characters(text: str, sizes: list[int]) -> None:
    ids = CODEC.encode_plain(text)
    stream, seen, place = TokenText(CODEC.decode), "", 0
    while place < len(ids):
        size = sizes[place % len(sizes)]
        piece = stream.feed(ids[place : place + size])
        assert "\ufffd" not in piece or "\ufffd" in text
        seen += piece
        place += size
    whole = CODEC.decode(ids)
    assert whole.startswith(seen)
    assert seen == whole or whole.endswith("\ufffd")


@pytest.mark.parametrize(
    ("text", "found"),
    [("one two", ("one two", "")), ("one END two", ("one ", "END")), ("a\n\nEND", ("a", "\n\n")), ("END", ("", "END"))],
)
def test_a_text_ends_before_its_first_stop_string(text: str, found: tuple[str, str]) -> None:
    assert cut_at_stop(text, ["END", "\n\n"]) == found


def test_names_of_calls_are_json_strings() -> None:
    name = 'a"b'
    text = f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {{}}}}\n</tool_call>'
    assert PARSER.parse(text, [ADD], reasons=False).calls == ((name, "{}"),)

"""Parser of tool calls in a model's text, in the formats that models are commonly trained on."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from agentrl.env.tools.channels import split_channels

NAME_KEYS = ("tool", "name", "function")
ARGUMENT_KEYS = ("args", "arguments", "parameters")

TAG, TAG_END = "<tool_call>", "</tool_call>"

_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
_FENCE = re.compile(r"```(?:json)?\s*(?=[\[{])")
_BARE = re.compile(r'\{\s*"(?:tool|name|function|type)"\s*:')
# The beginning of `_FENCE` or `_BARE`, or of what may become one of them where the text ends so far.
_MAYBE = re.compile(
    r"`{1,2}\Z|```(?:j|js|jso)?\Z|```(?:json)?\s*(?:[\[{]|\Z)"
    r'|\{\s*\Z|\{\s*"\w{0,8}\Z|\{\s*"(?:tool|name|function|type)"\s*(?::|\Z)'
)
_LIKE_A_CALL = re.compile(r'"tool"|"(?:args|arguments|parameters)"')
_BETWEEN = re.compile(r"[\s;,]*")
_DECODER = json.JSONDecoder()


class ToolCallError(ValueError):
    """A call that cannot be run; the model reads the message."""


class ToolFailedError(RuntimeError):
    """A failure that the tool describes in words of its own; the model reads them as they are."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call as the model wrote it, with arguments by name or in order."""

    name: str
    arguments: Mapping[str, Any] | tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class BadCall:
    """A malformed call; the model reads `problem`."""

    problem: str


Parsed: TypeAlias = ToolCall | BadCall


class ParsedText(str):
    """Text of a turn whose calls were found by a parser of the model's own form; a changed copy is ordinary text, without them."""

    calls: tuple[Parsed, ...]

    def __new__(cls, text: str, calls: Iterable[Parsed]) -> ParsedText:
        """Make a text that has these calls."""
        made = super().__new__(cls, text)
        made.calls = tuple(calls)
        return made

    def __getnewargs__(self) -> tuple[str, tuple[Parsed, ...]]:  # type: ignore[override]
        """Return the arguments that a copy is made with in another process."""
        return str(self), self.calls


def parse_tool_calls(text: str) -> list[Parsed]:
    r"""Return the tool calls in a turn, in order; none for a plain answer. Never raises.

    Accepts JSON objects in ``<tool_call>`` tags (Hermes, Qwen), and bare JSON, alone, in a code fence, or after some
    text; text after the JSON is ignored. An object is ``{"tool": ..., "args": ...}`` or
    ``{"name": ..., "arguments": ...}`` (``parameters`` in Llama's), with an object, a list, or a JSON string
    as arguments. Text up to ``</think>`` is ignored. In a turn that is written in channels (gpt-oss), the messages to tools
    are the calls. The text of a model that writes calls in a form of its own carries them: `ParsedText`.

    Args:
        text: Text of the turn, without its end token.
    """
    return list(text.calls) if isinstance(text, ParsedText) else split_tool_calls(text)[1]


def call_of(name: str, arguments: str) -> Parsed:
    """Return a call with the JSON text of its arguments; "" for none."""
    return _call({"name": name, "arguments": arguments or "{}"})


def split_tool_calls(text: str) -> tuple[str, list[Parsed]]:
    """Return the text before the first tool call, after ``</think>``, and the calls as `parse_tool_calls` does."""
    channels = split_channels(text)
    if channels is not None and channels.calls:
        return channels.text, [call_of(name, arguments) for name, arguments in channels.calls]
    return split_calls(text.rpartition("</think>")[2] if channels is None else channels.text)


def split_calls(text: str) -> tuple[str, list[Parsed]]:
    """Do the same for a text without reasoning and channels."""
    before, found, _ = text.partition(TAG)
    if found:
        return before, tagged_calls(text)[0]
    start = _bare(text)
    before, body = text[:start], text[start:]
    try:
        values = list(_values(body))
    except (ValueError, RecursionError) as error:
        return before, [BadCall(f"the call is not valid JSON: {error}")] if _LIKE_A_CALL.search(body) else []
    return before, [_call(value) for value in values if _is_call(value)]


def tagged_calls(text: str, *, ended_only: bool = False) -> tuple[list[Parsed], int]:
    """Return the calls in tags, and the place behind them; with `ended_only` those alone that are whole, before the first malformed one."""
    calls, end = list[Parsed](), 0
    for found in _TAGGED.finditer(text):
        whole, more = found.end() < len(text) or found[0].endswith(TAG_END), _tagged(found[1].strip())
        if ended_only and (not whole or any(isinstance(call, BadCall) for call in more)):
            break
        calls, end = calls + more, found.end()
    return calls, end


def may_be_calls_from(text: str, *, begins: bool) -> int:
    """Return the place from which the rest of a text may turn out to be calls, as more follows; its length if no part of it may.

    The text has no whole tag. It `begins` a turn, or goes on with one.
    """
    lead = len(text) - len(text.lstrip())
    if begins and text[lead : lead + 1] in ("{", "["):
        return lead
    found = _MAYBE.search(text)
    whole = len(text) - held_length(text, (TAG,))
    return min(found.start(), whole) if found else whole


def held_length(text: str, marks: Iterable[str]) -> int:
    """Length of the longest end of a text with which one of some marks begins, or which is a whole one."""
    ends = (size for mark in marks for size in range(min(len(mark), len(text)), 0, -1) if text.endswith(mark[:size]))
    return max(ends, default=0)


def _tagged(body: str) -> list[Parsed]:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        return [BadCall(f"the call is not valid JSON: {error}")]
    return [_call(item) for item in (value if isinstance(value, list) else [value])]


def _bare(text: str) -> int:
    """Return the place where bare JSON starts; the length of the text if there is none."""
    lead = len(text) - len(text.lstrip())
    if text[lead : lead + 1] in ("{", "["):
        return lead
    fence = _FENCE.search(text)
    if fence:
        return fence.end()
    found = _BARE.search(text)
    return found.start() if found else len(text)


def _values(body: str) -> Iterator[Any]:
    """Yield JSON objects and the elements of JSON lists, up to the first text that is neither."""
    position = 0
    while body[position : position + 1] in ("{", "["):
        value, position = _DECODER.raw_decode(body, position)
        yield from value if isinstance(value, list) else [value]
        position = _BETWEEN.match(body, position).end()  # type: ignore[union-attr]  # it matches nothing, too


def _is_call(value: Any) -> bool:
    """Return True for an object that is meant as a call; ``{"name": "Ada"}`` is an answer."""
    if not isinstance(value, Mapping):
        return False
    value = _unwrapped(value)
    return "tool" in value or (any(key in value for key in NAME_KEYS) and any(key in value for key in ARGUMENT_KEYS))


def _call(value: Any) -> Parsed:
    if not isinstance(value, Mapping):
        return BadCall("a call is an object with name and arguments")
    value = _unwrapped(value)
    name = next((value[key] for key in NAME_KEYS if key in value), None)
    if not isinstance(name, str):
        return BadCall("the call names no tool")
    arguments: Any = next((value[key] for key in ARGUMENT_KEYS if key in value), {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            return BadCall(f"the arguments of {name[:80]} are not valid JSON: {error}")
    if not _is_text((name, arguments)):
        return BadCall("the call holds half a character (\\ud800 to \\udfff), which is no text")
    if isinstance(arguments, list):
        return ToolCall(name, tuple(arguments))
    return ToolCall(name, arguments) if isinstance(arguments, Mapping) else BadCall(f"the arguments of {name[:80]} are no object or list")


def _is_text(value: Any) -> bool:
    """Return True if all texts in a value of JSON can be encoded; escapes may name halves of characters, which cannot."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except (UnicodeEncodeError, RecursionError):
        return False
    return True


def _unwrapped(value: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the inner object of ``{"type": "function", "function": {...}}``."""
    inner = value.get("function")
    return inner if isinstance(inner, Mapping) else value

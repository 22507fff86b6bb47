"""From sampled text to an answer: reasoning, text and tool calls apart."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Protocol

from agentrl.core.protocols import Structure
from agentrl.env.tools.calls import (
    TAG,
    TAG_END,
    BadCall,
    Parsed,
    ToolCall,
    held_length,
    may_be_calls_from,
    split_calls,
    split_tool_calls,
    tagged_calls,
)
from agentrl.env.tools.channels import split_channels
from agentrl.rollout.endpoint.neutral import Json
from agentrl.rollout.plan import EndpointConfig

AUTO_PARSER, JSON_PARSER = "auto", "json"
"""Names of the parser that reads what the chat template writes, and of the one that needs no vLLM."""
THINK, THOUGHT = "<think>", "</think>"

# Exactly what `_call_format` asks for: an engine that holds a text to that form writes no other blanks.
_HELD = re.compile(r'<tool_call>\n\{"name": ("(?:[^"\\\x00-\x1f]|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*"), "arguments": ')
_HELD_END = f"}}\n{TAG_END}"


def names_own_form(config: EndpointConfig) -> bool:
    """Return True if the user names the form in which the model writes tool calls, which its chat template then asks for."""
    return config.tool_parser not in (AUTO_PARSER, JSON_PARSER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Parts of a sampled text."""

    text: str
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()  # name and arguments, which are the JSON text of an object


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """Texts by which an answer that is being sampled shows its reasoning."""

    think: str = THINK  # an answer that begins with it begins with reasoning
    thought: str = THOUGHT  # ends it
    is_text_without: bool = True  # an answer that begins otherwise has no reasoning that could be told before its end
    has_channels: bool = True  # an answer may be written in channels


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """Parts of an answer that is being sampled which stay as they are, whatever follows."""

    text: str = ""
    calls: tuple[tuple[str, str], ...] = ()  # behind the text, whole
    begun: tuple[str, str] | None = None  # a call that the form of the answer proves: its name, and its arguments so far
    used: int = 0  # characters that need not be looked at again


class AnswerParser(Protocol):
    """Takes sampled texts apart."""

    @property
    def marks(self) -> Marks | None:
        """Marks of reasoning; `None` if they are unknown, and nothing can be told before the end of an answer."""

    def parse(self, sampled: str, tools: Sequence[Json], *, reasons: bool = True) -> Parts:
        """Return the parts of a text; tool calls only if there are tools. Never raises for what a model wrote.

        A text that was held to a structure has no reasoning, which `reasons` says.
        """
        ...

    def settled(self, rest: str, tools: Sequence[Json], *, begins: bool, is_held: bool = False) -> Settled:
        """Return what is settled of a text that is being sampled, which may have calls and has no reasoning.

        Later `rest` begins where the used characters end, and no longer `begins` the text. With `is_held` it is held to a structure.
        """
        ...

    def structure(self, schema: Json | None, tools: Sequence[Json]) -> Structure | None:
        """Form of the texts that are JSON of the schema, if there is one, or one call of one of the tools; `None` if that is unknown."""
        ...


class JsonAnswerParser:
    """Parser of formats that need no other: reasoning up to ``</think>``, calls as JSON in tags or bare, and turns in channels."""

    marks = Marks()

    def parse(self, sampled: str, tools: Sequence[Json], *, reasons: bool = True) -> Parts:
        """As `AnswerParser.parse`; calls count up to the first malformed one, and a text that begins with such a call is text."""
        if not reasons and tools and (call := _held_call(sampled)) is not None:
            return Parts(text="", calls=(call,))
        reasoning, text = split_thought(sampled) if reasons else ("", sampled)
        channels = split_channels(sampled) if reasons else None
        if channels is not None:
            reasoning, text = channels.reasoning, channels.text
        if not tools:
            return Parts(text=text, reasoning=reasoning)
        before, parsed = split_calls(text) if channels is None else split_tool_calls(sampled)
        calls = _good(parsed, tools)
        return Parts(text=before.rstrip(), reasoning=reasoning, calls=calls) if calls else Parts(text=text, reasoning=reasoning)

    def settled(self, rest: str, tools: Sequence[Json], *, begins: bool, is_held: bool = False) -> Settled:
        """As `AnswerParser.settled`: calls in tags are settled at their end, those held to a form from their arguments on."""
        if is_held and (found := _HELD.match(rest)):
            # The end of what is there so far may be that of the call, which is no part of the arguments.
            arguments = rest[found.end() :]
            return Settled(begun=(json.loads(found[1]), arguments[: len(arguments) - held_length(arguments, (_HELD_END,))]))
        tag = rest.find(TAG)
        text = rest[: may_be_calls_from(rest, begins=begins) if tag < 0 else tag].rstrip()
        if tag < 0 or is_held:
            return Settled(text=text, used=len(text))
        parsed, end = tagged_calls(rest, ended_only=True)
        return Settled(text=text, calls=_good(parsed, tools), used=end or len(text))

    def structure(self, schema: Json | None, tools: Sequence[Json]) -> Structure | None:
        """As `AnswerParser.structure`, with calls in tags."""
        return one_of(schema, [_call_format(tool["function"]) for tool in tools])


def split_thought(sampled: str) -> tuple[str, str]:
    """Return the reasoning and the text behind it; the reasoning is "" if there is none.

    A text that begins with ``<think>`` is reasoning up to the first ``</think>``, or up to its end. Another one is reasoning up to the last
    ``</think>``, if it has one: some templates open the reasoning in the prompt.
    """
    lead = sampled.lstrip()
    if lead.startswith(THINK):
        reasoning, _, text = lead.removeprefix(THINK).partition(THOUGHT)
        return reasoning.strip().removeprefix(THINK).strip(), text.lstrip("\n")
    reasoning, found, text = sampled.rpartition(THOUGHT)
    return (reasoning.strip().removeprefix(THINK).strip(), text.lstrip("\n")) if found else ("", sampled)


def one_of(schema: Json | None, calls: Sequence[Json]) -> Structure:
    """The structure of texts that are JSON of a schema or have one of the formats of calls, which are those of structural tags."""
    if schema is not None and not calls:
        return Structure(json_schema=json.dumps(schema))
    formats = [*([] if schema is None else [{"type": "json_schema", "json_schema": schema}]), *calls]
    whole = formats[0] if len(formats) == 1 else {"type": "or", "elements": formats}
    return Structure(structural_tag=json.dumps({"type": "structural_tag", "format": whole}))


def _call_format(function: Json) -> Json:
    begin = f'<tool_call>\n{{"name": {json.dumps(function["name"])}, "arguments": '
    content = {"type": "json_schema", "json_schema": function.get("parameters") or {"type": "object"}}
    return {"type": "tag", "begin": begin, "content": content, "end": "}\n</tool_call>"}


def _held_call(sampled: str) -> tuple[str, str] | None:
    """The call that a text held to its form is, with the arguments as they were sampled; `None` if it is none, or is cut."""
    found = _HELD.match(sampled)
    if found is None or not sampled.endswith(_HELD_END):
        return None
    arguments = sampled[found.end() :].removesuffix(_HELD_END)
    try:
        return (json.loads(found[1]), arguments) if isinstance(json.loads(arguments), dict) else None
    except (ValueError, RecursionError):
        return None


def _good(parsed: Iterable[Parsed], tools: Sequence[Json]) -> tuple[tuple[str, str], ...]:
    """The calls before the first malformed one."""
    good = takewhile(lambda call: not isinstance(call, BadCall), parsed)
    return tuple((call.name, _arguments(call, tools)) for call in good if isinstance(call, ToolCall))


def _arguments(call: ToolCall, tools: Sequence[Json]) -> str:
    """Arguments as the JSON text of an object; those given in order get the names in the tool's schema."""
    if isinstance(call.arguments, Mapping):
        return json.dumps(call.arguments)
    names = next((_parameters(tool) for tool in tools if tool["function"]["name"] == call.name), [])
    names += [f"argument_{index}" for index in range(len(names), len(call.arguments))]
    return json.dumps(dict(zip(names, call.arguments, strict=False)))


def _parameters(tool: Json) -> list[Any]:
    properties = (tool["function"].get("parameters") or {}).get("properties")
    return list(properties) if isinstance(properties, Mapping) else []

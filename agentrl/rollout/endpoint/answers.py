"""From sampled text to an answer: reasoning, text and tool calls apart."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from agentrl.config.schema import EndpointConfig
from agentrl.core.protocols import Structure
from agentrl.env.tools.calls import BadCall, ToolCall, split_tool_calls
from agentrl.env.tools.channels import split_channels
from agentrl.rollout.endpoint.neutral import Json

AUTO_PARSER, JSON_PARSER = "auto", "json"
"""Names of the parser that reads what the chat template writes, and of the one that needs no vLLM."""
THINK, THOUGHT = "<think>", "</think>"


def names_own_form(config: EndpointConfig) -> bool:
    """Return True if the user names the form in which the model writes tool calls, which its chat template then asks for."""
    return config.tool_parser not in (AUTO_PARSER, JSON_PARSER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Parts of a sampled text."""

    text: str
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()  # name and arguments, which are the JSON text of an object


class AnswerParser(Protocol):
    """Takes sampled texts apart."""

    def parse(self, sampled: str, tools: Sequence[Json], *, reasons: bool = True) -> Parts:
        """Return the parts of a text; tool calls only if there are tools. Never raises for what a model wrote.

        A text that was held to a structure has no reasoning, which `reasons` says.
        """
        ...

    def structure(self, schema: Json | None, tools: Sequence[Json]) -> Structure | None:
        """Form of the texts that are JSON of the schema, if there is one, or one call of one of the tools; `None` if that is unknown."""
        ...


class JsonAnswerParser:
    """Parser of formats that need no other: reasoning up to ``</think>``, calls as JSON in tags or bare, and turns in channels."""

    def parse(self, sampled: str, tools: Sequence[Json], *, reasons: bool = True) -> Parts:
        """As `AnswerParser.parse`; a text with a malformed call is text as a whole."""
        reasoning, text = split_thought(sampled) if reasons else ("", sampled)
        channels = split_channels(sampled) if reasons else None
        if channels is not None:
            reasoning, text = channels.reasoning, channels.text
        if not tools:
            return Parts(text=text, reasoning=reasoning)
        before, parsed = split_tool_calls(text if channels is None else sampled)
        if not parsed or any(isinstance(call, BadCall) for call in parsed):
            return Parts(text=text, reasoning=reasoning)
        calls = tuple((call.name, _arguments(call, tools)) for call in parsed if isinstance(call, ToolCall))
        return Parts(text=before.rstrip(), reasoning=reasoning, calls=calls)

    def structure(self, schema: Json | None, tools: Sequence[Json]) -> Structure | None:
        """As `AnswerParser.structure`, with calls in tags."""
        return one_of(schema, [_call_format(tool["function"]) for tool in tools])


def split_thought(sampled: str) -> tuple[str, str]:
    """Return the reasoning up to ``</think>``, "" if there is none, and the text behind it."""
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

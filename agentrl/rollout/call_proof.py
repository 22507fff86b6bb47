"""Proof that a parser reads the tool calls that a chat template writes: made-up calls are rendered and parsed back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, TypeAlias

from agentrl.core.types import Message
from agentrl.rollout.chat import ChatCodec
from agentrl.rollout.endpoint.answers import AnswerParser, Parts
from agentrl.rollout.forms import call_id, lost

Called: TypeAlias = list[tuple[str, Any]]

# The values hold what a form of calls may lose: quotes, line breaks, numbers, lists and objects within objects.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "write_note": {"count": 7, "text": 'She said "no",\nand then she left.'},
    "find_place": {"name": "Old Town Hall", "place": {"city": "Bonn", "at": [50, 7], "near": {"river": "Rhine"}}},
}
"""Made-up tools with the arguments of a call."""
KINDS = {int: "integer", str: "string", list: "array", dict: "object"}
ANSWER = "There are seven notes, and none of them is about Bonn."


def _schema(value: Any) -> dict[str, Any]:
    """Return the JSON schema of a value."""
    schema: dict[str, Any] = {"type": KINDS[type(value)], "description": "Any."}
    if isinstance(value, dict):
        return schema | {"properties": {key: _schema(part) for key, part in value.items()}, "required": list(value)}
    return schema | {"items": _schema(value[0])} if isinstance(value, list) else schema


TOOLS = [
    {"type": "function", "function": {"name": name, "description": "Made up.", "parameters": _schema(arguments)}}
    for name, arguments in ARGUMENTS.items()
]
"""Schemas of the tools."""


def written_calls(codec: ChatCodec) -> list[tuple[str, Called]]:
    """Return turns with calls of the tools as the template writes them, both in one or one in each; nothing if it loses a part."""
    calls = list(ARGUMENTS.items())
    for together in ([calls], [[call] for call in calls]):
        turns = [(_written(codec, called), called) for called in together]
        if all(text for text, _ in turns):
            return turns
    return []


def _written(codec: ChatCodec, called: Called) -> str:
    calls = [
        {"type": "function", "id": call_id(place), "function": {"name": name, "arguments": arguments}}
        for place, (name, arguments) in enumerate(called)
    ]
    text = codec.call_text(calls)
    return "" if lost(text, [Message(role="assistant", content="", tool_calls=calls)]) else text


def reads(parser: AnswerParser, turns: Sequence[tuple[str, Called]]) -> bool:
    """Return True if a parser finds exactly the calls of each turn, and none in an answer without one."""
    return all(_found(parser.parse(text, TOOLS)) == called for text, called in turns) and not parser.parse(ANSWER, TOOLS).calls


def _found(parts: Parts) -> Called:
    try:
        return [(name, json.loads(arguments)) for name, arguments in parts.calls]
    except ValueError:
        return []

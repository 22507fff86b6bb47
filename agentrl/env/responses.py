"""Conversion between chat messages and NeMo Gym's format, OpenAI's Responses API: data rows, items, responses."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agentrl.core.errors import ConfigError
from agentrl.core.types import Message, Task
from agentrl.env.tools.calls import BadCall, Parsed, ToolCall

PARAMS = "responses_create_params"
"""Key of the request in a row: an object with ``input``, and optionally ``instructions`` and ``tools``."""

_TEXT_PARTS = ("input_text", "output_text", "text")


def chat_of(params: Any) -> list[Message]:
    """Return a request's messages, calls in ``<tool_call>`` tags, reasoning left out; `ValueError` if chat messages cannot express it."""
    if not isinstance(params, Mapping):
        raise ValueError(f"{PARAMS} is no object")
    given = params.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list) or not all(isinstance(item, Mapping) for item in items):
        raise ValueError(f"{PARAMS}.input is neither text nor a list of items")
    instructions = params.get("instructions")
    system = [Message(role="system", content=instructions)] if isinstance(instructions, str) and instructions else []
    messages = [*system, *(message for item in items for message in _messages(item))]
    if len(messages) == len(system):
        raise ValueError(f"{PARAMS}.input holds no message")
    return messages


def params_of(task: Task) -> Mapping[str, Any]:
    """Return the request in the row of a task; `ConfigError` if there is none."""
    params = task.metadata.get(PARAMS)
    if not isinstance(params, Mapping):
        raise ConfigError("--prompts", task.id, f"the row has no {PARAMS}", "Give a JSONL file in NeMo Gym's form.")
    return params


def tools_of(params: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the functions of a request by name, in the form that chat templates take; other kinds of tools are left out."""
    found = {}
    for tool in params.get("tools") or ():
        if isinstance(tool, Mapping) and tool.get("type", "function") == "function" and isinstance(tool.get("name"), str):
            function = {key: tool[key] for key in ("name", "description", "parameters") if tool.get(key)}
            found[tool["name"]] = {"type": "function", "function": function}
    return found


class Transcript:
    """The turns, tool calls and tool outputs of one episode, as the output of one response."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []

    def add_turn(self, text: str, calls: Sequence[Parsed], *, is_complete: bool) -> list[str]:
        """Add the reasoning, the text and the tool calls of a turn; return one id for each well-formed call."""
        thought, closed, rest = text.rpartition("</think>")
        if closed:
            summary = [{"type": "summary_text", "text": thought.replace("<think>", "").strip()}]
            self.items.append({"id": self._id("rs"), "type": "reasoning", "summary": summary})
        words = rest if any(isinstance(call, BadCall) for call in calls) else _words(rest, calls)
        if words.strip() or not calls:
            content = [{"type": "output_text", "text": words, "annotations": []}]
            status = "completed" if is_complete else "incomplete"
            self.items.append({"id": self._id("msg"), "type": "message", "role": "assistant", "status": status, "content": content})
        return [self._add_call(call) for call in calls if isinstance(call, ToolCall)]

    def add_output(self, call_id: str, text: str) -> None:
        """Add the output of a tool call."""
        self.items.append({"type": "function_call_output", "call_id": call_id, "output": text})

    def response(self, params: Mapping[str, Any], name: str, *, is_complete: bool) -> dict[str, Any]:
        """Return the transcript as the response to a request; incomplete if a token or turn budget ended the episode."""
        return {
            "id": f"resp_{name}",
            "object": "response",
            "created_at": int(time.time()),
            "model": params.get("model") or "policy",
            "status": "completed" if is_complete else "incomplete",
            "incomplete_details": None if is_complete else {"reason": "max_output_tokens"},
            "output": self.items,
            "parallel_tool_calls": params.get("parallel_tool_calls", True),
            "tool_choice": params.get("tool_choice") or "auto",
            "tools": params.get("tools") or [],
        }

    def _add_call(self, call: ToolCall) -> str:
        call_id = self._id("call")
        arguments = json.dumps(call.arguments if isinstance(call.arguments, Mapping) else list(call.arguments))
        self.items.append({"type": "function_call", "call_id": call_id, "name": call.name, "arguments": arguments, "status": "completed"})
        return call_id

    def _id(self, kind: str) -> str:
        return f"{kind}_{len(self.items)}"


def _messages(item: Mapping[str, Any]) -> Iterator[Message]:
    kind = item.get("type", "message")
    if kind == "message":
        role = str(item.get("role"))
        yield Message(role="system" if role == "developer" else role, content=_text(item.get("content")))
    elif kind == "function_call":
        try:
            call = {"name": item["name"], "arguments": json.loads(item["arguments"])}
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{PARAMS}.input holds a function_call that cannot be read: {error}") from error
        yield Message(role="assistant", content=f"<tool_call>{json.dumps(call)}</tool_call>")
    elif kind == "function_call_output":
        yield Message(role="tool", content=_text(item.get("output")))
    elif kind != "reasoning":
        raise ValueError(f"{PARAMS}.input holds an item of the type {kind!r}, which has no place in a chat")


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, Mapping) and part.get("type") in _TEXT_PARTS for part in content):
        return "".join(str(part.get("text", "")) for part in content)
    raise ValueError(f"{PARAMS}.input holds content that is not text: {str(content)[:80]!r}")


def _words(text: str, calls: Sequence[Parsed]) -> str:
    """Return the text before the first tool call."""
    if not calls:
        return text
    starts = [text.find(mark) for mark in (["<tool_call>"] if "<tool_call>" in text else ["```", "{", "["]) if mark in text]
    return text[: min(starts, default=0)].strip()

"""Anthropic's Messages: requests into the neutral form, answers and errors back into the service's own."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from agentrl.core.serving import ApiError
from agentrl.rollout.endpoint.fields import Fields, constraint_of, described
from agentrl.rollout.endpoint.neutral import (
    Answer,
    ChatRequest,
    Delta,
    EchoedMessage,
    Json,
    call_id,
    error_kind,
    parsed_arguments,
    tool_call,
)

PREFIX = "msg_"
READ = (
    *("messages", "model", "system", "tools", "tool_choice", "stream", "max_tokens", "temperature", "top_p", "stop_sequences"),
    *("thread", "output_config", "context_management"),
)
IGNORED = ("metadata", "service_tier", "thinking", "cache_control", "inference_geo", "speed", "diagnostics", "betas")
OFF: dict[str, tuple[Any, ...]] = {"container": (), "mcp_servers": ([],), "fallbacks": ([],), "compaction": (), "output_format": ()}
STREAM_END = ""


def parse(body: Json) -> ChatRequest:
    """Return the request of a body; `ApiError` names the field that cannot be taken."""
    request = parse_prompt(body)
    if request.messages and request.messages[-1]["role"] == "assistant":
        raise ApiError(400, "messages: the last message is the assistant's; to begin the answer for the model is not supported", "messages")
    if request.max_tokens is None:
        raise ApiError(400, "max_tokens: Field required", "max_tokens")
    return request


def parse_prompt(body: Json) -> ChatRequest:
    """The same for a request that only counts tokens."""
    fields = Fields(body)
    ignored = fields.check((*READ, *IGNORED), OFF)
    for edit in fields.inner("context_management").items("edits", optional=True):
        if not str(edit.get("type")).startswith("clear_thinking"):  # thinking is put back as it was sampled
            raise edit.refused("type", "the endpoint does not edit the context; leave it out")
    choice, form = fields.inner("tool_choice"), fields.inner("output_config").get("format")
    kind, named = choice.get("type"), choice.get("name", "") if choice.get("type") == "tool" else None
    thread = body.get("thread")
    follows = isinstance(thread, Mapping) and thread.get("type") != "create"
    return ChatRequest(
        messages=[message for item in fields.items("messages") for message in _messages(item)],
        system=fields.text_of("system"),
        **fields.common("max_tokens"),
        tools=[_tool(tool) for tool in fields.items("tools", optional=True)],
        calls_tools=kind != "none",
        constraint=constraint_of(kind, "tool_choice.type", named, form, "output_config.format"),
        one_call=bool(choice.get("disable_parallel_tool_use")),
        stop=fields.strings("stop_sequences"),
        previous=fields.inner("thread").text("previous_message_id") if follows else "",
        inherits=True,
        ignored=ignored,
        images=tuple(fields.images),
    )


def render(answer: Answer, request: ChatRequest) -> dict[str, Any]:
    """The answer as a whole."""
    return {**_head(answer, request), "content": list(_blocks(answer)), **_end(answer), "usage": _usage(answer)}


class Events:
    """The answer as the data of events, while it is sampled; `head` is the answer before its first token."""

    def __init__(self, head: Answer, request: ChatRequest) -> None:
        self._head, self._request = head, request
        self._open, self._index, self._calls = "", -1, 0  # kind of the block that is open

    def begin(self) -> list[Json]:
        """The events before the first piece."""
        begun: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": _usage(self._head)}
        return [{"type": "message_start", "message": {**_head(self._head, self._request), **begun}}]

    def add(self, delta: Delta) -> list[Json]:
        """The events of one more piece."""
        if delta.kind == "arguments":
            return [self._delta("input_json", delta.text, "partial_json")]
        if delta.kind == "call":
            own = {"id": call_id(self._head.number, self._calls), "name": delta.text, "input": {}}
            self._calls += 1
            begun = self._begin_block("tool_use", own)
            if delta.arguments is None:
                return begun
            return [*begun, self._delta("input_json", json.dumps(_input(delta.arguments)), "partial_json")]
        kind = "text" if delta.kind == "text" else "thinking"
        own = {"text": ""} if kind == "text" else {"thinking": "", "signature": ""}
        return [*([] if self._open == kind else self._begin_block(kind, own)), self._delta(kind, delta.text)]

    def end(self, answer: Answer) -> list[Json]:
        """The events behind the last piece."""
        # An answer with nothing in it has a block with an empty text, as it has when it is not streamed.
        is_empty = self._index < 0
        events = [*(self._begin_block("text", {"text": ""}) if is_empty else []), *self._end_block()]
        return [*events, {"type": "message_delta", "delta": _end(answer), "usage": _usage(answer)}, {"type": "message_stop"}]

    def error(self, problem: ApiError) -> Json:
        """The event of an error in the place of the rest."""
        return error(problem)

    def _begin_block(self, kind: str, own: Json) -> list[Json]:
        events = self._end_block()
        self._open = kind
        self._index += 1
        return [*events, {"type": "content_block_start", "index": self._index, "content_block": {"type": kind, **own}}]

    def _end_block(self) -> list[Json]:
        """End the block that is open, if one is."""
        signed = [self._delta("signature", self._head.id)] if self._open == "thinking" else []
        return [*signed, {"type": "content_block_stop", "index": self._index}] if self._open else []

    def _delta(self, kind: str, text: str, name: str = "") -> Json:
        return {"type": "content_block_delta", "index": self._index, "delta": {"type": f"{kind}_delta", name or kind: text}}


def error(problem: ApiError) -> dict[str, Any]:
    """The error in the form of the service."""
    message = problem.message
    if problem.limits:
        # In the words of the service, by which agents know that they have to compact.
        message = f"prompt is too long: {problem.limits[0]} tokens > {problem.limits[1]} maximum"
    kind = "request_too_large" if problem.status == 413 else error_kind(problem.status, "api_error")
    details = {"details": {"error_code": problem.code}} if problem.code.startswith("thread") else {}
    return {"type": "error", "error": {"type": kind, "message": message, **details}}


def _messages(message: Fields) -> list[EchoedMessage]:
    role = message.one_of("role", ("user", "assistant", "system"), "must be user, assistant or system")
    if not isinstance(message.get("content"), list):
        return [EchoedMessage(role=role, content=message.text("content"))]
    blocks = message.items("content", optional=True)
    return [_assistant(blocks)] if role == "assistant" else _user(blocks, role)


def _user(blocks: list[Fields], role: str) -> list[EchoedMessage]:
    """Results of tools are messages of their own; the texts between them are one message."""
    messages: list[EchoedMessage] = []
    for block in blocks:
        is_image = block.is_image()
        if not is_image and block.one_of("type", ("text", "tool_result"), "only text, image and tool_result are taken") == "tool_result":
            messages.append(EchoedMessage(role="tool", content=block.text_of("content"), tool_call_id=block.text("tool_use_id")))
            continue
        text = block.mark() if is_image else block.text("text")
        if messages and messages[-1]["role"] == role:
            messages[-1]["content"] += f"\n{text}"
        else:
            messages.append(EchoedMessage(role=role, content=text))
    return messages or [EchoedMessage(role=role, content="")]


def _assistant(blocks: list[Fields]) -> EchoedMessage:
    own = ""
    parts: dict[str, list[Any]] = {"text": [], "tool_use": [], "thinking": [], "redacted_thinking": []}
    for block in blocks:
        kind = block.one_of("type", tuple(parts), "only text, tool_use and thinking are taken")
        if kind == "text":
            parts[kind].append(block.text("text"))
        elif kind == "tool_use":
            parts[kind].append(tool_call(str(block.get("id", "")), block.text("name"), block.get("input") or {}))
        else:
            parts[kind].append(str(block.get("thinking", "")))
            own = str(block.get("signature") or own)
    message = EchoedMessage(role="assistant", content="\n".join(parts["text"]))
    if own:
        message["id"] = own
    if parts["tool_use"]:
        message["tool_calls"] = parts["tool_use"]
    if parts["thinking"]:
        message["reasoning_content"] = "\n".join(parts["thinking"])
    return message


def _tool(tool: Fields) -> dict[str, Any]:
    tool.one_of("type", (None, "custom"), "only tools that the client runs are taken")
    return described(tool, "input_schema")


def _blocks(answer: Answer) -> Iterator[Json]:
    if answer.reasoning:
        # Clients send the signature back with the thinking, so it says which answer a message is.
        yield {"type": "thinking", "thinking": answer.reasoning, "signature": answer.id}
    if answer.has_text:
        yield {"type": "text", "text": answer.text}
    for call in answer.calls:
        yield {"type": "tool_use", "id": call.id, "name": call.name, "input": _input(call.arguments)}


def _input(arguments: str) -> dict[str, Any]:
    """Arguments as an object."""
    parsed = parsed_arguments(arguments)
    return parsed if isinstance(parsed, dict) else {"arguments": parsed}


def _head(answer: Answer, request: ChatRequest) -> dict[str, Any]:
    return {"id": PREFIX + answer.id, "type": "message", "role": "assistant", "model": request.model}


def _end(answer: Answer) -> dict[str, Any]:
    reason = "max_tokens" if answer.cut else "tool_use" if answer.calls else "stop_sequence" if answer.stopped_by else "end_turn"
    return {"stop_reason": reason, "stop_sequence": answer.stopped_by or None}


def _usage(answer: Answer) -> dict[str, int]:
    return {
        # Unlike in the other service's count, tokens of the cache are not among these.
        "input_tokens": answer.prompt_tokens - answer.cached_tokens,
        "cache_read_input_tokens": answer.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": answer.completion_tokens,
    }

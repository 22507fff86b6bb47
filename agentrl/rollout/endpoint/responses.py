"""OpenAI's Responses: requests into the neutral form, answers and errors back into the service's own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from agentrl.core.serving import ApiError
from agentrl.rollout.endpoint import chat_completions
from agentrl.rollout.endpoint.fields import Fields, constraint_of, described
from agentrl.rollout.endpoint.neutral import Answer, Call, ChatRequest, EchoedMessage, Json, emptied, parsed_arguments, pieces, tool_call

PREFIX = "resp_"
READ = (
    *("input", "instructions", "model", "tools", "tool_choice", "parallel_tool_calls", "stream", "max_output_tokens"),
    *("temperature", "top_p", "previous_response_id", "text"),
)
IGNORED = (
    *("store", "include", "reasoning", "metadata", "user", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
    *("service_tier", "safety_identifier", "stream_options", "truncation", "max_tool_calls"),
)
OFF: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "conversation": (),
    "prompt": (),
    "top_logprobs": (0,),
    "context_management": ([],),
    "moderation": (),
    "image": (),
    "access_programs": (),
}
TEXTS = ("input_text", "output_text", "text", "refusal")
CALLS = {"function_call": "function_call_output", "custom_tool_call": "custom_tool_call_output"}
"""Items that are calls, with those that are their outputs."""
HOSTED = ("web_search", "web_search_preview")
"""Tools of the service that the policy is not told of; it may leave them alone as it may any tool."""
CUSTOM = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
STREAM_END = ""

error = chat_completions.error


def parse(body: Json) -> ChatRequest:
    """Return the request of a body; `ApiError` names the field that cannot be taken."""
    fields = Fields(body)
    ignored = fields.check((*READ, *IGNORED), OFF)
    choice, form = body.get("tool_choice"), fields.inner("text").get("format")
    named = choice.get("name", "") if isinstance(choice, Mapping) and choice.get("type") in ("function", "custom") else None
    kinds: dict[str, tuple[str, str, str]] = {}
    return ChatRequest(
        **fields.common("max_output_tokens"),
        messages=_input(fields),
        system=fields.text("instructions") if body.get("instructions") else "",
        tools=list(_tools(fields.items("tools", optional=True), kinds)),
        calls_tools=choice != "none",
        constraint=constraint_of(choice, "tool_choice", named, form, "text.format"),
        one_call=body.get("parallel_tool_calls") is False,
        previous=fields.text("previous_response_id") if body.get("previous_response_id") else "",
        ignored=ignored,
        images=tuple(fields.images),
        options={"body": {name: value for name, value in body.items() if name != "input"}, "kinds": kinds},
    )


def render(answer: Answer, request: ChatRequest) -> dict[str, Any]:
    """The answer as a whole."""
    return _response(answer, request, [item for item, _ in _items(answer, request)])


def stream(answer: Answer, request: ChatRequest) -> Iterator[dict[str, Any]]:
    """The answer as the data of events."""
    begun = {**_response(answer, request, []), "status": "in_progress", "usage": None, "incomplete_details": None}
    events: list[dict[str, Any]] = [{"type": "response.created", "response": begun}, {"type": "response.in_progress", "response": begun}]
    for index, (item, parts) in enumerate(_items(answer, request)):
        empty = {**emptied(item), "status": "in_progress"}
        events.append({"type": "response.output_item.added", "output_index": index, "item": empty})
        events += [{**part, "item_id": item["id"], "output_index": index} for part in parts]
        events.append({"type": "response.output_item.done", "output_index": index, "item": item})
    events.append({"type": "response.incomplete" if answer.cut else "response.completed", "response": render(answer, request)})
    return ({**event, "sequence_number": number} for number, event in enumerate(events))


def stream_error(problem: ApiError) -> dict[str, Any]:
    """The error as the data of an event."""
    told = error(problem)["error"]
    return {"type": "error", "code": told["code"], "message": told["message"], "param": told["param"], "sequence_number": 0}


def _input(fields: Fields) -> list[EchoedMessage]:
    if isinstance(fields.get("input"), str):
        return [EchoedMessage(role="user", content=fields.text("input"))]
    messages: list[EchoedMessage] = []
    for item in fields.items("input"):
        _add(messages, item)
    return messages


def _add(messages: list[EchoedMessage], item: Fields) -> None:
    """Add an item to the messages; what one answer consists of is one message of the assistant."""
    kind, call_id = item.get("type", "message"), str(item.get("call_id", ""))
    if kind == "message":
        _add_message(messages, item)
    elif kind in CALLS:
        name = f"{item.get('namespace')}.{item.text('name')}" if item.get("namespace") else item.text("name")
        arguments = {"input": item.get("input", "")} if kind == "custom_tool_call" else item.get("arguments", "{}")
        calls: list[dict[str, Any]] = _answer_of(messages, call_id).setdefault("tool_calls", [])
        calls.append(tool_call(call_id, name, arguments))
    elif kind in CALLS.values():
        messages.append(EchoedMessage(role="tool", content=item.text_of("output", TEXTS), tool_call_id=call_id))
    elif kind == "reasoning":
        parts = [*(item.get("content") or ()), *(item.get("summary") or ())]
        thought = "\n".join(str(part.get("text", "")) for part in parts)
        messages.append(EchoedMessage(role="assistant", content="", reasoning_content=thought))
    else:
        raise item.refused("type", "only messages, calls of functions and custom tools, their outputs and reasoning are taken")


def _add_message(messages: list[EchoedMessage], item: Fields) -> None:
    role = item.one_of("role", ("user", "assistant", "system", "developer"), "must be user, assistant, system or developer")
    content, own = item.text_of("content", TEXTS), str(item.get("id"))
    last = messages[-1] if messages else None
    if role == "assistant" and last is not None and last["role"] == "assistant" and not last["content"] and "tool_calls" not in last:
        last["content"], last["id"] = content, own  # behind the reasoning of the same answer
    else:
        messages.append(EchoedMessage(role="system" if role == "developer" else role, content=content, id=own))


def _answer_of(messages: list[EchoedMessage], call_id: str) -> EchoedMessage:
    """The message that a call belongs to: the last; if a client puts outputs between calls, the one with calls of the same answer."""
    answers = [message for message in messages if message["role"] != "tool"]
    latest = answers[-1] if answers and answers[-1]["role"] == "assistant" else None
    if latest is not None:
        known = [str(call["id"]) for call in latest.get("tool_calls") or ()]
        if latest is messages[-1] or any(_same_answer(call_id, other) for other in known):
            return latest
    messages.append(EchoedMessage(role="assistant", content=""))
    return messages[-1]


def _same_answer(call_id: str, other: str) -> bool:
    """Return True if both are ids that `session.call_id` gave to calls of one answer."""
    return len(call_id) == len(other) == 9 and call_id[:6] == other[:6] and call_id[0] == "c"


def _tools(tools: Iterable[Fields], kinds: dict[str, tuple[str, str, str]], namespace: str = "") -> Iterator[dict[str, Any]]:
    """Tools as functions; `kinds` gets by name what each is: its type, its namespace, and its name there."""
    for tool in tools:
        if tool.get("type") in HOSTED:
            continue
        kind, own = tool.one_of("type", ("function", "custom", "namespace"), "only tools that the client runs are taken"), tool.text("name")
        if kind == "namespace":
            yield from _tools(tool.items("tools"), kinds, own)
            continue
        name = f"{namespace}.{own}" if namespace else own
        kinds[name] = kind, namespace, own
        yield described(Fields({**tool.value, "name": name, **({"parameters": CUSTOM} if kind == "custom" else {})}))


def _items(answer: Answer, request: ChatRequest) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """The output items of an answer, each with the events that a stream sends between its beginning and its end."""
    status = "incomplete" if answer.cut else "completed"
    if answer.reasoning:
        summary = {"type": "summary_text", "text": answer.reasoning}
        prefix = "response.reasoning_summary"
        events = _text_events(f"{prefix}_part", f"{prefix}_text", summary, {"summary_index": 0})
        yield {"type": "reasoning", "id": f"rs_{answer.id}", "summary": [summary], "status": status}, events
    if answer.has_text:
        part = {"type": "output_text", "text": answer.text, "annotations": [], "logprobs": []}
        events = _text_events("response.content_part", "response.output_text", part, {"content_index": 0}, logprobs=[])
        yield {"type": "message", "id": f"msg_{answer.id}", "role": "assistant", "content": [part], "status": status}, events
    for call in answer.calls:
        kind, namespace, name = request.options["kinds"].get(call.name, ("function", "", call.name))
        yield _call_item(call, kind, namespace, name, status)


def _text_events(part: str, name: str, end: Json, fixed: Json, **more: Any) -> list[dict[str, Any]]:
    return [
        {"type": f"{part}.added", **fixed, "part": {**end, "text": ""}},
        *({"type": f"{name}.delta", **fixed, "delta": piece, **more} for piece in pieces(end["text"])),
        {"type": f"{name}.done", **fixed, "text": end["text"], **more},
        {"type": f"{part}.done", **fixed, "part": end},
    ]


def _call_item(call: Call, kind: str, namespace: str, name: str, status: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    if kind == "custom":
        parsed = parsed_arguments(call.arguments)
        text = str(parsed.get("input", call.arguments)) if isinstance(parsed, Mapping) else call.arguments
        own, field, stream_of = {"type": "custom_tool_call", "id": f"ctc_{call.id}"}, "input", "response.custom_tool_call_input"
    else:
        text = call.arguments
        own, field, stream_of = {"type": "function_call", "id": f"fc_{call.id}"}, "arguments", "response.function_call_arguments"
    place = {"namespace": namespace} if namespace else {}
    item = {"call_id": call.id, "name": name, "status": status, **place, **own, field: text}
    deltas = [{"type": f"{stream_of}.delta", "delta": piece} for piece in pieces(text)]
    return item, [*deltas, {"type": f"{stream_of}.done", field: text, "name": name}]


def _response(answer: Answer, request: ChatRequest, output: list[dict[str, Any]]) -> dict[str, Any]:
    body = request.options["body"]
    usage = {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {"cached_tokens": answer.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": answer.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }
    return {
        "id": PREFIX + answer.id,
        "object": "response",
        "created_at": answer.created,
        "status": "incomplete" if answer.cut else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if answer.cut else None,
        "instructions": body.get("instructions"),
        "metadata": body.get("metadata") or {},
        "model": request.model,
        "output": output,
        "parallel_tool_calls": not request.one_call,
        "previous_response_id": body.get("previous_response_id"),
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "temperature": request.temperature,
        "top_p": request.top_p,
        "text": body.get("text") or {"format": {"type": "text"}},
        "truncation": body.get("truncation") or "disabled",
        "usage": usage,
    }

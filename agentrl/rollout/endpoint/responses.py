"""OpenAI's Responses: requests into the neutral form, answers and errors back into the service's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from agentrl.core.serving import ApiError
from agentrl.rollout.endpoint import chat_completions
from agentrl.rollout.endpoint.fields import Fields, constraint_of, described
from agentrl.rollout.endpoint.neutral import Answer, Call, ChatRequest, Delta, EchoedMessage, Json, call_id, parsed_arguments, tool_call

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
    status = "incomplete" if answer.cut else "completed"
    items = [_thought(answer, answer.reasoning, status)] if answer.reasoning else []
    items += [_said(answer, answer.text, status)] if answer.has_text else []
    return _response(answer, request, [*items, *(_called(call, request, status) for call in answer.calls)])


class Events:
    """The answer as the data of events, while it is sampled; `head` is the answer before its first token."""

    def __init__(self, head: Answer, request: ChatRequest) -> None:
        self._head, self._request = head, request
        self._number, self._index, self._calls = 0, -1, 0  # of the next event, the latest item, the next call
        self._open, self._id, self._is_custom, self._written = "", "", False, ""  # kind of the item that is open, and its text so far
        self._item: Callable[[str, str], dict[str, Any]]  # the open item, by its text and its status

    def begin(self) -> list[Json]:
        """The events before the first piece."""
        begun = {**_response(self._head, self._request, []), "status": "in_progress", "usage": None}
        return self._numbered([{"type": "response.created", "response": begun}, {"type": "response.in_progress", "response": begun}])

    def add(self, delta: Delta) -> list[Json]:
        """The events of one more piece."""
        begun, text = list[Json](), delta.text
        if delta.kind == "call":
            begun, text = self._begin_item("call", self._call(delta.text)), delta.arguments or ""
        elif delta.kind in TEXT_ITEMS and delta.kind != self._open:
            begun = self._begin_item(delta.kind, partial(TEXT_ITEMS[delta.kind].item, self._head))
        self._written += text
        if not text or self._is_custom:  # its input is a field of the arguments
            return self._numbered(begun)
        form = TEXT_ITEMS.get(self._open, CALL_ITEM)
        return self._numbered([*begun, self._of_item(f"{form.name}.delta", delta=text, **form.place, **form.more)])

    def end(self, answer: Answer) -> list[Json]:
        """The events behind the last piece."""
        is_empty = self._index < 0
        events = [*(self._begin_item("text", partial(_said, self._head)) if is_empty else []), *self._end_item(answer.cut)]
        end = {"type": "response.incomplete" if answer.cut else "response.completed", "response": render(answer, self._request)}
        return self._numbered([*events, end])

    def error(self, problem: ApiError) -> Json:
        """The event of an error in the place of the rest."""
        told = error(problem)["error"]
        return self._numbered([{"type": "error", "code": told["code"], "message": told["message"], "param": told["param"]}])[0]

    def _call(self, name: str) -> Callable[[str, str], dict[str, Any]]:
        own = call_id(self._head.number, self._calls)
        self._calls += 1
        return lambda arguments, status: _called(Call(id=own, name=name, arguments=arguments), self._request, status)

    def _begin_item(self, kind: str, item: Callable[[str, str], dict[str, Any]]) -> list[Json]:
        """End the item that is open, and begin another."""
        events = self._end_item()
        self._open, self._item, self._written = kind, item, ""
        self._index += 1
        shown = item("", "in_progress")
        self._id, self._is_custom = shown["id"], "input" in shown
        if kind not in TEXT_ITEMS:
            return [*events, self._of_output("added", shown)]
        form = TEXT_ITEMS[kind]
        part = shown[form.parts][0]
        added = self._of_output("added", {**shown, form.parts: []})
        return [*events, added, self._of_item(f"{form.part}.added", part=part, **form.place)]

    def _end_item(self, is_cut: bool = False) -> list[Json]:
        """End the item that is open, if one is."""
        if not self._open:
            return []
        item = self._item(self._written, "incomplete" if is_cut else "completed")
        if self._open in TEXT_ITEMS:
            form = TEXT_ITEMS[self._open]
            done = self._of_item(f"{form.name}.done", text=self._written, **form.place, **form.more)
            return [done, self._of_item(f"{form.part}.done", part=item[form.parts][0], **form.place), self._of_output("done", item)]
        field, kind = ("input", CUSTOM_NAME) if self._is_custom else ("arguments", CALL_ITEM.name)
        whole = [self._of_item(f"{kind}.delta", delta=item[field])] if self._is_custom else []
        return [*whole, self._of_item(f"{kind}.done", name=item["name"], **{field: item[field]}), self._of_output("done", item)]

    def _of_item(self, kind: str, **more: Any) -> Json:
        return {"type": kind, "item_id": self._id, "output_index": self._index, **more}

    def _of_output(self, what: str, item: Json) -> Json:
        return {"type": f"response.output_item.{what}", "output_index": self._index, "item": item}

    def _numbered(self, events: list[Json]) -> list[Json]:
        first, self._number = self._number, self._number + len(events)
        return [{**event, "sequence_number": first + place} for place, event in enumerate(events)]


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
    """Return True if both are ids that `neutral.call_id` gave to calls of one answer."""
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


def _thought(answer: Answer, text: str, status: str) -> dict[str, Any]:
    return {"type": "reasoning", "id": f"rs_{answer.id}", "summary": [{"type": "summary_text", "text": text}], "status": status}


def _said(answer: Answer, text: str, status: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "message", "id": f"msg_{answer.id}", "role": "assistant", "content": [part], "status": status}


def _called(call: Call, request: ChatRequest, status: str) -> dict[str, Any]:
    kind, namespace, name = request.options["kinds"].get(call.name, ("function", "", call.name))
    if kind == "custom":
        parsed = parsed_arguments(call.arguments)
        text = str(parsed.get("input", call.arguments)) if isinstance(parsed, Mapping) else call.arguments
        own = {"type": "custom_tool_call", "id": f"ctc_{call.id}", "input": text}
    else:
        own = {"type": "function_call", "id": f"fc_{call.id}", "arguments": call.arguments}
    return {"call_id": call.id, "name": name, "status": status, **({"namespace": namespace} if namespace else {}), **own}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """Names of the events of an item, and fields that are the same in all of them."""

    name: str
    part: str = ""
    parts: str = ""  # field of the item with its only part
    place: Json = field(default_factory=dict)
    more: Json = field(default_factory=dict)
    item: Callable[[Answer, str, str], dict[str, Any]] = _said


_SUMMARY = "response.reasoning_summary"
TEXT_ITEMS = {
    "reasoning": _Form(name=f"{_SUMMARY}_text", part=f"{_SUMMARY}_part", parts="summary", place={"summary_index": 0}, item=_thought),
    "text": _Form(
        name="response.output_text", part="response.content_part", parts="content", place={"content_index": 0}, more={"logprobs": []}
    ),
}
"""Items that are a text, by the kind of their pieces."""
CALL_ITEM = _Form(name="response.function_call_arguments")
CUSTOM_NAME = "response.custom_tool_call_input"


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
        # Settings of the request are repeated below, as in answers of the service.
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

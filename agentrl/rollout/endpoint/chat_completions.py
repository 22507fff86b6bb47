"""OpenAI's Chat Completions: requests into the neutral form, answers and errors back into the service's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentrl.core.serving import ApiError
from agentrl.rollout.endpoint.fields import Fields, constraint_of, described
from agentrl.rollout.endpoint.neutral import Answer, Call, ChatRequest, Delta, EchoedMessage, Json, call_id, error_kind, tool_call

PREFIX = "chatcmpl-"
READ = (
    *("messages", "model", "tools", "tool_choice", "parallel_tool_calls", "stream", "stream_options"),
    *("max_tokens", "max_completion_tokens", "temperature", "top_p", "stop", "response_format"),
)
# A seed is among them: every request has one that follows from the run's, so that a run can be repeated.
IGNORED = (
    *("metadata", "user", "store", "prompt_cache_key", "prompt_cache_retention", "service_tier", "safety_identifier", "seed"),
    *("reasoning_effort", "verbosity"),
)
OFF: dict[str, tuple[Any, ...]] = {
    "logprobs": (False,),
    "top_logprobs": (0,),
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
}
ROLES = ("system", "developer", "user", "assistant", "tool")
STREAM_END = "data: [DONE]\n\n"


def parse(body: Json) -> ChatRequest:
    """Return the request of a body; `ApiError` names the field that cannot be taken."""
    fields = Fields(body)
    ignored = fields.check((*READ, *IGNORED), OFF)
    choice, form = body.get("tool_choice"), body.get("response_format")
    function = choice.get("function") if isinstance(choice, Mapping) else None
    named = function.get("name") if isinstance(function, Mapping) else None
    if isinstance(form, Mapping) and isinstance(form.get("json_schema"), Mapping):
        form = {"type": form.get("type"), "schema": form["json_schema"].get("schema")}
    return ChatRequest(
        **fields.common("max_completion_tokens", "max_tokens"),
        messages=[_message(message) for message in fields.items("messages")],
        tools=[_tool(tool) for tool in fields.items("tools", optional=True)],
        calls_tools=choice != "none",
        constraint=constraint_of(choice, "tool_choice", named, form, "response_format"),
        one_call=body.get("parallel_tool_calls") is False,
        stop=fields.strings("stop"),
        ignored=ignored,
        images=tuple(fields.images),
        options={"include_usage": bool(fields.inner("stream_options").get("include_usage"))},
    )


def render(answer: Answer, request: ChatRequest) -> dict[str, Any]:
    """The answer as a whole."""
    # As the service has it: no content beside calls, and an empty text only where there is nothing else.
    message: dict[str, Any] = {"role": "assistant", "content": answer.text or (None if answer.calls else ""), "refusal": None}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["tool_calls"] = [_shown(call) for call in answer.calls]
    choices = [_choice("message", message, _finish(answer))]
    return {**_head(answer, request, "chat.completion"), "choices": choices, "usage": _usage(answer)}


class Events:
    """The answer as the data of events, while it is sampled; `head` is the answer before its first token."""

    def __init__(self, head: Answer, request: ChatRequest) -> None:
        self._head, self._request, self._number = _head(head, request, "chat.completion.chunk"), request, head.number
        self._calls = 0

    def begin(self) -> list[Json]:
        """The events before the first piece."""
        return [self._chunk({"role": "assistant", "content": ""})]

    def add(self, delta: Delta) -> list[Json]:
        """The events of one more piece."""
        if delta.kind in ("reasoning", "text"):
            return [self._chunk({"content" if delta.kind == "text" else "reasoning_content": delta.text})]
        if delta.kind == "arguments":
            return [self._arguments(delta.text)]
        call = Call(id=call_id(self._number, self._calls), name=delta.text, arguments="")
        self._calls += 1
        begun = self._chunk({"tool_calls": [{**_shown(call), "index": self._calls - 1}]})
        return [begun, self._arguments(delta.arguments)] if delta.arguments else [begun]

    def end(self, answer: Answer) -> list[Json]:
        """The events behind the last piece."""
        usage = [{**self._head, "choices": [], "usage": _usage(answer)}] if self._request.options.get("include_usage") else []
        return [self._chunk({}, _finish(answer)), *usage]

    def error(self, problem: ApiError) -> Json:
        """The event of an error in the place of the rest."""
        return error(problem)

    def _arguments(self, text: str) -> Json:
        return self._chunk({"tool_calls": [{"index": self._calls - 1, "function": {"arguments": text}}]})

    def _chunk(self, delta: Json, finish: str | None = None) -> Json:
        return {**self._head, "choices": [_choice("delta", delta, finish)]}


def error(problem: ApiError) -> dict[str, Any]:
    """The error in the form of the service."""
    message = problem.message
    if problem.limits:
        tokens, limit = problem.limits
        # In the words of the service, by which agents know that they have to compact.
        message = f"This model's maximum context length is {limit} tokens. However, your messages resulted in {tokens} tokens. "
        message += "Please reduce the length of the messages."
    told = {"message": message, "type": error_kind(problem.status), "param": problem.field or None, "code": problem.code or None}
    return {"error": told}


def _message(message: Fields) -> EchoedMessage:
    role = message.one_of("role", ROLES, f"must be one of {', '.join(ROLES)}")
    content = message.text_of("content", ("text", "refusal") if role == "assistant" else ("text",))
    parsed = EchoedMessage(role="system" if role == "developer" else role, content=content)
    if isinstance(message.get("name"), str):
        parsed["name"] = message.get("name")
    if role == "tool":
        parsed["tool_call_id"] = message.text("tool_call_id", "")
    if message.get("tool_calls"):
        parsed["tool_calls"] = [_call(call) for call in message.items("tool_calls")]
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(reasoning, str) and reasoning:
        parsed["reasoning_content"] = reasoning
    return parsed


def _call(call: Fields) -> dict[str, Any]:
    if not isinstance(call.get("function"), Mapping):
        raise call.refused("type", "only calls of functions are taken")
    function = call.inner("function")
    return tool_call(str(call.get("id", "")), function.text("name"), function.get("arguments", "{}"))


def _tool(tool: Fields) -> dict[str, Any]:
    if tool.get("type") != "function" or not isinstance(tool.get("function"), Mapping):
        raise tool.refused("type", "only functions are taken")
    return described(tool.inner("function"))


def _shown(call: Call) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _choice(name: str, part: Json, finish: str | None = None) -> dict[str, Any]:
    return {"index": 0, name: part, "logprobs": None, "finish_reason": finish}


def _head(answer: Answer, request: ChatRequest, kind: str) -> dict[str, Any]:
    return {"id": PREFIX + answer.id, "object": kind, "created": answer.created, "model": request.model}


def _finish(answer: Answer) -> str:
    return "length" if answer.cut else "tool_calls" if answer.calls else "stop"


def _usage(answer: Answer) -> dict[str, Any]:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
    }

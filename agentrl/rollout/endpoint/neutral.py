"""The form between the dialects and the recorder: requests and answers that say the same in every API."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from agentrl.core.types import Message

Json: TypeAlias = Mapping[str, Any]

ERROR_KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class EchoedMessage(Message, total=False):
    """A message of a history, with what tells two equal answers apart."""

    id: str  # of the answer, in whatever form its dialect gave it
    reasoning_content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """Form that a request wants the answer to have."""

    field: str  # of the request that asks for it
    schema: Json | None = None  # the answer is a value of this JSON schema, or a tool call if there are tools
    must_call: bool = False  # the answer is a tool call
    tool: str = ""  # name of the tool that it must call; "" for any


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """One request for an answer."""

    messages: Sequence[EchoedMessage]  # in the form that chat templates take; arguments of tool calls are objects
    system: str = ""  # text before all messages, in an API that has it apart
    tools: Sequence[Json] = ()  # functions in the form of Chat Completions
    calls_tools: bool = True  # False: the answer is text, whatever it looks like
    one_call: bool = False  # only the first tool call of the answer is delivered
    constraint: Constraint | None = None  # form that the answer must have
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None  # number of candidates; 0 for all
    template_variables: Json | None = None  # variables of the chat template, beside those of the run
    stop: tuple[str, ...] = ()
    stream: bool = False
    model: str = ""
    previous: str = ""  # id of the answer that the messages follow, if the endpoint is to keep the conversation
    inherits: bool = False  # tools and the text before all messages are those of the previous answer's request, if none are given
    ignored: tuple[str, ...] = ()  # names of fields that the endpoint does not know, and that change nothing
    images: Sequence[tuple[str, str]] = ()  # the marks of images in the texts, and the images as paths or data URLs
    images_omitted: int = 0  # images that the model does not see
    options: Json = field(default_factory=dict)  # what only the dialect needs, to render the answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One tool call of an answer."""

    id: str
    name: str
    arguments: str  # JSON text of an object, or what the model wrote in its place


@dataclass(frozen=True, slots=True)
class Delta:
    """One more piece of an answer that is sampled."""

    kind: Literal["reasoning", "text", "call", "arguments"]
    text: str  # of a call its name
    arguments: str | None = None  # of a call that is whole; `None` if they follow


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Answer of the model, as the dialects show it."""

    number: int  # place among the answers of the episode, from 0
    id: str  # unique in the run, without the prefix of a dialect
    created: int  # seconds since 1970
    text: str
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    cut: bool = False  # a token budget ended it
    stopped_by: str = ""  # the stop string that ended it
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    @property
    def has_text(self) -> bool:
        """True if its text is shown, which an answer with nothing else has even when it is empty."""
        return bool(self.text or not (self.calls or self.reasoning))

    def message(self) -> EchoedMessage:
        """The answer as a message of a history."""
        message = EchoedMessage(role="assistant", content=self.text, id=self.id)
        if self.calls:
            message["tool_calls"] = [tool_call(call.id, call.name, call.arguments) for call in self.calls]
        return message


def tool_call(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    """A tool call in a message; arguments that are JSON text of an object become the object, which templates expect."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": parsed_arguments(arguments)}}


def parsed_arguments(arguments: Any) -> Any:
    """Arguments as an object if they are one or its JSON text, else as they are."""
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def texts_of(messages: Sequence[EchoedMessage]) -> Iterator[str]:
    """Every text of messages, those in the arguments of calls included; however deep they are."""
    for message in messages:
        yield message["content"]
        left: list[Any] = [call["function"]["arguments"] for call in message.get("tool_calls") or ()]
        while left:
            value = left.pop()
            if isinstance(value, str):
                yield value
            elif isinstance(value, Mapping):
                left += [*value, *value.values()]
            elif isinstance(value, list):
                left += value


def call_id(answer: int, place: int) -> str:
    """Id of a tool call of an answer: nine letters and digits, as some templates want."""
    return f"c{answer:05d}{place:03d}"


def error_kind(status: int, failed: str = "server_error") -> str:
    """Type that both services give to an error; `failed` is that of an error of their own."""
    return ERROR_KINDS.get(status, "invalid_request_error" if status < 500 else failed)

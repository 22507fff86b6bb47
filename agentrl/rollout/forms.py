"""Forms of chat messages: what a template takes is found by small probes, and nothing that a form loses is sent to a model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, groupby
from typing import Any, TypeAlias

from agentrl.core.errors import ChatTemplateError, EnvResultError
from agentrl.core.types import Message
from agentrl.rollout.template import ChatTemplate, plain_text

Messages: TypeAlias = Sequence[Message]

SYSTEM = ("system", "developer")
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Fields in which clients and templates have the reasoning of a message."""
PROBE = "some_probe"
QUESTION = Message(role="user", content="?")


def probe_call(name: str, value: Any = PROBE, place: int = 0) -> dict[str, Any]:
    """Return a tool call with an id that every template takes."""
    return {"type": "function", "id": call_id(place), "function": {"name": name, "arguments": {"number": value}}}


def call_id(place: int) -> str:
    """Return an id for the call in this place: nine letters and digits, as some templates want."""
    return f"c{place:08d}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """The form in which a template takes messages, as probes found it."""

    parts: bool = False  # content is a list of parts, not a text
    json_arguments: bool = False  # arguments of calls are JSON text, not objects
    no_content: bool = False  # a message of calls alone has no content, not an empty text
    writes_calls: bool = True  # calls are written; else they become text
    writes_results: bool = True  # results are written; else they become messages of the user
    reasoning: str = ""  # field of the reasoning of a message that the template reads; empty: none

    def normal(self, messages: Messages) -> list[Message]:
        """Messages in the form, results in the order of their calls."""
        return [self._normal(message) for message in in_order_of_calls(messages)]

    def finished(self, messages: Messages) -> list[dict[str, Any]]:
        """Messages whose texts are as the template wants them; the last change before they are rendered."""
        return [self._finished(message) for message in messages]

    def _normal(self, message: Message) -> Message:
        made: dict[str, Any] = {key: value for key, value in message.items() if key not in ("tools", *REASONING)}
        if is_text(content := message["content"]):
            made["content"] = plain_text(content)
        if self.reasoning and (thought := reasoning_of(message)):
            made[self.reasoning] = thought
        if not made.get("tool_calls"):
            made.pop("tool_calls", None)
        elif not self.writes_calls:
            made = {"role": message["role"], "content": with_calls_as_text(message)}
        if message["role"] == "tool" and not self.writes_results:
            made = {"role": "user", "content": made["content"]}
        return made  # type: ignore[return-value]

    def _finished(self, message: Message) -> dict[str, Any]:
        made: dict[str, Any] = dict(message)
        if calls := made.get("tool_calls"):
            made["tool_calls"] = [self._call(call, place) for place, call in enumerate(calls)]
        if calls and self.no_content and not made["content"]:
            made["content"] = None
        elif self.parts and isinstance(made["content"], str):
            made["content"] = [{"type": "text", "text": made["content"]}]
        return made

    def _call(self, call: Mapping[str, Any], place: int) -> dict[str, Any]:
        function = call.get("function", call)
        arguments = _object(function.get("arguments", {}))
        given = json.dumps(arguments, ensure_ascii=False) if self.json_arguments and not isinstance(arguments, str) else arguments
        return {"type": "function", "id": call.get("id") or call_id(place), "function": {"name": function["name"], "arguments": given}}


def find_dialect(template: ChatTemplate) -> Dialect:
    """Return the form in which a template takes messages, by rendering probes in each of them.

    Raises:
        ChatTemplateError: If it does not write even a question of the user.
    """
    parts = next((parts for parts in (False, True) if _writes(template, Dialect(parts=parts), [Message(role="user", content=PROBE)])), None)
    if parts is None:
        template.render([QUESTION])  # says why, if it refuses
        raise ChatTemplateError(f"{template.name} leaves out the text of a user's message. Give another with --chat-template FILE")
    reasoning = next((field for field in REASONING if f".{field}" in template.source or f"'{field}'" in template.source), "")
    reasoning = reasoning or next((field for field in REASONING if f'"{field}"' in template.source), "")
    called = [QUESTION, Message(role="assistant", content="", tool_calls=[probe_call("add")])]
    for no_content in (False, True):
        for json_arguments in (False, True):
            dialect = Dialect(parts=parts, json_arguments=json_arguments, no_content=no_content, reasoning=reasoning)
            if _writes(template, dialect, called):
                answered = [*called, Message(role="tool", content="RESULT", name="add", tool_call_id=call_id(0))]
                return replace(dialect, writes_results=_writes(template, dialect, answered))
    answered = [QUESTION, Message(role="assistant", content="."), Message(role="tool", content="RESULT")]
    dialect = Dialect(parts=parts, reasoning=reasoning, writes_calls=False)
    return replace(dialect, writes_results=_writes(template, dialect, answered))


def _writes(template: ChatTemplate, dialect: Dialect, messages: Messages) -> bool:
    """Return True if nothing of the messages is lost, and no object is written as Python writes it."""
    try:
        rendered = template.render(dialect.finished(messages))
    except ChatTemplateError:
        return False
    return not lost(rendered, messages) and "{'number'" not in rendered


def lost(rendered: str, messages: Messages) -> str:
    """Return what a rendering leaves out of the messages, in words; "" if nothing.

    Every text, each call's name and the values of its arguments must be in it; a text may be trimmed, or written as JSON writes it. What
    an assistant thought before its text may be left out.
    """
    place = 0
    for message in messages:
        for kind, text in _pieces(message):
            found = _find(rendered, text, place)
            if found < 0:
                return f"{kind} of the message of the role {message['role']}"
            place = max(place, found)
    return ""


def _pieces(message: Message) -> Iterator[tuple[str, str]]:
    content = message["content"]
    for text in [content] if isinstance(content, str) else [part.get("text", "") for part in content or () if isinstance(part, Mapping)]:
        yield "the text", text.rpartition("</think>")[2] if message["role"] == "assistant" else text
    for call in message.get("tool_calls") or ():
        yield "the name of a call", call["function"]["name"]
        for text in _leaves(_object(call["function"].get("arguments"))):
            yield "an argument of a call", text


def _leaves(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from _leaves(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, str):
        yield value
    elif value is not None and not isinstance(value, bool):
        yield json.dumps(value)


def _find(rendered: str, text: str, start: int) -> int:
    """Place of a text in a rendering, looked for from `start` first; -1 if it is not there."""
    text = text.strip()
    if (found := rendered.find(text, start)) >= 0:
        return found
    for form in (text, json.dumps(text, ensure_ascii=False)[1:-1]):
        for begin in (start, 0) if start else (0,):
            if (found := rendered.find(form, begin)) >= 0:
                return found
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return rendered.find(lines[0]) if len(lines) > 1 and all(line in rendered for line in lines) else -1


def forms(messages: Messages, *, calls: bool = True) -> Iterator[tuple[str, Messages]]:
    """Ways of writing messages, with their names, the most faithful first.

    The first that a template takes, and that loses nothing, is the one to use. With `calls` the template writes tool calls.
    """
    steps: dict[str, Callable[[Messages], Messages]] = {}
    if calls and any(message.get("tool_calls") for message in messages):
        steps = {"one call in a message": one_call_each, "text and calls in messages of their own": _text_apart}
    if any(message["role"] in SYSTEM for message in messages[1:]):
        steps["a later system message as the user's"] = _later_system_as_user
    yield "as they are", messages
    for number in range(1, len(steps) + 1):
        for names in combinations(steps, number):
            changed = messages
            for name in names:
                changed = steps[name](changed)
            yield ", ".join(names), changed
    yield "results as the user's, calls as text", joined(calls_as_text(messages), ("tool",))
    yield "all but the assistant's as the user's", joined(calls_as_text(messages), ("tool", *SYSTEM))


def in_order_of_calls(messages: Messages) -> list[Message]:
    """Messages in which the results behind an answer stand in the order of its calls, by their ids."""
    ordered: list[Message] = []
    order: dict[str, int] = {}
    for role, run in groupby(messages, key=lambda message: message["role"]):
        group = list(run)
        if role == "tool" and order:
            group.sort(key=lambda message: order.get(message.get("tool_call_id", ""), len(order)))
        elif role == "assistant":
            order = {str(call.get("id")): place for place, call in enumerate(group[-1].get("tool_calls") or ())}
        ordered += group
    return ordered


def one_call_each(messages: Messages) -> list[Message]:
    """Messages in which an answer with several calls is several answers, each with its result behind it."""
    split: list[Message] = []
    waiting: list[Message] = []  # further calls of the latest answer
    for message in messages:
        if message["role"] != "tool":
            split, waiting = [*split, *waiting], []
        elif waiting and split[-1]["role"] == "tool":
            split.append(waiting.pop(0))
        split.append(message)
        calls = message.get("tool_calls") or []
        if len(calls) > 1:
            split[-1] = {**message, "tool_calls": calls[:1]}
            waiting = [Message(role="assistant", content="", tool_calls=[call]) for call in calls[1:]]
    return [*split, *waiting]


def _text_apart(messages: Messages) -> list[Message]:
    """Messages in which the text before calls is a message of its own."""
    apart: list[Message] = []
    for message in messages:
        has_both = message.get("tool_calls") and message["content"]
        apart += [Message(role=message["role"], content=message["content"]), {**message, "content": ""}] if has_both else [message]
    return apart


def calls_as_text(messages: Messages) -> list[Message]:
    """Messages in which tool calls are a part of the text, as JSON in tags."""
    return [
        Message(role=message["role"], content=with_calls_as_text(message)) if message.get("tool_calls") else message for message in messages
    ]


def with_calls_as_text(message: Message) -> str:
    """Return the text of a message with its tool calls as JSON in tags."""
    calls = [json.dumps({**call["function"], "arguments": _object(call["function"].get("arguments"))}) for call in message["tool_calls"]]
    return "\n".join([*filter(None, [plain_text(message["content"])]), *(f"<tool_call>\n{call}\n</tool_call>" for call in calls)])


def _later_system_as_user(messages: Messages) -> list[Message]:
    first = next((index for index, message in enumerate(messages) if message["role"] not in SYSTEM), len(messages))
    return [*messages[: min(first, 1)], *joined(messages[min(first, 1) :], SYSTEM)]


def joined(messages: Messages, roles: Sequence[str]) -> list[Message]:
    """Messages in which those of some roles are the user's, and the user's in a row are one."""
    joined: list[Message] = []
    for message in messages:
        role = "user" if message["role"] in roles else message["role"]
        both = [message["content"], joined[-1]["content"]] if joined and role == joined[-1]["role"] == "user" else []
        if both and all(isinstance(text, str) for text in both):
            joined[-1] = Message(role="user", content=f"{joined[-1]['content']}\n{message['content']}")
        else:
            joined.append(message if role == message["role"] else Message(role=role, content=message["content"]))
    return joined


def tools_of(messages: Messages) -> list[Any]:
    """Return the tools that messages have; `EnvResultError` if they are not in JSON's own types."""
    try:
        tools = [tool for message in messages for tool in message.get("tools") or ()]
        json.dumps(tools)
    except (TypeError, ValueError, RecursionError) as error:
        raise EnvResultError(f"the tools in the messages are not a list of JSON schemas: {error}") from error
    return tools


def is_text(content: Any) -> bool:
    """Return True if a message's content is a text, parts that are all texts, or nothing."""
    if isinstance(content, list | tuple):
        return all(isinstance(part, str) or (isinstance(part, Mapping) and part.get("type") == "text") for part in content)
    return content is None or isinstance(content, str)


def reasoning_of(message: Mapping[str, Any]) -> str:
    """Return the reasoning that a message has in a field of its own; "" if there is none."""
    return next((str(message[field]) for field in REASONING if message.get(field)), "")


def _object(arguments: Any) -> Any:
    """Arguments of a call as an object, if they are one or its JSON."""
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        parsed = json.loads(arguments)
    except ValueError:
        return arguments
    return parsed if isinstance(parsed, Mapping) else arguments

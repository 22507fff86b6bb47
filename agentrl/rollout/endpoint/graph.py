"""Graph of the messages of one episode: finds the sampled answers that a request echoes, and puts their tokens back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from agentrl.core.errors import EnvResultError
from agentrl.core.serving import ApiError
from agentrl.core.types import Message
from agentrl.rollout.endpoint.neutral import Answer, ChatRequest, EchoedMessage, Json
from agentrl.rollout.recorder import Context, Recorder, Sample

Key: TypeAlias = tuple[str, str, str, tuple[tuple[str, str], ...]]
"""A message without what clients change when they send it again: role, name, text, and tool calls by name and arguments."""

SYSTEM = ("system", "developer")
CONSTRAINED = "constrained"
"""Reason for which answers that the request held to a form are recorded and not trained, and for which they open a branch."""


@dataclass(slots=True, eq=False)
class Sampled:
    """One answer of the policy, and where its tokens are."""

    context: Context
    length: int  # tokens of the context up to the end of the answer
    answer: Answer
    trunk: Context | None  # context that a conversation goes on with behind the answer; `None`: it opens one
    trunk_length: int  # tokens of the trunk up to there

    @property
    def going_on(self) -> Context | None:
        """The context that what follows the answer goes on with; `None` if it opens one."""
        return self.trunk if self.trunk is not None and len(self.trunk.tokens) == self.trunk_length else None


@dataclass(slots=True, eq=False)
class Place:
    """A message in the graph; the way to it from the root is a history."""

    message: EchoedMessage | None = None  # as it came first; `None` for the root
    children: dict[Key, Place] = field(default_factory=dict)
    sampled: list[Sampled] = field(default_factory=list)  # answers that end the history

    def child(self, key: Key, message: EchoedMessage) -> Place:
        """The place of the history that goes on with a message."""
        found = self.children.get(key)
        if found is None:
            found = self.children[key] = Place(message)
        return found


@dataclass(slots=True, eq=False)
class History:
    """The messages of a context up to its latest answer."""

    context: Context
    tools: str
    keys: list[Key]


@dataclass(slots=True, eq=False, kw_only=True)
class Placed:
    """A request with its place in the graph."""

    place: Place  # of its last message
    tools: str
    keys: list[Key]
    messages: list[EchoedMessage]  # as they came first, so that the requests of a conversation share them
    prompt_ids: list[int]
    follows: Sampled | None  # the latest sampled answer among the messages, whose tokens begin the prompt
    reason: str  # why the answer opens a branch; "" if it goes on with a context

    @property
    def context(self) -> Context | None:
        """The context that the answer goes on with; `None` if it opens one."""
        return None if self.follows is None else self.follows.going_on


class MessageGraph:
    """Histories of an episode, whichever agents and sub-agents they belong to.

    A request begins with some history and goes on with new messages. Its prompt is made of the tokens of the longest history that ends
    with a sampled answer, exactly as the engine saw and sampled them, and of the new messages, rendered once. What differs from every
    history opens a branch, for a reason that is recorded.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._codec, self._recorder = recorder.codec, recorder
        self._roots: dict[str, Place] = {}
        self._latest_tools: tuple[Sequence[Json], str] = ((), "")
        self.histories: list[History] = []  # one per context

    def place(self, request: ChatRequest) -> Placed:
        """Find a request's place, and make its prompt; `ApiError` if the model's chat template refuses the messages."""
        keys, tools = [message_key(message) for message in request.messages], self._tools_key(request.tools)
        place = self._roots.setdefault(tools, Place())
        follows, number, messages = None, 0, list[EchoedMessage]()
        for index, (key, message) in enumerate(zip(keys, request.messages, strict=True)):
            place = place.child(key, message)
            messages.append(place.message or message)
            if place.sampled:
                follows, number = _meant(place.sampled, message), index + 1
        reason = self._reason(keys, tools, follows)
        tail = None if follows is None else self._tail(request, number, follows)
        if follows is not None and tail is None:
            follows, reason = None, "template"
        prompt_ids = self._whole(request) if follows is None else follows.context.tokens[: follows.length] + (tail or [])
        return Placed(place=place, tools=tools, keys=keys, messages=messages, prompt_ids=prompt_ids, follows=follows, reason=reason)

    def add_aborted(self, sample: Sample, reason: str) -> None:
        """Record what was sampled of an answer that nobody waited for."""
        self._recorder.add(sample, None, reason, masked=reason)

    def add(self, placed: Placed, sample: Sample, answer: Answer, raw: str, *, constrained: bool = False) -> Context:
        """Record an answer behind the messages of its request; `raw` is its text with reasoning and tool calls as they were sampled.

        A `constrained` answer is a context of its own that is not trained; the context before it goes on behind it, and reads it.
        """
        going_on = placed.context
        if constrained:
            context, trunk = self._recorder.add(sample, None, CONSTRAINED, masked=CONSTRAINED), going_on
        else:
            context = self._recorder.add(sample, going_on, placed.reason or ("forked" if self._recorder.contexts else ""))
            trunk = context
        message = answer.message()
        key = message_key(message)
        end = placed.place.child(key, message)
        end.sampled.append(Sampled(context, len(context.tokens), answer, trunk, len(trunk.tokens) if trunk is not None else 0))
        for text in {raw.strip(), raw.rpartition("</think>")[2].strip()}:
            placed.place.children.setdefault(("assistant", "", text, ()), end)
        keys = [*placed.keys, key]
        if going_on is None:
            self.histories.append(History(context, placed.tools, keys))
        else:
            next(history for history in self.histories if history.context is going_on).keys = keys
        return context

    def _tools_key(self, tools: Sequence[Json]) -> str:
        latest, key = self._latest_tools
        if tools != latest:
            key = json.dumps(tools, sort_keys=True) if tools else ""
            self._latest_tools = (tools, key)
        return key

    def _tail(self, request: ChatRequest, number: int, follows: Sampled) -> list[int] | None:
        """Tokens after a sampled answer up to the next, or `None` if the template cannot append the messages behind it."""
        earlier = [*request.messages[: number - 1], follows.answer.message()]
        try:
            last_id = follows.context.tokens[follows.length - 1]
            return self._codec.encode_next(request.messages[number:], last_id, _with_tools(earlier, request.tools))
        except EnvResultError:
            return None

    def _whole(self, request: ChatRequest) -> list[int]:
        try:
            return self._codec.encode_chat(_with_tools(request.messages, request.tools))
        except EnvResultError as error:
            raise ApiError(400, f"messages: {error}", "messages", "invalid_value") from error

    def _reason(self, keys: list[Key], tools: str, follows: Sampled | None) -> str:
        """Return why a request does not simply go on with a context; "" if it does, or if it is the first."""
        if not self.histories or (follows is not None and follows.going_on is not None):
            return ""
        if follows is not None and follows.trunk is None:
            return CONSTRAINED
        rest = _without_system(keys)
        shared = [(_shared(rest, _without_system(history.keys)), history) for history in self.histories]
        most, nearest = max(shared, key=lambda pair: (pair[0], pair[1].tools == tools))
        same_system = _system(keys) == _system(nearest.keys)
        if most and most == len(_without_system(nearest.keys)):
            return "tools changed" if nearest.tools != tools and same_system else "system changed"
        if not most:
            is_shorter = len(keys) < len(nearest.keys) and len(nearest.keys) > 3
            return "compacted" if same_system and nearest.tools == tools and is_shorter and _system(keys) else "sub-agent"
        if nearest.tools != tools or not same_system:
            return "tools changed" if same_system else "system changed"
        return _difference(rest, _without_system(nearest.keys), most)


def message_key(message: Message) -> Key:
    """Return the parts of a message that stay the same when a client sends it again."""
    calls = tuple((call["function"]["name"], _canonical(call["function"]["arguments"])) for call in message.get("tool_calls") or ())
    role = message["role"]
    return role, message.get("name", "") if role == "user" else "", message["content"].strip(), calls


def _with_tools(messages: Sequence[Message], tools: Sequence[Json]) -> Sequence[Message]:
    return [Message(**messages[0], tools=tools), *messages[1:]] if tools else messages


def _canonical(arguments: Any) -> str:
    return arguments.strip() if isinstance(arguments, str) else json.dumps(arguments, sort_keys=True, separators=(",", ":"))


def _meant(sampled: Sequence[Sampled], message: EchoedMessage) -> Sampled:
    """The answer that a client echoes: the one with the ids of its tool calls or with its reasoning, else the latest."""
    if len(sampled) > 1:
        ids = {call.get("id") for call in message.get("tool_calls") or ()}
        reasoning, own = message.get("reasoning_content", "").strip(), message.get("id", "")
        for candidate in reversed(sampled):
            answer = candidate.answer
            same_id = own.endswith(answer.id) or any(call.id in ids for call in answer.calls)
            if same_id or (reasoning and reasoning == answer.reasoning.strip()):
                return candidate
    return sampled[-1]


def _system(keys: Sequence[Key]) -> list[Key]:
    return [key for key in keys if key[0] in SYSTEM]


def _without_system(keys: Sequence[Key]) -> list[Key]:
    return [key for key in keys if key[0] not in SYSTEM]


def _shared(first: Sequence[Key], second: Sequence[Key]) -> int:
    """Number of messages with which both begin."""
    count = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        count += 1
    return count


def _difference(keys: Sequence[Key], history: Sequence[Key], shared: int) -> str:
    """Return in what the messages differ from a history after `shared` equal ones."""
    if shared == len(keys):
        return "sampled again"
    if keys[shared][0] == "assistant" or (len(keys) > shared + 1 and len(keys) >= len(history)):
        return "edited"
    if history[shared][0] == "assistant" or set(keys[shared:]) & set(history[shared + 1 :]):
        return "compacted"
    return "forked"

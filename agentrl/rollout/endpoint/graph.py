"""Graph of the messages of one episode: finds the sampled answers that a request echoes, and puts their tokens back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

from agentrl.core.errors import ConfigError, EnvResultError
from agentrl.core.images import PlacedImage
from agentrl.core.serving import ApiError
from agentrl.core.types import Message
from agentrl.rollout.chat import ChatCodec
from agentrl.rollout.endpoint.neutral import Answer, ChatRequest, EchoedMessage, Json, parsed_arguments
from agentrl.rollout.endpoint.pictures import marks_in, with_parts
from agentrl.rollout.forms import with_calls_as_text
from agentrl.rollout.lane import SHORT
from agentrl.rollout.recorder import Context, Recorder, Sample

Key: TypeAlias = tuple[str, str, str, tuple[tuple[str, str], ...]]
"""A message without what clients change when they send it again: role, name, text, and tool calls by name and arguments."""

SYSTEM = ("system", "developer")
SHOWN = 4000
"""Characters of what a client sent back that are kept for people."""
STRIDE = 500
"""Messages that are looked up at a time, within a few milliseconds."""
CONSTRAINED = "constrained"
"""Reason for which answers that the request held to a form are recorded and not trained, and for which they open a branch."""


@dataclass(slots=True, eq=False)
class Sampled:
    """One answer of the policy, and where its tokens are."""

    end: Place  # of the history that it ends
    context: Context
    turn: int  # number of the answer among the turns of the context
    length: int  # tokens of the context up to the end of the answer
    answer: Answer
    trunk: Context | None  # context that a conversation goes on with behind the answer; `None`: it opens one
    trunk_length: int  # tokens of the trunk up to there

    @property
    def going_on(self) -> Context | None:
        """The context that what follows the answer goes on with; `None` if it opens one."""
        return self.trunk if self.trunk is not None and len(self.trunk.tokens) == self.trunk_length else None

    def is_echoed(self, message: EchoedMessage) -> bool:
        """Return True if a message with one of its ids is this answer, with exactly its calls, whatever a client made of their content."""
        return sorted(_ids(message)) == sorted(call.id for call in self.answer.calls)


@dataclass(slots=True, eq=False)
class Place:
    """A message in the graph; the way to it from the root is a history."""

    key: Key = ("", "", "", ())  # of the message as it came first
    message: EchoedMessage | None = None  # as it came first; `None` for the root
    children: dict[Key, Place] = field(default_factory=dict)
    sampled: list[Sampled] = field(default_factory=list)  # answers that end the history
    answers: dict[str, Sampled] = field(default_factory=dict)  # answers behind the history, by their ids and those of their calls

    def child(self, key: Key, message: EchoedMessage) -> Place:
        """The place of the history that goes on with a message."""
        found = self.children.get(key)
        if found is None:
            found = self.children[key] = Place(key, message)
        return found

    def echoed(self, message: EchoedMessage, key: Key) -> Sampled | None:
        """The answer behind this history that a client sends back as this message; `None` if it is none.

        Ids tell it, whatever the client has changed in a call or a text: defaults added, numbers written anew, blanks or a prefix dropped.
        A message without ids must have the content of an answer, up to such changes.
        """
        for name in (message.get("id", "").removeprefix("msg_"), *_ids(message)):
            answer = self.answers.get(name)
            if answer is not None and answer.is_echoed(message):
                return answer
        end = self.children.get(key)
        if end is None and not _ids(message):
            end = next((other for other in self.children.values() if other.sampled and _same_but_for_form(key, other.key)), None)
        return _meant(end.sampled, message) if end is not None and end.sampled else None


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
    images: Sequence[PlacedImage]  # of the prompt
    follows: Sampled | None  # the latest sampled answer among the messages, whose tokens begin the prompt
    reason: str  # why the answer opens a branch; "" if it goes on with a context

    @property
    def context(self) -> Context | None:
        """The context that the answer goes on with; `None` if it opens one."""
        return None if self.follows is None else self.follows.going_on


@dataclass(slots=True, eq=False, kw_only=True)
class _Path:
    """The way of a request through the graph."""

    places: list[Place]  # of its messages
    sent: list[EchoedMessage]  # its messages as the client sent them, results in the order of their calls
    follows: Sampled | None = None  # the latest sampled answer among them
    number: int = 0  # messages up to the end of that answer


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
        self.images: dict[str, str] = {}  # images of the episode as paths or data URLs, by the marks that stand for them in texts
        self.histories: list[History] = []  # one per context

    async def place(self, request: ChatRequest) -> Placed:
        """Find a request's place, and make its prompt; `ApiError` if the model's chat template refuses the messages.

        Waits for the lane of the codec, on which long texts are rendered and made tokens.
        """
        tools, codec, lane = await self.tools_key(request.tools), self._codec, self._codec.lane
        if request.template_variables:
            # Never short, so that it is on the thread: a new codec renders many probes.
            codec = await lane.run(partial(self._variant, request.template_variables), SHORT + 1)
        path = await self._path(request.messages, self._roots.setdefault(tools, Place()))
        keys = [place.key for place in path.places]
        reason, follows, tail = self._reason(keys, tools, path.follows), path.follows, None
        if follows is not None:
            tail = await lane.run(partial(self._tail, codec, path, follows, request.tools), _length(keys[path.number :]))
        if follows is None or tail is None:
            reason, follows = "template" if follows is not None else reason, None
            whole = partial(self._whole, codec, _with_tools(path.sent, request.tools))
            compact = await lane.run(whole, _length(keys) + len(tools))
            prompt_ids, images = await self._expanded(compact, path.sent, [])
        else:
            before = [each for each in follows.context.placed if each.place < follows.length]
            new, later = await self._expanded(tail, path.sent[path.number :], before)
            prompt_ids = follows.context.tokens[: follows.length] + new
            images = [*before, *(each.moved(follows.length) for each in later)]
        messages = [place.message or message for place, message in zip(path.places, path.sent, strict=True)]
        place = path.places[-1]
        return Placed(
            place=place, tools=tools, keys=keys, messages=messages, prompt_ids=prompt_ids, images=images, follows=follows, reason=reason
        )

    async def _expanded(
        self, compact: list[int], messages: Sequence[Message], before: Sequence[PlacedImage]
    ) -> tuple[list[int], Sequence[PlacedImage]]:
        """Return the expanded form of the tokens of messages, and their images; `ApiError` for an image that cannot be used."""
        reader = self._codec.images
        if reader is None or not self.images:
            return compact, ()
        sources = [self.images[mark] for message in messages for mark in marks_in(message, self.images)]
        for source in sources:
            if not (source.startswith("data:") or reader.fetches(source)):  # a path would be one of this machine
                problem = "is no data URL, and no address of a host of --allow-image-urls"
                raise ApiError(400, f"messages: the image {source[:60]!r} {problem}", "messages", "invalid_value")
        try:
            found = await reader.read(sources)
            return reader.expand(compact, found, len(before))
        except EnvResultError as error:
            raise ApiError(400, f"messages: {error}", "messages", "invalid_value") from error

    async def tools_key(self, tools: Sequence[Json]) -> str:
        """The tools as one text, which is the same for the same tools."""
        latest, key = self._latest_tools
        if tools != latest:
            # Never short, since how long it is shows only when it is written.
            key = await self._codec.lane.run(partial(json.dumps, tools, sort_keys=True), SHORT + 1) if tools else ""
            self._latest_tools = (tools, key)
        return key

    def _variant(self, variables: Json) -> ChatCodec:
        try:
            return self._codec.with_variables(variables)
        except (EnvResultError, ConfigError) as error:
            raise ApiError(400, f"chat_template_kwargs: {error}", "chat_template_kwargs", "invalid_value") from error

    async def _path(self, messages: Sequence[EchoedMessage], place: Place) -> _Path:
        """Find the places of messages from a root on; results of tools are put in the order of their calls.

        Lets others go on after every `STRIDE` messages.
        """
        path = _Path(places=[], sent=list(messages))
        for index, message in enumerate(path.sent):
            if index % STRIDE == STRIDE - 1:
                await asyncio.sleep(0)
            parent, key, order = place, message_key(message), _ids(message)
            answer = place.echoed(message, key) if message["role"] == "assistant" else None
            if answer is None:
                place = place.child(key, message)
            else:
                place, order = answer.end, [call.id for call in answer.answer.calls]
                path.follows, path.number = answer, index + 1
                if parent.children.get(key) is not answer.end:
                    answer.context.note(answer.turn, rewritten=_shown(message))
            path.places.append(place)
            if len(order) > 1:
                _put_in_order(path.sent, index + 1, order)
        return path

    def add_aborted(self, sample: Sample, reason: str) -> None:
        """Record what was sampled of an answer that nobody waits for any more, in a context of its own that is not trained."""
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
        trunk_length = len(trunk.tokens) if trunk is not None else 0
        sampled = Sampled(end, context, len(context.turns) - 1, len(context.tokens), answer, trunk, trunk_length)
        end.sampled.append(sampled)
        placed.place.answers.update(dict.fromkeys((answer.id, *(call.id for call in answer.calls)), sampled))
        # Some clients send the text back as it was sampled, with its reasoning and its calls.
        for text in {raw.strip(), raw.rpartition("</think>")[2].strip()}:
            placed.place.children.setdefault(("assistant", "", text, ()), end)
        keys = [*placed.keys, key]
        if going_on is None:
            self.histories.append(History(context, placed.tools, keys))
        else:
            next(history for history in self.histories if history.context is going_on).keys = keys
        return context

    def _tail(self, codec: ChatCodec, path: _Path, follows: Sampled, tools: Sequence[Json]) -> list[int] | None:
        """Tokens after a sampled answer up to the next, or `None` if the template cannot append the messages behind it."""
        earlier = [*path.sent[: path.number - 1], follows.answer.message()]
        try:
            last_id = follows.context.tokens[follows.length - 1]
            new = [with_parts(message, self.images) for message in path.sent[path.number :]]
            return codec.encode_next(new, last_id, _with_tools(earlier, tools))
        except EnvResultError:
            return None

    def _whole(self, codec: ChatCodec, messages: Sequence[Message]) -> list[int]:
        try:
            return codec.encode_chat([with_parts(message, self.images) for message in messages])
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


def _length(keys: Sequence[Key]) -> int:
    """Characters of messages."""
    return sum(len(key[2]) + sum(len(arguments) for _, arguments in key[3]) for key in keys)


def _with_tools(messages: Sequence[Message], tools: Sequence[Json]) -> Sequence[Message]:
    return [Message(**messages[0], tools=tools), *messages[1:]] if tools else messages


def _canonical(arguments: Any) -> str:
    return arguments.strip() if isinstance(arguments, str) else json.dumps(arguments, sort_keys=True, separators=(",", ":"))


def _plain(value: Any) -> Any:
    """Arguments without what clients change in their form: blanks around texts, and the zeros of whole numbers."""
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, str):
        return value.strip()
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _same_but_for_form(echoed: Key, sampled: Key) -> bool:
    """Return True if a message without ids is an answer whose blanks or numbers were written anew, or whose beginning was dropped."""
    text, whole = " ".join(echoed[2].split()), " ".join(sampled[2].split())
    if not (text == whole or (whole.endswith(text) and 2 * len(text) >= len(whole) > 0)):
        return False
    return [name for name, _ in echoed[3]] == [name for name, _ in sampled[3]] and all(
        _plain(parsed_arguments(one)) == _plain(parsed_arguments(other)) for (_, one), (_, other) in zip(echoed[3], sampled[3], strict=True)
    )


def _ids(message: EchoedMessage) -> list[str]:
    """Ids of the tool calls of a message, as far as they have some."""
    return [call_id for call in message.get("tool_calls") or () if (call_id := str(call.get("id") or ""))]


def _put_in_order(messages: list[EchoedMessage], start: int, order: Sequence[str]) -> None:
    """Put the results of tools that stand from `start` on in the order of their calls; those of no call come last."""
    end = start
    while end < len(messages) and messages[end]["role"] == "tool":
        end += 1
    ranks = {name: rank for rank, name in enumerate(order)}
    messages[start:end] = sorted(messages[start:end], key=lambda result: ranks.get(result.get("tool_call_id", ""), len(ranks)))


def _shown(message: EchoedMessage) -> str:
    text = with_calls_as_text(message) if message.get("tool_calls") else str(message["content"])
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _meant(sampled: Sequence[Sampled], message: EchoedMessage) -> Sampled:
    """The answer that a client echoes without its ids: the one with its reasoning, else the latest."""
    reasoning = message.get("reasoning_content", "").strip()
    return next((one for one in reversed(sampled) if reasoning and reasoning == one.answer.reasoning.strip()), sampled[-1])


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

"""One episode behind the endpoint: requests are answered, joined, repeated or refused, and every answer is recorded."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from agentrl.core.errors import ContextLengthError, EngineError, EnvResultError, StructureError
from agentrl.core.protocols import Structure
from agentrl.core.serving import ApiError
from agentrl.core.types import FinishReason, Sampling
from agentrl.rollout.endpoint.answers import AnswerParser
from agentrl.rollout.endpoint.exchange import Exchange
from agentrl.rollout.endpoint.graph import MessageGraph
from agentrl.rollout.endpoint.live import LiveAnswer, cut_at_stop
from agentrl.rollout.endpoint.neutral import Answer, Call, ChatRequest, EchoedMessage, call_id, texts_of
from agentrl.rollout.endpoint.pictures import without_images
from agentrl.rollout.endpoint.request_log import RequestLog
from agentrl.rollout.endpoint.splitter import AnswerSplitter
from agentrl.rollout.lane import Turns
from agentrl.rollout.recorder import Recorder, Sample

ABANDONED, CANCELLED, UNDELIVERED, NOT_SELECTED = "abandoned", "cancelled", "undelivered", "not selected"
"""Reasons for which sampled tokens are recorded and not trained."""
LINGER_S = 1.0
"""Seconds for which the engine goes on with a request whose client has left, so that a retry may join it."""
DENSE = 8
"""Characters per token of a context above which a request is counted before it is rendered; texts have fewer."""
PROMPT_END = 16
"""Tokens of the end of a prompt in which the opening of reasoning is looked for."""
ABORT_S = 5.0
"""Seconds that an engine has to return what it sampled of requests that are dropped at the end of an episode."""


class EndpointSession:
    """Requests of one episode; `end` refuses those that come later.

    Each request is a task of its own: it consumes the request, produces a recorded answer, waits for the engine, and is unblocked by it or
    cancelled when the last client that waits for it has left, and none has joined within `linger_s` seconds.
    A `log` keeps the requests and what was sampled for them.
    """

    def __init__(
        self, recorder: Recorder, *, parser: AnswerParser, max_requests: int, log: RequestLog | None = None, turns: Turns | None = None
    ) -> None:
        self._recorder, self._name, self._codec, self._settings = recorder, recorder.name, recorder.codec, recorder.settings
        self._parser, self._max_requests, self._log = parser, max_requests, log
        self._same: dict[bytes, list[Exchange]] = {}  # requests by what they ask
        self._failures: dict[bytes, EngineError] = {}
        self.graph = MessageGraph(recorder)
        self.exchanges: list[Exchange] = []
        self.counts: Counter[str] = Counter()  # requests, retries, refused, abandoned
        self.last_refusal: ApiError | None = None
        self._aborts: set[asyncio.Task[None]] = set()
        self._turns = turns or Turns()
        self.is_over = False
        self.linger_s = LINGER_S

    @property
    def failure(self) -> EngineError | None:
        """An engine's error that no later request with the same content made good; `None` if there is none."""
        return next(iter(self._failures.values()), None)

    @property
    def max_model_len(self) -> int:
        """Tokens that a conversation may have."""
        return self._recorder.limit

    def seen(self, request: ChatRequest) -> ChatRequest:
        """Return a request as the model sees it: without images, if it reads text only."""
        if not request.images or self._codec.images is not None:
            return request
        messages = [without_images(message, [mark for mark, _ in request.images]) for message in request.messages]
        return replace(request, messages=messages, images=(), images_omitted=len(request.images))

    @property
    def limit_reached(self) -> bool:
        """True if a request was refused because there had been too many."""
        return self.counts["over the limit"] > 0

    def repeated(self, digest: bytes, retry: int | None, key: str = "") -> Exchange | None:
        """The earlier request that this one repeats, or `None` if it is to be answered anew.

        A request joins the same one in flight if both have one idempotency key (`key`), or if the connection of that one is closed; it gets
        an answer again that nobody got behind a closed connection; everything else is a new sample. Requests of branches with a name, and
        those whose client says that it sends them for the first time (`retry` is 0), join none in flight.
        """
        same = next((earlier for earlier in self._same.get(digest, ()) if earlier.is_for(retry, key)), None)
        self.counts["requests"] += 1
        self.counts["retries"] += same is not None or bool(retry)
        return same

    def begin(self, digest: bytes, request: ChatRequest, branch: str, key: str = "") -> Exchange:
        """Answer a request; `ApiError` if the episode is over or there were too many requests."""
        self.check_open()
        self.graph.images.update(request.images)
        self.counts.update(ignored_fields=len(request.ignored), images_omitted=request.images_omitted)
        asked, request = request, self._complete(request)
        if len(self.exchanges) >= self._max_requests:
            self.counts["over the limit"] += 1
            problem = f"the agent has sent {self._max_requests} requests in this episode, which is the limit (--max-requests)"
            raise ApiError(403, problem, code="request_limit_reached")
        task = asyncio.create_task(self._answer(len(self.exchanges), digest, request), name=f"request {self._name}")
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # read, even when nobody waits
        exchange = Exchange(digest, request, branch, task, key)
        self.exchanges.append(exchange)
        if self._log is not None:
            self._log.came(asked, branch)
        self._same.setdefault(digest, []).append(exchange)
        return exchange

    async def count(self, request: ChatRequest) -> int:
        """Tokens of the prompt of a request; nothing is sampled."""
        self.check_open()
        self.graph.images.update(request.images)
        with _reading():
            request = self._complete(request)
            await self._check_size(request)
            return len((await self.graph.place(request)).prompt_ids)

    def deliver(self, exchange: Exchange) -> None:
        """Say that a client gets an answer; what is only needed to render it again is forgotten."""
        exchange.delivered = True
        exchange.request = replace(exchange.request, options={})

    def check_open(self) -> None:
        """Raise `ApiError` if the episode is over."""
        if self.is_over:
            raise ApiError(410, "the episode of this key is over, so nothing is sampled for it any more", code="episode_over")

    def leave(self, exchange: Exchange) -> None:
        """A client no longer waits for the answer; without any client the request is soon dropped from the engine."""
        exchange.clients -= 1
        if exchange.delivered and not exchange.clients:
            exchange.live = None
        if exchange.clients or exchange.task.done():
            return
        if self.linger_s and not exchange.branch:
            asyncio.get_running_loop().call_later(self.linger_s, self._drop, exchange)
        else:
            self._drop(exchange)

    def refused(self, problem: ApiError) -> None:
        """Count a request that was not answered."""
        self.counts["refused"] += 1
        self.last_refusal = problem

    async def end(self) -> None:
        """Refuse later requests, and drop those under way."""
        self.is_over = True
        for exchange in self.exchanges:
            exchange.clients = 0
            self._drop(exchange)
        running = {exchange.task for exchange in self.exchanges if not exchange.task.done()}
        if running:
            _, late = await asyncio.wait(running, timeout=ABORT_S)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)
        self._recorder.end()
        for exchange in self.exchanges:
            if exchange.place is not None and not exchange.delivered:
                context, index = exchange.place
                # Later turns of the context have read the answer, so only the last one can be taken out.
                if index == len(context.turns) - 1:
                    self._recorder.detach(context, CANCELLED if exchange.begun else UNDELIVERED)
                    exchange.place = None

    def metrics(self) -> dict[str, float]:
        """Counts of the episode, for logs."""
        answered = [exchange for exchange in self.exchanges if exchange.answered]
        reasons = Counter(context.reason for context in self._recorder.contexts if context.reason)
        return {
            "endpoint/requests": float(self.counts["requests"]),
            "endpoint/branches": float(len(self._recorder.contexts)),
            "endpoint/retries": float(self.counts["retries"]),
            "endpoint/refused": float(self.counts["refused"]),
            "endpoint/abandoned": float(self.counts["abandoned"]),
            "endpoint/ignored_fields": float(self.counts["ignored_fields"]),
            "endpoint/images_omitted": float(self.counts["images_omitted"]),
            "endpoint/rewritten_by_client": float(sum(bool(turn.rewritten) for turn in self._recorder.turns)),
            **({"endpoint/delivered": sum(exchange.delivered for exchange in answered) / len(answered)} if answered else {}),
            **{f"endpoint/branches/{reason.replace(' ', '_')}": float(count) for reason, count in reasons.items()},
        }

    def _drop(self, exchange: Exchange) -> None:
        """Drop a request if nobody waits for it; what was sampled of it is recorded."""
        if exchange.clients or exchange.dropped or exchange.task.done():
            return
        exchange.dropped = True
        self.counts["abandoned"] += 1
        # The engine was not asked yet, so there is nothing to record.
        if exchange.sample is None:
            exchange.task.cancel()
            return
        # The engine is told, and the task goes on: so it gets what was sampled, and records it.
        abort = asyncio.create_task(self._recorder.abort(exchange.sample), name=f"abort {self._name}")
        self._aborts.add(abort)
        abort.add_done_callback(self._aborts.discard)

    async def _answer(self, number: int, digest: bytes, request: ChatRequest) -> Answer:
        await self._turns.take()
        if self._log is not None:
            self._log.placed(number)
        with _reading():
            await self._check_size(request)
            structure = self._structure(request)
            placed = await self.graph.place(request)
        exchange = self.exchanges[number]
        exchange.request = replace(request, messages=placed.messages)
        exchange.sample = own = self._recorder.reserve()
        live = self._live(exchange, number, placed.prompt_ids)
        exchange.live, listener = (live, live.take) if request.stream else (None, None)
        try:
            sample = await self._recorder.sample(
                placed.prompt_ids, self._sampling(request), placed=placed.images, number=own, structure=structure, on_tokens=listener
            )
        except ContextLengthError as error:
            raise self._too_long(len(placed.prompt_ids)) from error
        except StructureError as error:
            raise _cannot(request, str(error)) from error
        except EngineError as error:
            self._failures[digest] = error
            raise ApiError(500, f"the engine failed: {error}", code="engine_error") from error
        await self._turns.take()
        if self._log is not None:
            self._log.sampled(number, sample)
        if sample.generation.finish_reason is FinishReason.ABORTED:
            if len(sample.generation.token_ids):
                self._add_aborted(exchange, sample)
            raise ApiError(499, "the client left before the answer", code="client_left")
        self._failures.pop(digest, None)
        answer, raw = self._shown(live, request, sample)
        context = self.graph.add(placed, sample, answer, raw, constrained=structure is not None)
        exchange.place = context, len(context.turns) - 1
        return answer

    def _add_aborted(self, exchange: Exchange, sample: Sample) -> None:
        """Record what was sampled of an answer whose client has left; one that got some of it made something of it, perhaps."""
        self.graph.add_aborted(sample, CANCELLED if exchange.begun else ABANDONED)
        exchange.place = None

    def _complete(self, request: ChatRequest) -> ChatRequest:
        """The request with all messages before its own: those of the answer that it follows, and the text before all others."""
        messages, system, tools = list(request.messages), request.system, request.tools
        if request.previous:
            earlier = self._answered(request.previous)
            # The text before all messages is left out: it is put there again below, or another one.
            own = earlier.request.messages[1:] if earlier.request.system else earlier.request.messages
            messages = [*own, earlier.task.result().message(), *messages]
            system, tools = (
                system or earlier.request.system * request.inherits,
                tools or (earlier.request.tools if request.inherits else ()),
            )
        if system:
            messages.insert(0, EchoedMessage(role="system", content=system))
        constraint = request.constraint if self._settings.endpoint.forced_forms == "hold" else None
        return replace(request, messages=messages, system=system, tools=tools, constraint=constraint)

    def _answered(self, name: str) -> Exchange:
        number = answer_number(name, self._name)
        if number is None or number >= len(self.exchanges) or not self.exchanges[number].answered:
            field, code = ("thread.previous_message_id", "thread_not_found") if name.startswith("msg_") else ("previous_response_id", "")
            problem = f"{field} = {name!r}: is no answer of this episode"
            raise ApiError(404 if code else 400, problem, field, code or "previous_response_not_found")
        return self.exchanges[number]

    async def _check_size(self, request: ChatRequest) -> None:
        """Refuse what cannot fit before it is rendered and made tokens, which would take long for nothing."""
        texts, limit = [*texts_of(request.messages), await self.graph.tools_key(request.tools)], self._recorder.limit
        characters = sum(map(len, texts))
        fewest = max(self._codec.fewest_of(characters), len(request.messages))
        if fewest <= limit and characters > DENSE * limit:
            fewest = await self._codec.lane.run(partial(self._codec.at_least, texts, limit), characters)
        if fewest > limit:
            raise self._too_long(fewest)

    def _too_long(self, tokens: int) -> ApiError:
        problem = f"the prompt has {tokens} tokens or more, and a context {self._recorder.limit} ({self._recorder.limit_flag})"
        return ApiError(400, problem, "messages", "context_length_exceeded", (tokens, self._recorder.limit))

    def _structure(self, request: ChatRequest) -> Structure | None:
        """The form that the answer is held to, in the form of the parser; `None` if there is none."""
        wanted = request.constraint
        if wanted is None:
            return None
        tools = [tool for tool in request.tools if wanted.tool in ("", tool["function"]["name"])] if request.calls_tools else []
        if wanted.must_call and not tools:
            raise _cannot(request, f"there is no tool {wanted.tool!r}" if wanted.tool else "there are no tools")
        structure = self._parser.structure(wanted.schema, tools)
        if structure is None:
            problem = f"the form in which this model calls tools is not known as a grammar (--tool-parser {self._codec.tool_parser})"
            raise _cannot(request, f"{problem}; --tool-parser json is")
        return structure

    def _sampling(self, request: ChatRequest) -> Sampling:
        own = self._settings.sampling
        budget = own.max_tokens if request.max_tokens is None else min(own.max_tokens, request.max_tokens)
        if request.top_k not in (None, own.top_k):
            try:
                own = self._settings.changed_sampling(own, {"top_k": request.top_k}, "the request")
            except EnvResultError as error:
                raise ApiError(400, f"top_k = {request.top_k}: cannot be honoured: {error}", "top_k", "unsupported_value") from error
        return replace(own, max_tokens=budget, stop=tuple(dict.fromkeys((*own.stop, *request.stop))))

    def _live(self, exchange: Exchange, number: int, prompt_ids: Sequence[int]) -> LiveAnswer:
        """The answer before its first token."""
        request, codec, marks = exchange.request, self._codec, self._parser.marks
        is_opened = marks is not None and codec.decode(prompt_ids[-PROMPT_END:]).rstrip().endswith(marks.think)
        splitter = AnswerSplitter(
            self._parser,
            request.tools if request.calls_tools else (),
            reasons=request.constraint is None,
            opening=marks.think if marks is not None and is_opened and request.constraint is None else "",
            most_calls=1 if request.one_call else None,
        )
        head = Answer(number=number, id=f"{self._name}-{number}", created=int(time.time()), text="", prompt_tokens=len(prompt_ids))
        return LiveAnswer(head, splitter, decode=codec.decode, end_ids=codec.end_token_ids, stops=request.stop, wake=exchange.wake)

    def _shown(self, live: LiveAnswer, request: ChatRequest, sample: Sample) -> tuple[Answer, str]:
        """The answer as its client sees it, and the text without what ended it."""
        generation = sample.generation
        token_ids, cut = generation.token_ids.tolist(), generation.finish_reason is FinishReason.LENGTH
        raw = self._codec.decode_action(token_ids)
        raw, stopped_by = (raw, "") if cut else cut_at_stop(raw, request.stop)
        parts = live.end(token_ids if request.stream else [], raw)
        names = enumerate(parts.calls)
        answer = replace(
            live.head,
            text=parts.text,
            reasoning=parts.reasoning,
            calls=tuple(Call(id=call_id(live.head.number, place), name=name, arguments=args) for place, (name, args) in names),
            cut=cut,
            stopped_by=stopped_by,
            cached_tokens=generation.cached_tokens,
            completion_tokens=len(token_ids),
        )
        return answer, raw


@contextmanager
def _reading() -> Iterator[None]:
    """Refuse what is nested so deeply that it cannot be read to the end."""
    try:
        yield
    except RecursionError as error:
        raise ApiError(400, "the request has objects within objects, more deeply than can be read", code="invalid_value") from error


def _cannot(request: ChatRequest, problem: str) -> ApiError:
    """The error for a form of the answer that cannot be had."""
    field = request.constraint.field if request.constraint is not None else ""
    return ApiError(400, f"{field}: cannot be honoured: {problem}", field, "unsupported_value")


DIGITS = 9
"""Digits of the number of an answer at most."""


def answer_number(name: str, session: str) -> int | None:
    """Number of the answer that has this id in some dialect, if it is one of the session's."""
    found, _, number = name.rpartition("-")
    is_own = found == session or found.endswith(("-" + session, "_" + session))
    return int(number) if is_own and number.isdecimal() and len(number) <= DIGITS else None


def rewards_by_answer(rewards: Mapping[str, float], session: str) -> tuple[dict[int, float], dict[str, float]]:
    """Rewards by number of an answer, and those whose names are no ids of answers."""
    numbers = {name: answer_number(name, session) for name in rewards}
    by_answer = {number: rewards[name] for name, number in numbers.items() if number is not None}
    return by_answer, {name: rewards[name] for name, number in numbers.items() if number is None}

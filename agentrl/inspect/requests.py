"""Recorded requests of black-box agents once more through the endpoint, offline: without the agent, the server and the model."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from agentrl.core.differences import Difference, Tokens, TurnValues, first_difference
from agentrl.core.errors import EngineError, StructureError
from agentrl.core.protocols import EngineLimits, GenerationRequest
from agentrl.core.serving import ApiError
from agentrl.core.types import FinishReason, Generation
from agentrl.rollout.chat import ChatCodec
from agentrl.rollout.endpoint.request_log import recorded_requests, turn_rows
from agentrl.rollout.endpoint.session import EndpointSession
from agentrl.rollout.episode_plan import EpisodePlan
from agentrl.rollout.observers import SamplerEngine, written_turn
from agentrl.rollout.recorder import Recorder
from agentrl.rollout.records import recorded_limits

Row: TypeAlias = Mapping[str, Any]

FAILURES: Mapping[str, type[EngineError]] = {"engine_error": EngineError, "unsupported_value": StructureError}
"""Errors of the engine by the code of the refusal that they became."""


class HeldEngine(SamplerEngine):
    """An engine whose requests wait, by number, until they are answered from outside."""

    def __init__(self, limits: EngineLimits) -> None:
        ends = limits.end_token_ids
        super().__init__(self._wait, max_model_len=limits.max_model_len, end_token_ids=ends, keeps_structure=True)
        self.waiting: dict[int, asyncio.Future[Generation]] = {}
        self.asked = asyncio.Event()  # set when one more waits

    async def _wait(self, request: GenerationRequest) -> Generation:
        number = int(request.request_id.rpartition("-")[2])
        answer: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self.waiting[number] = answer
        self.asked.set()
        return await answer


class RequestReplay:
    """The requests of one log driven through a fresh graph, in the order in which graph and engine saw them."""

    def __init__(self, log: Row, *, codec: ChatCodec, settings: EpisodePlan) -> None:
        self._rows: Sequence[Row] = log["requests"]
        self._requests = recorded_requests(log)
        limits = recorded_limits(log)
        if limits is None:
            raise ValueError("the log does not say how long a context of the engine may be")
        self._engine = HeldEngine(limits)
        name = str(log["episode_id"])
        self._recorder = Recorder(name, engine=self._engine, codec=codec, settings=settings, seed_of=lambda number: None)
        self.session = EndpointSession(self._recorder, parser=codec.parser, max_requests=max(1, len(self._rows)))
        self.refused: dict[int, str] = {}  # requests that did not begin, with what they were told

    async def run(self) -> None:
        """Drive every request, and end the episode; consumes the log, waits for nothing but the graph."""
        events = [(int(row["placed"]), number, "placed") for number, row in enumerate(self._rows) if "placed" in row]
        events += [(int(row["sampled"]), number, "sampled") for number, row in enumerate(self._rows) if "sampled" in row]
        for _, number, kind in sorted(events):
            if kind == "sampled":
                await self._answer(number)
            elif not await self._begin(number):
                break
        left = {exchange.task for exchange in self.session.exchanges if not exchange.task.done()}
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left)
        await self.session.end()

    def outcome(self, number: int) -> str:
        """Return how a request ended this time, as the log says it."""
        exchanges = self.session.exchanges
        return exchanges[number].outcome if number < len(exchanges) else self.refused.get(number, "unanswered")

    def turns(self) -> list[dict[str, Any]]:
        """Every turn with its place, as the log has them."""
        return turn_rows(self._recorder.contexts)

    async def _begin(self, number: int) -> bool:
        """Begin a request, after those that were dropped before the graph saw them; returns False if it was refused at once.

        Waits until the request is with the engine or has failed.
        """
        self._engine.asked.clear()
        while len(self.session.exchanges) <= number:
            place = len(self.session.exchanges)
            try:
                exchange = self.session.begin(str(place).encode(), self._requests[place], str(self._rows[place]["branch"]))
            except ApiError as problem:
                self.refused[place] = problem.reason
                return False
            exchange.clients = 1
            if place < number:
                exchange.task.cancel()
        exchange = self.session.exchanges[number]
        asked = asyncio.create_task(self._engine.asked.wait())
        await asyncio.wait({exchange.task, asked}, return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        error = FAILURES.get(self._rows[number]["outcome"].partition(" ")[2])
        if error is not None and exchange.sample in self._engine.waiting:
            self._engine.waiting[exchange.sample].set_exception(error("the engine refused this when it was recorded"))
            await asyncio.wait({exchange.task})
        return True

    async def _answer(self, number: int) -> None:
        """Give a request the tokens that were sampled for it, unless it was refused this time."""
        row, exchange = self._rows[number], self.session.exchanges[number]
        if exchange.task.done() or exchange.sample is None:
            return
        generation = written_turn(row["token_ids"], len(row["token_ids"]))
        generation = replace(generation, finish_reason=FinishReason(row["finish_reason"]))
        exchange.begun = bool(row.get("begun"))
        self._engine.waiting[exchange.sample].set_result(generation)
        await asyncio.wait({exchange.task})
        if row["delivered"] and exchange.answered:
            self.session.deliver(exchange)


async def replay_requests(log: Row, *, codec: ChatCodec, settings: EpisodePlan) -> Difference | None:
    """Drive the requests of a log again, and return the first difference; `None` if prompts, branches, masks and rows are the same.

    Raises:
        KeyError, TypeError, ValueError, IndexError: If the log lacks something, or holds something else than was written.
    """
    replay = RequestReplay(log, codec=codec, settings=settings)
    await replay.run()
    numbers = {row["sample"]: number for number, row in enumerate(log["requests"]) if "sample" in row}
    now_numbers = {exchange.sample: number for number, exchange in enumerate(replay.session.exchanges) if exchange.sample is not None}
    then = {numbers[turn["number"]]: turn for turn in log["turns"]}
    now = {now_numbers[turn["number"]]: turn for turn in replay.turns()}
    expected = [_values(then.get(number), row["outcome"]) for number, row in enumerate(log["requests"])]
    got = [_values(now.get(number), replay.outcome(number)) for number in range(len(expected))]
    difference = first_difference(expected, got)
    if difference is not None and difference.what == "prompt":
        return replace(difference, expected=codec.decode(difference.expected_ids), got=codec.decode(difference.got_ids))
    return difference


def _values(turn: Row | None, outcome: str) -> TurnValues:
    """Values of one request: its place among the branches, its prompt, whether it is trained, and its answer."""
    if turn is None:
        return {"branch": "no turn", "answer": outcome}
    why = f", opened because of {turn['branch_reason']!r}" if turn["branch_reason"] else ""
    return {
        "branch": f"branch {turn['context'] + 1}, turn {turn['turn'] + 1}{why}",
        "prompt": Tokens(tuple(turn["prompt_ids"])),
        "mask": f"masked: {turn['masked']}" if turn["masked"] else "trained",
        "answer": outcome,
    }

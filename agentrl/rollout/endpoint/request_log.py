"""Log of the requests of one episode: enough to drive them through the endpoint again without the agent and without a model."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from agentrl.core.protocols import EngineLimits
from agentrl.rollout.endpoint.neutral import ChatRequest, Constraint, EchoedMessage
from agentrl.rollout.recorder import Context, Sample
from agentrl.rollout.records import limits_record

APART = ("messages", "tools", "options")
"""Fields of a request that are kept in tables, or, as `options`, only needed to render its answer."""


class RequestLog:
    """Keeps each request as it came, and what was sampled for it.

    A message that many requests repeat is kept once. Headers, and with them keys, never get here.
    """

    def __init__(self) -> None:
        self._start_s = time.perf_counter()
        self._messages, self._tools = _Table(), _Table()
        self._rows: list[dict[str, Any]] = []
        self._events = 0

    def came(self, request: ChatRequest, branch: str) -> None:
        """Keep a request, before what the endpoint completes in it."""
        plain = {one.name: getattr(request, one.name) for one in fields(ChatRequest) if one.name not in APART}
        defaults = {one.name: one.default for one in fields(ChatRequest)}
        self._rows.append(
            {
                "came_s": round(time.perf_counter() - self._start_s, 4),
                "branch": branch,
                "messages": [self._messages.number(message) for message in request.messages],
                "tools": [self._tools.number(tool) for tool in request.tools],
                **{name: _plain(value) for name, value in plain.items() if value != defaults[name]},
            }
        )

    def placed(self, number: int) -> None:
        """Note that the graph looks for the place of a request now."""
        self._rows[number]["placed"] = self._event()

    def sampled(self, number: int, sample: Sample) -> None:
        """Note what the engine sampled for a request, which the graph gets now."""
        generation = sample.generation
        self._rows[number].update(
            sampled=self._event(),
            sample=sample.number,
            token_ids=generation.token_ids.tolist(),
            finish_reason=str(generation.finish_reason),
        )

    def record(self, ends: Iterable[Mapping[str, Any]], contexts: Sequence[Context], limits: EngineLimits) -> dict[str, Any]:
        """The log in JSON's own types, with the end of every request; token ids of turns are those of their requests, by number."""
        return {
            "engine": limits_record(limits),
            "messages": self._messages.items,
            "tools": self._tools.items,
            "requests": [{**row, **end} for row, end in zip(self._rows, ends, strict=True)],
            "turns": turn_rows(contexts),
        }

    def _event(self) -> int:
        self._events += 1
        return self._events


class _Table:
    """Values that are kept once, by number."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        self._numbers: dict[str, int] = {}

    def number(self, value: Any) -> int:
        found = self._numbers.setdefault(json.dumps(value), len(self.items))
        if found == len(self.items):
            self.items.append(value)
        return found


def _plain(value: Any) -> Any:
    return asdict(value) if isinstance(value, Constraint) else value


def turn_rows(contexts: Sequence[Context]) -> list[dict[str, Any]]:
    """Every turn with its place: what it adds to which context, why that was opened, and why it is not trained."""
    return [
        {
            "number": turn.number,
            "context": place,
            "turn": index,
            "prompt_ids": turn.prompt_ids.tolist(),
            "fresh": turn.fresh,
            "branch_reason": turn.branch_reason,
            "masked": turn.masked,
        }
        for place, context in enumerate(contexts)
        for index, turn in enumerate(context.turns)
    ]


def recorded_requests(log: Mapping[str, Any]) -> list[ChatRequest]:
    """The requests of a log.

    Raises:
        KeyError, TypeError, ValueError, IndexError: If the log lacks something, or holds something else than was written.
    """
    names = [one.name for one in fields(ChatRequest) if one.name not in APART]
    requests = list[ChatRequest]()
    for row in log["requests"]:
        plain = {name: row[name] for name in names if name in row}
        plain["stop"] = tuple(plain.get("stop", ()))
        plain["constraint"] = Constraint(**plain["constraint"]) if "constraint" in plain else None
        messages: list[EchoedMessage] = [log["messages"][number] for number in row["messages"]]
        requests.append(ChatRequest(messages=messages, tools=[log["tools"][number] for number in row["tools"]], **plain))
    return requests

"""One request of an episode for an answer, and what becomes of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from agentrl.core.serving import ApiError
from agentrl.rollout.endpoint.live import LiveAnswer
from agentrl.rollout.endpoint.neutral import Answer, ChatRequest
from agentrl.rollout.recorder import Context


@dataclass(slots=True, eq=False)
class Exchange:
    """One request for an answer, of one client or of several that sent the same."""

    digest: bytes  # of path, branch and body
    request: ChatRequest
    branch: str  # name of the part of the agent that asked
    task: asyncio.Task[Answer]
    key: str = ""  # idempotency key of the request; "" without one
    clients: int = 0  # that wait for the answer
    dropped: bool = False  # no client waits, and none may join any more
    sample: int | None = None  # number of its request to the engine, once there is one
    live: LiveAnswer | None = None  # the answer while it is sampled, if it is streamed
    begun: bool = False  # a client got the beginning of the answer at least
    delivered: bool = False  # a client got the whole answer
    place: tuple[Context, int] | None = None  # context of the answer, and its number among the turns there; `None` if it is not trained
    listeners: set[Callable[[], object]] = field(default_factory=set)  # called when there are new tokens

    def wake(self) -> None:
        """Tell the clients of new tokens."""
        for listener in self.listeners:
            listener()

    @property
    def answered(self) -> bool:
        """True if there is an answer."""
        return self.outcome == "answered"

    @property
    def outcome(self) -> str:
        """End of the request: ``answered``, ``unanswered``, or the status and the code of its refusal."""
        if not self.task.done() or self.task.cancelled():
            return "unanswered"
        error = self.task.exception()
        if error is None:
            return "answered"
        return error.reason if isinstance(error, ApiError) else type(error).__name__

    def end(self) -> dict[str, Any]:
        """The end of the request in JSON's own types."""
        return {"outcome": self.outcome, "delivered": self.delivered, **({"begun": True} if self.begun else {})}

    def is_for(self, retry: int | None, key: str) -> bool:
        """Return True if a request that is the same gets this answer, by the number of its earlier tries and its idempotency key."""
        if not self.task.done():
            is_left = not self.clients and not self.dropped
            return retry != 0 and not self.branch and (is_left or (key != "" and key == self.key))
        return self.answered and not self.delivered and not self.clients

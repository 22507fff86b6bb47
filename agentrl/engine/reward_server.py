"""A reward model behind HTTP, in the form that ``--remote-rm-url`` speaks, here and in OpenRLHF."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

from agentrl.core.errors import RewardError
from agentrl.core.scoring import Scorer, ScoreRequest
from agentrl.core.serving import ApiError, Receive, Scope, Send, json_object, read_body, send_json

MAX_BODY = 64 * 2**20
"""Size of a request's body at most, bytes."""
RETRY_AFTER_S = 1
"""Seconds that a client is asked to wait when too many texts are waiting already."""


class RewardApp:
    """An ASGI application: ``POST`` to any path with ``{"query", "prompts", "labels"}`` gives ``{"rewards", "scores", "extra_logs"}``.

    ``GET`` gives the model's name and the counts so far. A request that would leave more than `max_pending` texts waiting gets 429 and
    ``Retry-After``, which `agentrl.env.rewards.server` obeys; a single request is taken whatever its size if nothing waits. A text that
    the model cannot score gives 422, so that the client asks for the others alone.
    """

    def __init__(self, scorer: Scorer, *, model: str, max_pending: int) -> None:
        self._scorer, self._model, self._max_pending = scorer, model, max_pending
        self._pending = 0
        self.num_scored = self.num_refused = self.num_failed = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        try:
            if scope["method"] in ("GET", "HEAD"):
                await send_json(send, 200, self.status())
                return
            if scope["method"] != "POST":
                raise ApiError(405, f"there is no {scope['method']}; POST a request, or GET the counts")
            requests = _requests(json_object(await read_body(receive, MAX_BODY)))
            if self._pending and self._pending + len(requests) > self._max_pending:
                raise ApiError(429, f"{self._pending} texts are waiting (--max-pending {self._max_pending}); try again")
            await send_json(send, 200, await self._answer(requests))
        except ApiError as refused:
            self.num_refused += 1
            headers = {"retry-after": str(RETRY_AFTER_S)} if refused.status == 429 else {}
            await send_json(send, refused.status, {"error": str(refused)}, headers)
        except ConnectionError:
            return  # the client has left
        except RewardError as error:
            self.num_failed += 1
            await send_json(send, 422, {"error": str(error)})

    def status(self) -> dict[str, Any]:
        """Return what ``GET`` answers."""
        counts = {"scored": self.num_scored, "refused": self.num_refused, "failed": self.num_failed}
        return {"model": self._model, "pending": self._pending, **counts}

    async def _answer(self, requests: Sequence[ScoreRequest]) -> dict[str, Any]:
        self._pending += len(requests)
        try:
            answers = await asyncio.gather(*map(self._scorer.score, requests))
        finally:
            self._pending -= len(requests)
        self.num_scored += len(requests)
        rewards = [math.fsum(answer.values) / len(answer.values) for answer in answers]
        # The logistic function in a form that does not overflow for large negative rewards.
        scores = [0.5 * (1.0 + math.tanh(0.5 * reward)) for reward in rewards]
        return {"rewards": rewards, "scores": scores, "extra_logs": {"cut": [float(answer.was_cut) for answer in answers]}}


def _requests(value: dict[str, Any]) -> list[ScoreRequest]:
    """The texts of a request: ``query`` is a text or a list of them, ``prompts`` says where each answer begins."""
    given = value.get("query")
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
        raise ApiError(400, "query must be a text or a list of texts, at least one, none of them empty")
    prompts = value.get("prompts") or [""] * len(texts)
    prompts = [prompts] if isinstance(prompts, str) else prompts
    if not isinstance(prompts, list) or len(prompts) != len(texts):
        raise ApiError(400, f"prompts must have {len(texts)} entries, one per query")
    pairs = list(zip(texts, prompts, strict=True))
    begins = [len(prompt) if isinstance(prompt, str) and text.startswith(prompt) else 0 for text, prompt in pairs]
    return [ScoreRequest(text=text, spans=((begin, len(text)),)) for text, begin in zip(texts, begins, strict=True)]

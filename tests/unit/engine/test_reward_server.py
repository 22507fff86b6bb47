"""The HTTP form of a reward model, asked by our own client for ``--remote-rm-url``."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from agentrl.core.errors import RewardError
from agentrl.core.scoring import ScoreAnswer, ScoreRequest, ScorerFacts
from agentrl.core.serving import LoopbackServer
from agentrl.engine.reward_server import RewardApp
from tests.unit.env.rewards.test_server import env, group

pytestmark = pytest.mark.anyio


class Watched(RewardApp):
    """Says when a request was refused for the second time."""

    def __init__(self, scorer: "Answers", max_pending: int) -> None:
        super().__init__(scorer, model="rm", max_pending=max_pending)
        self.refused = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await super().__call__(scope, receive, send)
        if self.num_refused > 1:
            self.refused.set()


class Answers:
    """A scorer that pays the length of the answer behind the prompt, and fails for "bad"; it can be held."""

    def __init__(self) -> None:
        self.requests: list[ScoreRequest] = []
        self.free, self.asked = asyncio.Event(), asyncio.Semaphore(0)
        self.free.set()

    async def start(self) -> None:
        """Nothing to load."""

    async def facts(self) -> ScorerFacts:
        return ScorerFacts()

    async def score(self, request: ScoreRequest) -> ScoreAnswer:
        self.requests.append(request)
        self.asked.release()
        await self.free.wait()
        ((begin, end),) = request.spans
        if request.text[begin:end] == "bad":
            raise RewardError("rm: no finite score")
        return ScoreAnswer((float(end - begin),))

    async def close(self) -> None:
        """Nothing to close."""


@asynccontextmanager
async def served(scorer: Answers, max_pending: int = 64) -> AsyncIterator[tuple[str, Watched]]:
    app = Watched(scorer, max_pending)
    server = LoopbackServer(app, name="test")
    try:
        yield await server.start(), app
    finally:
        scorer.free.set()
        await server.close()


async def test_our_client_gets_the_rewards_of_its_answers() -> None:
    async with served(Answers()) as (url, app):
        found = await group(env(f"{url}/get_reward"), "three", "two", "one")
        assert [trajectory.reward for trajectory in found] == [5.0, 5.0, 5.0]  # each answered "three"
        assert app.status() == {"model": "rm", "pending": 0, "scored": 3, "refused": 0, "failed": 0}


async def test_one_text_that_cannot_be_scored_gives_422_and_the_others_a_number() -> None:
    async with served(Answers()) as (url, app), httpx.AsyncClient() as client:
        reply = await client.post(url, json={"query": ["Q: ab", "Q: bad"], "prompts": ["Q: ", "Q: "]})
        assert (reply.status_code, reply.json()) == (422, {"error": "rm: no finite score"})
        alone = await client.post(url, json={"query": "Q: ab", "prompts": "Q: "})
        assert alone.json()["rewards"] == [2.0]
        assert alone.json()["scores"] == [pytest.approx(0.8807970779778823)]  # the logistic function of 2
        assert app.num_failed == 1


async def test_too_many_texts_are_told_to_wait_and_the_client_does() -> None:
    scorer = Answers()
    async with served(scorer, max_pending=2) as (url, app), httpx.AsyncClient() as client:
        scorer.free.clear()
        first = asyncio.create_task(client.post(url, json={"query": ["a", "b", "c"]}))  # too many, but nothing waits
        for _ in "abc":
            await scorer.asked.acquire()
        refused = await client.post(url, json={"query": ["d"]})
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        patient = asyncio.create_task(group(env(url), "three"))
        await app.refused.wait()
        scorer.free.set()
        assert (await first).json()["rewards"] == [1.0, 1.0, 1.0]
        (trajectory,) = await patient
        assert trajectory.reward == 5.0
        assert app.num_refused >= 2


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b"no json", "not JSON"),
        (b"[]", "not a JSON object"),
        (b'{"query": []}', "at least one"),
        (b'{"query": ["a", 3]}', "list of texts"),
        (b'{"query": ["a"], "prompts": ["b", "c"]}', "1 entries, one per query"),
    ],
)
async def test_a_request_that_cannot_be_read_is_refused_with_the_reason(body: bytes, problem: str) -> None:
    async with served(Answers()) as (url, _), httpx.AsyncClient() as client:
        reply = await client.post(url, content=body)
        assert reply.status_code == 400
        assert problem in reply.json()["error"]

"""An engine shared by several rollout workers: the same answers, failures and counters as from the engine itself."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from agentrl.core.errors import AgentRLError, ContextLengthError, EngineDeadError, EngineError
from agentrl.core.protocols import EngineLimits, GenerationRequest, WeightUpdate
from agentrl.core.types import FinishReason, Generation, Sampling, ints
from agentrl.engine.shared import Answers, EngineHost, Requests, SharedEngine
from tests.scripted_engine import ScriptedEngine

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def request(name: str, prompt: Sequence[int] = (3, 4), max_tokens: int = 6) -> GenerationRequest:
    return GenerationRequest(request_id=name, prompt_ids=ints(list(prompt)), sampling=Sampling(max_tokens=max_tokens))


class Counted:
    """A way to a host on which everything is pickled, as between processes."""

    def __init__(self, host: EngineHost) -> None:
        self.host, self.bundles, self.down = host, list[Requests](), ""

    async def start(self) -> EngineLimits:
        return await self.host.start()

    async def submit(self, client: str, requests: Requests) -> None:
        self.check()
        self.bundles.append(requests)
        await asyncio.sleep(0.001)
        await self.host.submit(client, pickle.loads(pickle.dumps(requests)))

    async def collect(self, client: str, wait_s: float) -> Answers:
        answers: Answers = pickle.loads(pickle.dumps(await self.host.collect(client, wait_s)))
        self.check()
        return answers

    async def leave(self, client: str) -> None:
        await self.host.leave(client)

    async def load_weights(self, update: WeightUpdate) -> int:
        return await self.host.load_weights(update)

    def check(self) -> None:
        if self.down:
            raise EngineDeadError(self.down)


@asynccontextmanager
async def sharing(engine: ScriptedEngine, workers: int = 2) -> AsyncIterator[tuple[list[SharedEngine], Counted]]:
    line = Counted(EngineHost(engine))
    shared = [SharedEngine(line, f"worker-{number}") for number in range(workers)]
    await asyncio.gather(*(each.start() for each in shared))
    try:
        yield shared, line
    finally:
        for each in shared:
            await each.close()
        await line.host.close()


async def test_answers_are_those_of_the_engine_and_go_to_who_asked() -> None:
    engine = ScriptedEngine(answer=lambda asked: [len(asked.prompt_ids), 9, 1], delay=lambda asked: 0.002 * len(asked.prompt_ids))
    async with sharing(engine) as (shared, line):
        assert [(each.max_model_len, each.end_token_ids) for each in shared] == [(256, (1,))] * 2
        asked = [request(f"{worker}-{length}", range(3, 3 + length)) for worker in range(2) for length in range(1, 9)]
        found = await asyncio.gather(*(shared[index // 8].generate(each) for index, each in enumerate(asked)))
        for each, generation in zip(asked, found, strict=True):
            alone = await engine.generate(each)
            assert generation.token_ids.tolist() == alone.token_ids.tolist() == [len(each.prompt_ids), 9, 1]
            assert generation.logprobs.tolist() == alone.logprobs.tolist()
            assert generation.finish_reason is FinishReason.STOP
        assert len(line.bundles) == 2  # requests of one turn of the event loop go together


async def test_tokens_are_told_to_who_asked_as_they_are_sampled() -> None:
    engine = ScriptedEngine(answer=lambda asked: [*range(10, 10 + len(asked.prompt_ids)), 1], step_s=0.005)
    async with sharing(engine) as (shared, _):
        told: list[list[list[int]]] = [[], []]
        asked = [replace(request(f"{worker}", range(3, 9)), on_tokens=heard.append) for worker, heard in enumerate(told)]
        found = await asyncio.gather(
            *(each.generate(one) for each, one in zip(shared, asked, strict=True)), shared[0].generate(request("c"))
        )
        for heard, generation in zip(told, found, strict=False):
            assert len(heard) > 2
            assert [token for tokens in heard for token in tokens] == generation.token_ids.tolist()


async def test_new_weights_stamp_the_tokens_after_them() -> None:
    async with sharing(ScriptedEngine()) as (shared, _):
        assert set((await shared[0].generate(request("a"))).versions.tolist()) == {0}
        assert await shared[1].load_weights(WeightUpdate(version=3, transport="scripted")) == 3
        assert set((await shared[0].generate(request("b"))).versions.tolist()) == {3}


@pytest.mark.parametrize(
    ("failure", "raised", "says"),
    [
        (EngineError("no"), EngineError, "no"),
        (EngineDeadError("gone"), EngineDeadError, "gone"),
        (ZeroDivisionError("a bug"), EngineError, "request a failed: ZeroDivisionError: a bug"),
    ],
)
async def test_failures_keep_their_type(failure: BaseException, raised: type[AgentRLError], says: str) -> None:
    async with sharing(ScriptedEngine(answer=lambda asked: failure)) as (shared, _):
        with pytest.raises(raised, match=says) as caught:
            await shared[0].generate(request("a"))
        assert type(caught.value) is raised
        with pytest.raises(ContextLengthError):
            await shared[1].generate(request("b", range(3, 300)))


async def test_a_cancelled_request_leaves_the_engine_and_an_aborted_one_returns_its_tokens() -> None:
    engine = ScriptedEngine(delay=lambda asked: 60.0)
    async with sharing(engine) as (shared, line):
        cancelled, aborted = (asyncio.create_task(shared[0].generate(request(name))) for name in ("cancelled", "aborted"))
        while len(engine.requests) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        cancelled.cancel()
        await asyncio.wait([cancelled])
        await shared[0].abort("aborted")
        assert (await aborted).finish_reason is FinishReason.ABORTED
        early = asyncio.create_task(shared[0].generate(request("early")))
        await asyncio.sleep(0)
        await shared[0].abort("early")  # before it was sent
        assert len((await early).token_ids) == 3
        never = asyncio.create_task(shared[0].generate(request("never")))
        await asyncio.sleep(0)
        never.cancel()
        await asyncio.wait([never])
        assert not engine._aborted  # nothing is under way
        assert {name for bundle in line.bundles for name in bundle.dropped} == {"cancelled"}
        assert "never" not in {each.request_id for each in engine.requests}


async def test_the_counters_of_the_engine_arrive_and_say_why_it_cannot_be_used() -> None:
    engine = ScriptedEngine()
    async with sharing(engine) as (shared, _):
        await shared[0].generate(request("a", max_tokens=6))
        assert shared[0].stats().tokens == 6
        engine.fault = "its cache is broken"
        while not shared[1].stats().fault:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert shared[1].stats().fault == "its cache is broken"


async def test_when_the_way_is_cut_every_request_fails_at_once() -> None:
    engine = ScriptedEngine(delay=lambda asked: 0.05)
    async with sharing(engine) as (shared, line):
        waiting = [asyncio.create_task(shared[0].generate(request(f"{n}"))) for n in range(3)]
        while len(engine.requests) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        line.down = "its process is gone"
        for each in waiting:
            with pytest.raises(EngineDeadError, match="its process is gone"):
                await each
        assert shared[0].stats().fault == "its process is gone"
        with pytest.raises(EngineDeadError, match="its process is gone"):
            await shared[0].generate(request("late"))


async def test_who_left_has_no_requests_and_cannot_come_back() -> None:
    engine = ScriptedEngine(delay=lambda asked: 60.0)
    async with sharing(engine, 1) as (shared, line):
        waiting = asyncio.create_task(shared[0].generate(request("a")))
        while not engine._aborted:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        async with asyncio.timeout(30):  # its requests would take a minute
            await line.leave("worker-0")
        assert not engine._aborted
        with pytest.raises(EngineDeadError, match="worker-0 has left"):
            await waiting


async def test_an_engine_that_does_not_start_is_asked_once() -> None:
    class Broken(ScriptedEngine):
        async def start(self) -> None:
            self.reported = lambda version: version
            self.version += 1
            raise EngineError("no memory")

    engine = Broken()
    line = Counted(EngineHost(engine))
    started = await asyncio.gather(*(SharedEngine(line, f"{n}").start() for n in range(3)), return_exceptions=True)
    assert [str(error) for error in started] == ["no memory"] * 3
    assert engine.version == 1


async def test_a_generation_survives_pickling_whole() -> None:
    async with sharing(ScriptedEngine()) as (shared, _):
        found = await shared[0].generate(request("a"))
    assert isinstance(found, Generation)
    assert found.token_ids.dtype == ints([1]).dtype

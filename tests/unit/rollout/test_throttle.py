"""How many episodes are under way at once: the limit, the order in which groups begin, and that none waits forever."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

import pytest

from agentrl import Task
from agentrl.core.protocols import EngineLoad, EngineStats, LoadSums
from agentrl.core.types import EvalSampling, GroupRequest
from agentrl.rollout.worker import TICK_S, AdaptiveLimit, Throttle

pytestmark = pytest.mark.anyio

IDLE, FULL = EngineLoad(running=8, kv_usage=0.5), EngineLoad(running=8, waiting=5, kv_usage=0.5)


def group_request(group_id: int, n_samples_per_prompt: int = 4, **changes: object) -> GroupRequest:
    return GroupRequest(group_id=group_id, task=Task("a"), n_samples_per_prompt=n_samples_per_prompt, version=0, **changes)  # type: ignore[arg-type]


@dataclass
class Scene:
    """A throttle, what its engine says, and who began in which order."""

    fixed: int = 0
    start: int = 8
    load: EngineLoad = IDLE
    began: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.throttle = Throttle(self.fixed, self.start, lambda: EngineStats(load=self.load))

    async def ask(self, *group_requests: GroupRequest) -> list[asyncio.Task[None]]:
        async def enter(group_request: GroupRequest) -> None:
            await self.throttle.enter(group_request)
            self.began.append(group_request.group_id)

        tasks = [asyncio.create_task(enter(group_request)) for group_request in group_requests]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return tasks

    async def leave(self, episodes: int) -> None:
        self.throttle.leave(episodes)
        await asyncio.sleep(0)
        await asyncio.sleep(0)


async def test_groups_begin_whole_and_in_the_order_of_admission() -> None:
    scene = Scene(fixed=8)
    await scene.ask(group_request(0), group_request(1))
    await scene.ask(group_request(7), group_request(5), group_request(9, eval_sampling=EvalSampling(name="eval", seed=1)), group_request(6))
    assert scene.began == [0, 1]
    await scene.leave(3)
    assert scene.began == [0, 1]
    await scene.leave(1)
    assert scene.began == [0, 1, 9]
    await scene.leave(4)
    assert scene.began == [0, 1, 9, 5]
    await scene.leave(8)
    assert scene.began == [0, 1, 9, 5, 6, 7]
    assert scene.throttle.live == 8


async def test_a_group_larger_than_the_limit_begins_alone() -> None:
    scene = Scene(fixed=4)
    await scene.ask(group_request(0), group_request(1, 16), group_request(2))
    assert scene.began == [0]
    await scene.leave(4)
    assert scene.began == [0, 1]
    await scene.leave(15)
    assert scene.began == [0, 1]
    await scene.leave(1)
    assert scene.began == [0, 1, 2]


async def test_a_cancelled_group_keeps_no_room() -> None:
    scene = Scene(fixed=4)
    _, waits, last = await scene.ask(group_request(0), group_request(1), group_request(2))
    waits.cancel()
    await scene.leave(4)
    assert scene.began == [0, 2]
    last.cancel()
    await scene.leave(4)
    _, begins = await scene.ask(group_request(3), group_request(4))
    scene.throttle.leave(4)
    begins.cancel()  # after it was let in and before it knows
    with pytest.raises(asyncio.CancelledError):
        await begins
    assert scene.throttle.live == 0


async def test_the_limit_follows_the_engine_and_the_load_is_summed_up() -> None:
    scene = Scene(start=8, load=replace(FULL, kv_usage=0.25))
    tasks = await scene.ask(*(group_request(i) for i in range(6)))
    await asyncio.sleep(4 * TICK_S)
    assert scene.began == [0, 1]
    assert scene.throttle.limit == 6  # 8 x 0.8, and not again before so many have ended
    scene.load = replace(IDLE, kv_usage=0.25)
    for _ in range(40):
        await asyncio.sleep(TICK_S / 4)
        if len(scene.began) == 6:
            break
    sums = scene.throttle.sums
    assert sums.seconds > 0
    assert sums.kv_usage == pytest.approx(0.25 * sums.seconds)
    assert sums.episodes >= 8 * sums.seconds * 0.99
    for task in tasks:
        task.cancel()
    scene.throttle.close()


async def test_the_sums_have_every_episode_for_as_long_as_it_was_under_way() -> None:
    now_s = [0.0]
    load = EngineLoad(running=4, waiting=2, kv_usage=0.5)
    throttle = Throttle(0, 8, lambda: EngineStats(load=load), clock=lambda: now_s[0])
    await throttle.enter(group_request(0))
    now_s[0] = 2.0
    throttle.leave(1)
    now_s[0] = 5.0
    throttle.leave(3)
    assert throttle.sums == LoadSums(seconds=5.0, kv_usage=2.5, waiting=10.0, episodes=4 * 2.0 + 3 * 3.0)
    now_s[0] = 100.0  # nothing was under way
    await throttle.enter(group_request(1, 2))
    now_s[0] = 101.0
    throttle.leave(2)
    assert throttle.sums == LoadSums(seconds=6.0, kv_usage=3.0, waiting=12.0, episodes=17.0 + 2.0)


def test_much_room_doubles_the_limit_until_there_was_too_much() -> None:
    limit = AdaptiveLimit(limit=10, floor=4)
    limit.observe(IDLE, live=10, held=True)
    assert limit.limit == 20
    limit.observe(IDLE, live=12, held=False)  # nobody waits to begin: no reason to rise
    assert limit.limit == 20
    limit.observe(replace(IDLE, kv_usage=0.8), live=20, held=True)  # neither much nor too much
    assert limit.limit == 20
    limit.observe(replace(IDLE, kv_usage=0.95), live=20, held=True)
    assert limit.limit == 16
    limit.observe(FULL, live=18, held=True)  # has not taken effect
    assert limit.limit == 16
    limit.observe(IDLE, live=16, held=True)
    assert limit.limit == 17
    for _ in range(30):
        limit.observe(FULL, live=limit.limit, held=True)
    assert limit.limit == 4


def test_a_queue_is_long_against_what_is_decoded() -> None:
    limit = AdaptiveLimit(limit=100)
    limit.observe(EngineLoad(running=100, waiting=20), live=100, held=True)
    assert limit.limit == 100
    limit.observe(EngineLoad(running=60, waiting=20), live=100, held=True)
    assert limit.limit == 100  # they may have come just now
    limit.observe(EngineLoad(running=60, waiting=20), live=100, held=True)
    assert limit.limit == 80


def test_a_burst_of_prompts_is_no_overload() -> None:
    limit = AdaptiveLimit(limit=100)
    for _ in range(4):
        limit.observe(EngineLoad(running=60, waiting=40), live=100, held=False)
        limit.observe(EngineLoad(running=100), live=100, held=False)
    assert (limit.limit, limit.pressed) == (100, False)


async def simulate(limited: bool) -> list[float]:
    """60 groups of 4 episodes of 3 turns against an engine that serves 8 requests at once, first come first served."""
    slots, running, waiting = asyncio.Semaphore(8), 0, 0
    ends: list[float] = [0.0] * 60
    clock = asyncio.get_running_loop().time
    begin = clock()
    throttle = Throttle(0, 8 if limited else 10**6, lambda: EngineStats(load=EngineLoad(running=running, waiting=waiting)))

    async def request() -> None:
        nonlocal running, waiting
        waiting += 1
        async with slots:
            waiting, running = waiting - 1, running + 1
            await asyncio.sleep(0.002)
            running -= 1

    async def episode() -> None:
        for _ in range(3):
            await request()
        throttle.leave()

    async def group(number: int) -> None:
        await throttle.enter(group_request(number))
        await asyncio.gather(*(episode() for _ in range(4)))
        ends[number] = clock() - begin

    await asyncio.gather(*(group(number) for number in range(60)))
    throttle.close()
    return ends


async def test_old_groups_end_earlier_and_the_last_no_later() -> None:
    free, limited = await simulate(limited=False), await simulate(limited=True)
    assert sum(limited[:15]) < 0.6 * sum(free[:15])
    assert max(limited) < 1.5 * max(free)

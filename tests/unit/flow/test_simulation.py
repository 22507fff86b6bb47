"""Simulated runs: what is known in closed form, the accounts at scale, and lost engines."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import anyio
import pytest

from agentrl.core.errors import ConfigError
from agentrl.core.protocols import WeightUpdate
from agentrl.core.types import GroupRequest, Task
from tests.benchmarks.flow_cost import BOUND_US, cheapest
from tests.simulated_engine import Decoder, EngineModel, EpisodeShape, SimulatedWorker, World
from tests.simulation import LearnerModel, Plan, constant, episodes_of, lognormal, run_virtual, samples, simulate
from tests.unit.flow.fakes import flow_of

ENGINE = EngineModel(token_s=0.010, token_s_per_sequence=0.001, pause_s=constant(0.2), load_s=constant(0.1))
LEARNER = LearnerModel(step_s=0.5, token_s=0.001, ranks=2, overhead_s=0.1, export_s=constant(0.3))


def plan(**changes: Any) -> Plan:
    flow = {"num_steps": 12, "groups_per_step": 4, "n_samples_per_prompt": 4, "max_staleness": 0, "stall_timeout_s": 1e9}
    flow |= {name: changes.pop(name) for name in list(changes) if name not in Plan.__dataclass_fields__}
    values = {
        "num_engines": 1,
        "engine": ENGINE,
        "learner": LEARNER,
        "episodes": episodes_of(tokens=constant(50), env_s=constant(0.25), reset_s=constant(0.5), turns=2),
    }
    return Plan(settings=flow_of(**flow), **{**values, **changes})  # type: ignore[arg-type]


def ends(model: EngineModel, script: list[tuple[float, float]], pauses: list[tuple[float, bool]] = []) -> tuple[list[float], Decoder]:  # noqa: B006
    """When requests, each a time and its tokens, are answered."""

    async def main() -> tuple[list[float], Decoder]:
        loop, decoder, answered = asyncio.get_running_loop(), Decoder(model), [0.0] * len(script)

        def ask(number: int, tokens: float) -> None:
            decoder.add(tokens, lambda: answered.__setitem__(number, loop.time()), lambda: True)

        for number, (at, tokens) in enumerate(script):
            loop.call_at(at, ask, number, tokens)
        for at, paused in pauses:
            loop.call_at(at, decoder.pause, paused)
        await anyio.sleep(1000.0)
        decoder.advance()
        return answered, decoder

    return run_virtual(main)


def test_sequences_share_the_steps_of_an_engine() -> None:
    model = EngineModel(token_s=1.0, token_s_per_sequence=0.5)  # steps of 1.5 s alone, of 2 s with two
    # Alone for 3 s: 2 tokens. With two from 3 s on: the other's 4 tokens take 8 s. Then alone again for 4 tokens.
    times, decoder = ends(model, [(0.0, 10.0), (3.0, 4.0)])
    assert times == pytest.approx([3.0 + 8.0 + 6.0, 11.0])
    assert (decoder.busy_s, decoder.tokens) == pytest.approx((17.0, 14.0))


def test_sequences_beyond_the_limit_wait_and_a_pause_stops_all() -> None:
    one_at_a_time = EngineModel(token_s=1.0, max_sequences=1)
    assert ends(one_at_a_time, [(0.0, 5.0), (1.0, 2.0), (1.5, 3.0)])[0] == pytest.approx([5.0, 7.0, 10.0])
    times, decoder = ends(one_at_a_time, [(0.0, 5.0), (1.0, 2.0)], [(2.0, True), (12.0, False)])
    assert times == pytest.approx([15.0, 17.0])
    assert (decoder.busy_s, decoder.paused_s) == pytest.approx((7.0, 10.0))


def test_a_synchronous_run_of_constant_durations_has_the_length_that_adds_up() -> None:
    run = simulate(plan())
    generation = 0.5 + 2 * (50 * (0.010 + 16 * 0.001) + 0.25)
    train = 0.5 + 0.001 * (16 * 100) / 2
    assert run.step_s == pytest.approx(generation + train + 0.1 + 0.3 + (0.1 + 0.2))
    assert run.episodes_per_s == pytest.approx(16 / run.step_s)
    assert run.mean("time/train_s") == pytest.approx(train)
    assert run.mean("time/learner_s") == pytest.approx(train + 0.1)
    assert run.mean("publish/pause_s") == pytest.approx(0.2)
    assert run.mean("episode/generate_s") == pytest.approx(2 * 50 * 0.026)
    assert run.mean("idle/generator") == pytest.approx(1 - 2 * 50 * 0.026 / run.step_s)
    assert run.max_staleness == 0


@pytest.mark.parametrize("step_s", [0.2, 8.0])
def test_an_asynchronous_run_of_constant_durations_is_as_fast_as_its_slower_half(step_s: float) -> None:
    engine = EngineModel(token_s=0.01)  # as fast for many sequences as for one
    run = simulate(plan(max_staleness=1, num_steps=40, engine=engine, learner=LearnerModel(step_s=step_s)))
    generation = 0.5 + 2 * (0.5 + 0.25)
    # Two steps' groups are under way at once, so that generation takes half of its time per step.
    assert run.step_s == pytest.approx(max(step_s, (generation + step_s) / 2), rel=0.02)
    assert run.max_staleness == 1


def test_the_same_plan_gives_the_same_run_and_another_seed_another() -> None:
    drawn = plan(episodes=episodes_of(tokens=lognormal(40, 0.7), env_s=samples([0.1, 0.2, 2.0]), turns=2), max_staleness=1, num_engines=2)
    first, again, other = simulate(drawn), simulate(drawn), simulate(replace(drawn, seed=1))
    assert first.steps == again.steps
    assert first.steps != other.steps


def test_more_engines_are_less_crowded() -> None:
    assert [simulate(plan(num_engines=n)).mean("episode/generate_s") for n in (1, 2, 4)] == pytest.approx([2.6, 1.8, 1.4])


def test_filtered_and_failed_groups_are_accounted_for() -> None:
    run = simulate(
        plan(
            num_steps=40,
            pass_rate=0.5,
            failure_rate=0.5,
            advantage_estimator="group_norm",
            max_staleness=1,
            num_engines=3,
            max_failure_rate=1.0,
        )
    )
    counts = run.result.counts
    assert (counts.trained, counts.in_flight) == (160, 0)
    assert 60 < sum(counts.filtered.values()) < 320
    assert sum(counts.dropped.values()) > 10
    assert run.max_staleness <= 1


def test_lost_engines_are_replaced_and_their_groups_run_again() -> None:
    engine = replace(ENGINE, lifetime_s=lambda rng: rng.expovariate(1 / 15.0), restart_s=10.0)
    run = simulate(plan(engine=engine, num_engines=4, num_steps=60, max_staleness=2))
    last = run.steps[-1]
    assert last["engine/restarts"] > 3
    assert last["engine/groups_run_again"] > 3
    assert (run.result.counts.trained, run.result.counts.in_flight) == (240, 0)
    assert run.max_staleness <= 2
    assert run.step_s > simulate(plan(num_engines=4, num_steps=60, max_staleness=2)).step_s


def test_oversampled_groups_save_waiting_for_the_slowest() -> None:
    slow = episodes_of(tokens=constant(50), env_s=lognormal(0.3, 1.5))
    waiting = simulate(plan(episodes=slow, num_steps=40))
    spared = simulate(plan(episodes=slow, num_steps=40, oversample=0.5))
    assert spared.step_s < 0.8 * waiting.step_s
    assert spared.result.counts.dropped == {"oversampled": 80}


def crowd(num_engines: int, groups_per_step: int, **changes: Any) -> Plan:
    return plan(
        num_engines=num_engines,
        groups_per_step=groups_per_step,
        n_samples_per_prompt=8,
        max_staleness=1,
        episodes=episodes_of(tokens=lognormal(100, 0.7), env_s=lognormal(0.3, 1.0), turns=2),
        learner=LearnerModel(step_s=5.0),
        **changes,
    )


def check_crowd(num_engines: int, groups_per_step: int, num_steps: int) -> None:
    """Staleness bound and conservation; the flow itself raises where a group is too old, lost or counted twice."""
    run = simulate(crowd(num_engines, groups_per_step, num_steps=num_steps, pass_rate=0.9))
    counts = run.result.counts
    assert run.peak_episodes == 2 * groups_per_step * 8
    assert run.max_staleness == 1
    assert (counts.trained, counts.in_flight) == (num_steps * groups_per_step, 0)
    assert counts.submitted == counts.trained + sum(counts.filtered.values())


def test_many_engines_keep_the_staleness_bound_and_the_accounts() -> None:
    check_crowd(num_engines=64, groups_per_step=256, num_steps=3)


def test_the_flow_costs_little_processor_time_per_group() -> None:
    assert cheapest(num_workers=64, groups_per_step=256, num_groups=1000) <= BOUND_US


@pytest.mark.slow
def test_a_thousand_engines_with_a_hundred_thousand_episodes() -> None:
    check_crowd(num_engines=1024, groups_per_step=6250, num_steps=4)
    assert cheapest(num_workers=1024, groups_per_step=6250) <= BOUND_US


def test_a_run_without_engines_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_engines"):
        simulate(plan(num_engines=0))
    with pytest.raises(ValueError, match="at least one sample"):
        samples([])


def requests(model: EngineModel, *asked: tuple[float, float, float]) -> tuple[list[float], Decoder]:
    """When requests are answered, each with its tokens, those of its prompt, and those that it holds; all are made at once."""

    async def main() -> tuple[list[float], Decoder]:
        loop, decoder, answered = asyncio.get_running_loop(), Decoder(model), [0.0] * len(asked)
        for number, (tokens, new, context) in enumerate(asked):
            decoder.add(tokens, lambda number=number: answered.__setitem__(number, loop.time()), lambda: True, prompt=new, context=context)  # type: ignore[misc]
        await anyio.sleep(10_000.0)
        decoder.advance()
        return answered, decoder

    return run_virtual(main)


def test_prompts_are_computed_before_the_next_step() -> None:
    # 100 tokens of one prompt and 60 of the other at 0.1 s each are 16 s; then both decode in steps of 1 s.
    times, decoder = requests(EngineModel(token_s=1.0, prefill_token_s=0.1), (5.0, 100.0, 100.0), (8.0, 60.0, 60.0))
    assert times == pytest.approx([21.0, 24.0])
    assert (decoder.prefill_s, decoder.busy_s, decoder.tokens) == pytest.approx((16.0, 24.0, 13.0))


def test_the_latest_sequence_gives_its_room_to_the_others_and_begins_again() -> None:
    # Both hold 10 tokens; after 5 steps the cache of 30 is full. The first goes on alone and ends 15 steps later; the second then has its
    # 15 tokens computed again at 0.1 s each, and decodes its last 15.
    times, decoder = requests(EngineModel(token_s=1.0, prefill_token_s=0.1, kv_tokens=30.0), (20.0, 0.0, 10.0), (20.0, 0.0, 10.0))
    assert times == pytest.approx([20.0, 20.0 + 1.5 + 15.0])
    assert (decoder.preempted, decoder.held) == (1, 0.0)
    # A third one, for which there never was room, waits for the second, which has begun before.
    times, decoder = requests(EngineModel(token_s=1.0, kv_tokens=30.0), (20.0, 0.0, 10.0), (20.0, 0.0, 10.0), (5.0, 0.0, 16.0))
    assert times == pytest.approx([20.0, 35.0, 40.0])


def test_a_request_waits_for_room_in_the_cache_and_one_alone_is_always_taken() -> None:
    times, decoder = requests(EngineModel(token_s=1.0, kv_tokens=30.0), (5.0, 0.0, 20.0), (5.0, 0.0, 20.0), (50.0, 0.0, 20.0))
    assert times == pytest.approx([5.0, 10.0, 60.0])
    assert decoder.preempted == 0


def test_sequences_under_way_are_computed_again_after_a_publication() -> None:
    async def main() -> float:
        loop, decoder, answered = asyncio.get_running_loop(), Decoder(EngineModel(token_s=1.0, prefill_token_s=0.1)), [0.0]
        decoder.add(10.0, lambda: answered.__setitem__(0, loop.time()), lambda: True, context=20.0)
        await anyio.sleep(4.0)
        decoder.recompute()  # of 24 tokens
        await anyio.sleep(100.0)
        return answered[0]

    assert run_virtual(main) == pytest.approx(10.0 + 2.4)


def test_a_group_computes_its_prompt_once_and_a_publication_all_that_is_under_way() -> None:
    async def main() -> tuple[float, float]:
        model = EngineModel(token_s=1.0, prefill_token_s=0.01)
        worker = SimulatedWorker(model, World(lambda rng, count: [EpisodeShape(0.0, ((10.0, 0.0),), 100.0)] * count, 0.0, 0))
        request, loop = GroupRequest(group_id=0, task=Task("?"), n_samples_per_prompt=4, version=0), asyncio.get_running_loop()
        await worker.run_group(request)
        alone_s = loop.time()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(worker.run_group, request)
            await anyio.sleep(5.0)  # 4 tokens of each answer
            await worker.load_weights(WeightUpdate(version=1, transport="shm"))
        return alone_s, loop.time() - alone_s

    assert run_virtual(main) == pytest.approx((1.0 + 10.0, 1.0 + 10.0 + 4 * 104 * 0.01))


def test_publication_grows_with_the_engines_and_prompts_and_caches_slow_a_run_down() -> None:
    base = plan(num_engines=2)
    grown = simulate(replace(base, engine=replace(ENGINE, pause_s_per_engine=0.1))).step_s - simulate(base).step_s
    assert grown == pytest.approx(0.2, abs=0.02)
    four = plan(num_engines=4)
    more = simulate(replace(four, engine=replace(ENGINE, pause_s_per_engine=0.1))).step_s - simulate(four).step_s
    assert more == pytest.approx(0.4, abs=0.02)
    prompted = replace(base, episodes=episodes_of(tokens=constant(50), prompt=constant(200)))
    free = simulate(prompted).step_s
    assert simulate(replace(prompted, engine=replace(ENGINE, prefill_token_s=0.001))).step_s > free + 0.2
    assert simulate(replace(prompted, engine=replace(ENGINE, kv_tokens=600.0))).step_s > free

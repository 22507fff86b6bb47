"""Episodes on the lanes of a vector environment are those of the scalar environment, whatever happens on other lanes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from typing import Any, ClassVar, TypeVar

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from agentrl import ResetState, StepResult, StepState, Task
from agentrl.core.errors import EnvLoadError
from agentrl.suites.gymnasium import GymEnv
from agentrl.suites.gymnasium_vector import GymVectorEnv, info_of, load_gym
from agentrl.suites.load import load_agent

T = TypeVar("T")
Record = list[tuple[Any, ...]]


class Walk(gymnasium.Env[int, int]):
    """A seeded walk that ends at a seeded time; rewards are unique to seed and step."""

    def __init__(self, fail_at: int = -1) -> None:
        self.action_space, self.observation_space = spaces.Discrete(5), spaces.Discrete(2**31)
        self.fail_at, self.now, self.end = fail_at, 0, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.now, self.end = 0, int(self.np_random.integers(2, 7))
        return int(self.np_random.integers(1000)), {"mood": "fresh", "end": self.end}

    def step(self, action: Any) -> Any:
        assert self.now < self.end, "stepped after its end"
        self.now += 1
        if self.now == self.fail_at:
            raise ZeroDivisionError("broken")
        over, cut = self.now == self.end, self.end % 2 == 0
        place = int(self.np_random.integers(1000)) * 10 + int(action)
        return place, float(self.np_random.random()), over and not cut, over and cut, {"now": self.now, "deep": {"place": place}}


class Scalar(GymEnv):
    def make(self) -> Any:
        return Walk()

    def format_observation(self, observation: Any) -> str:
        deep = self.info.get("deep", {})
        return f"{int(observation)} {sorted(self.info)} {self.info.get('now')} {int(deep.get('place', -1))}"


def lanes(mode: AutoresetMode, num_envs: int = 4, kind: Any = SyncVectorEnv, fail_at: int = -1, **more: Any) -> type[GymVectorEnv]:
    made: list[Any] = []

    def make_vector(cls: Any) -> Any:
        made.append(kind([lambda: Walk(fail_at)] * num_envs, autoreset_mode=mode))
        return made[-1]

    return type("Lanes", (GymVectorEnv, Scalar), {"make_vector": classmethod(make_vector), "num_envs": num_envs, "made": made, **more})


async def maybe(value: Any) -> Any:
    return await value if asyncio.iscoroutine(value) else value


async def play(cls: type[GymEnv], seed: int, *, pause_s: float = 0.0, stop_after: int = 99) -> Record:
    """Everything that an episode says, with answers that depend on the seed; some of them name no action."""
    env, answers = cls(), random.Random(seed)
    record: Record = []
    try:
        task = Task("x", seed=seed)
        first = await maybe(env.reset(ResetState(task=task, observation=task.prompt, label=None, seed=seed)))
        record.append((first.observation,))
        while len(record) <= stop_after:
            await asyncio.sleep(pause_s * answers.random())
            result: StepResult = await maybe(env.step(StepState(action_text=answers.choice(["0", "1", "3", "4", "none"]))))
            record.append((result.observation, result.reward, result.terminated, result.truncated, dict(result.info)))
            if result.terminated or result.truncated:
                break
        return record
    finally:
        await maybe(env.close())


def run(main: Coroutine[Any, Any, T], limit_s: float = 30.0) -> T:
    return asyncio.run(asyncio.wait_for(main, limit_s))


async def several(cls: type[GymEnv], seeds: range, **options: Any) -> list[Record]:
    return await asyncio.gather(*(play(cls, seed, **options) for seed in seeds))


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_episodes_are_those_of_the_scalar_environment(mode: AutoresetMode) -> None:
    cls = lanes(mode)

    async def waves() -> list[Record]:
        at_once = await several(cls, range(10), pause_s=0.002)
        return at_once + await several(cls, range(10, 20)) + [await play(cls, seed) for seed in range(20, 26)]

    assert run(waves()) == run(several(Scalar, range(26)))
    assert len(cls.made) == 3  # type: ignore[attr-defined]  # four lanes each, for ten episodes at once


def test_lanes_in_processes() -> None:
    cls = lanes(AutoresetMode.DISABLED, 2, lambda envs, **options: AsyncVectorEnv(envs, context="forkserver", **options))
    assert run(several(cls, range(2))) == run(several(Scalar, range(2)))


def test_toy_text_on_lanes() -> None:
    scalar, vector = (load_agent(f"gym:{name}").load() for name in ("FrozenLake-v1", "FrozenLake-v1?num_envs=3"))
    assert issubclass(vector, GymVectorEnv)
    answer = StepState(action_text="right")

    async def walk(cls: type[GymEnv], seed: int) -> list[Any]:
        env = cls()
        said: list[Any] = [await maybe(env.reset(ResetState(task=Task("x"), seed=seed)))]
        for _ in range(4):
            said.append(await maybe(env.step(answer)))
            if said[-1].terminated:
                break
        await maybe(env.close())
        return said

    async def both() -> tuple[Any, Any]:
        return [await walk(scalar, seed) for seed in range(6)], await asyncio.gather(*(walk(vector, seed) for seed in range(6)))

    expected, found = run(both())
    assert list(found) == expected
    assert "PFFF" in expected[0][0].observation


def test_an_episode_that_leaves_early_holds_nobody_up() -> None:
    cls = lanes(AutoresetMode.DISABLED)

    async def main() -> list[Record]:
        some = asyncio.gather(*(play(cls, seed, stop_after=1) for seed in range(2)))
        return [*await asyncio.gather(play(cls, 2), play(cls, 3)), *await some]

    expected = run(several(Scalar, range(4)))
    assert run(main()) == [expected[2], expected[3], expected[0][:2], expected[1][:2]]


def test_a_straggler_fails_and_the_others_go_on() -> None:
    cls = lanes(AutoresetMode.DISABLED, straggler_s=0.05)

    async def main() -> tuple[Record, Any]:
        slow = asyncio.create_task(play(cls, 0, pause_s=0.6))
        await asyncio.sleep(0.01)
        record = await play(cls, 1)
        return record, await asyncio.gather(slow, return_exceptions=True)

    record, (error,) = run(main())
    assert record == run(several(Scalar, range(1, 2)))[0]
    assert isinstance(error, TimeoutError)
    assert "straggler_s = 0.05" in str(error)


def test_a_cancelled_episode_gives_its_lane_back() -> None:
    cls = lanes(AutoresetMode.NEXT_STEP, 2)

    async def main() -> list[Record]:
        first = [asyncio.create_task(play(cls, seed, pause_s=5)) for seed in range(2)]
        for _ in range(500):
            if cls.made:  # type: ignore[attr-defined]
                break
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        for task in first:
            task.cancel()
        await asyncio.gather(*first, return_exceptions=True)
        return await several(cls, range(2))

    assert run(main()) == run(several(Scalar, range(2)))
    assert len(cls.made) == 1  # type: ignore[attr-defined]


def test_a_failure_ends_all_lanes_and_a_new_environment_takes_over() -> None:
    cls = lanes(AutoresetMode.DISABLED, 2, fail_at=2)

    async def main() -> list[Any]:
        first = await asyncio.gather(play(cls, 0), play(cls, 1), return_exceptions=True)
        return [*first, *await asyncio.gather(play(cls, 2), return_exceptions=True)]

    errors = run(main())
    assert [str(error) for error in errors] == ["the vector environment failed, for all its lanes: ZeroDivisionError: broken"] * 3
    assert len(cls.made) == 2  # type: ignore[attr-defined]


def test_an_environment_that_resets_its_lanes_by_itself_is_refused() -> None:
    class Own(gymnasium.vector.VectorEnv[Any, Any, Any]):
        num_envs: int = 2
        metadata: ClassVar[dict[str, Any]] = {"autoreset_mode": AutoresetMode.NEXT_STEP}

    cls = type("Lanes", (GymVectorEnv,), {"make_vector": classmethod(lambda cls: Own())})
    with pytest.raises(ValueError, match=r"Own resets its lanes by itself .*AutoresetMode\.DISABLED"):
        run(play(cls, 0))


def test_info_of_a_lane() -> None:
    mask = np.array([True, False])
    infos = {"a": np.array([1, 0]), "_a": mask, "b": {"c": np.array([5, 6]), "_c": ~mask}, "_b": ~mask}
    assert [info_of(infos, env_index) for env_index in (0, 1)] == [{"a": 1}, {"b": {"c": 6}}]


@pytest.mark.parametrize(
    "option", ["num_envs=0", "num_envs=1.5", "num_envs=x", "num_envs=2&vectorization_mode=magic", "num_envs=2&nonsense=1"]
)
def test_options_that_do_not_fit_are_refused(option: str) -> None:
    with pytest.raises(EnvLoadError):
        load_gym(f"gym:FrozenLake-v1?{option}")

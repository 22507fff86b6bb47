"""Any gymnasium vector environment as an agent's environment: each episode plays on one lane. Loader of ``gym:ID``."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np

from agentrl.core.errors import EnvLoadError
from agentrl.env.agent import ResetResult, ResetState, StepResult, StepState
from agentrl.env.threads import Threads
from agentrl.suites.gymnasium import PIXELS, SEEDS, SHORTER, TOY_TEXT, GymEnv, too_large
from agentrl.suites.scheme import Scheme
from agentrl.suites.specs import split_spec

if TYPE_CHECKING:
    import gymnasium

CALL_LIMIT_S = 300.0
"""Deadline of one call of a vector environment; after it the vector environment counts as failed."""

Step: TypeAlias = tuple[Any, float, bool, bool, Mapping[str, Any]]
"""Observation, reward, terminated, truncated and info of one lane."""


@dataclass(slots=True, eq=False)
class _Call:
    """A pending call of one episode: a reset with a seed, or a step with an action."""

    value: Any
    future: asyncio.Future[Any]


class SharedEnv:
    """A vector environment and the episodes on its lanes; a batch waits `straggler_s` for an action, then runs without that episode."""

    def __init__(self, env: gymnasium.vector.VectorEnv[Any, Any, Any], straggler_s: float) -> None:
        self.env, self.failed, self._straggler_s = env, False, straggler_s
        self._mode = _autoreset_mode(env)
        self.free = list(range(env.num_envs))
        self._problem: str = ""
        self._playing: set[int] = set()
        self._lost: set[int] = set()
        self._ended: set[int] | None = None
        self._resets: dict[int, _Call] = {}
        self._steps: dict[int, _Call] = {}
        self._served: dict[int, _Call] = {}
        self._waiting_since = 0.0
        self._changed = asyncio.Event()
        self._worker: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[Any] | None = None
        self._threads = Threads(1)

    def view(self, env_index: int) -> Any:
        """Return `GymEnv.env` for the episode on a lane: the lane's environment if it is in this process, else its spaces."""
        envs = getattr(self.env.unwrapped, "envs", None)
        return envs[env_index] if envs else SubEnvSpaces(self.env.single_action_space, self.env.single_observation_space)

    async def reset(self, env_index: int, seed: int) -> tuple[Any, Mapping[str, Any]]:
        """Begin an episode on a lane; return the first observation and its info."""
        self._playing.add(env_index)
        observation, info = await self._submit(self._resets, env_index, seed)
        return observation, info

    async def step(self, env_index: int, action: Any) -> Step:
        """Act on a lane once all other running episodes have chosen an action; `TimeoutError` if they have gone on without this episode."""
        if env_index in self._lost:
            problem = (
                f"the vector environment went on without this episode, whose answer took more than straggler_s = {self._straggler_s:g}"
            )
            raise TimeoutError(problem)
        if not self._steps:
            self._waiting_since = asyncio.get_running_loop().time()
        step: Step = await self._submit(self._steps, env_index, action)
        return step

    def release(self, env_index: int) -> None:
        """Give a lane back after its episode has ended for any reason."""
        for calls in (self._resets, self._steps):
            calls.pop(env_index, None)
        self._playing.discard(env_index)
        self._lost.discard(env_index)
        self.free.append(env_index)
        self._changed.set()

    async def _submit(self, calls: dict[int, _Call], env_index: int, value: Any) -> Any:
        if self.failed:
            raise RuntimeError(self._problem)
        call = calls[env_index] = _Call(value, asyncio.get_running_loop().create_future())
        self._changed.set()
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return await call.future

    async def _work(self) -> None:
        """Serve calls until none is left.

        Consumes resets and actions. Produces observations. Waits for the environment and for the actions of running episodes.
        Unblocked by an action, by the end of an episode, and after `straggler_s`.
        """
        try:
            while self._resets or self._steps:
                if self._resets:
                    await self._reset_envs()
                elif missing := self._playing - self._steps.keys():
                    await self._wait_for(missing)
                else:
                    await self._step_envs()
                await asyncio.sleep(0)  # the episodes put their observations into words before their lanes change again
        except Exception as error:
            self._fail(error)

    async def _wait_for(self, missing: set[int]) -> None:
        self._changed.clear()
        try:
            async with asyncio.timeout_at(self._waiting_since + self._straggler_s):
                await self._changed.wait()
        except TimeoutError:
            self._lost |= missing
            self._playing -= missing

    async def _reset_envs(self) -> None:
        calls = self._served = self._resets
        self._resets = {}
        if self._ended is None:
            await self._call(self.env.reset)
        observations, infos = await self._reset_some({env_index: call.value for env_index, call in calls.items()})
        for env_index, call in calls.items():
            _settle(call, (self._observation_of(observations, env_index), info_of(infos, env_index)))

    async def _reset_some(self, seeds: Mapping[int, int | None]) -> tuple[Any, Mapping[str, Any]]:
        mask = np.zeros(self.env.num_envs, dtype=np.bool_)
        mask[list(seeds)] = True
        values = [seeds.get(env_index) for env_index in range(self.env.num_envs)]
        result = await self._call(lambda: self.env.reset(seed=values, options={"reset_mask": mask}))
        self._ended = (self._ended or set()) - seeds.keys()
        return result  # type: ignore[no-any-return]

    async def _step_envs(self) -> None:
        calls = self._served = self._steps
        self._steps = {}
        # In the mode Disabled gymnasium refuses a step while a lane has ended and was not reset, also one on which nobody plays.
        if self._ended:
            await self._reset_some(dict.fromkeys(self._ended))
        batch = self._batch({env_index: call.value for env_index, call in calls.items()})
        observations, rewards, terminated, truncated, infos = await self._call(lambda: self.env.step(batch))
        over = {env_index for env_index in range(self.env.num_envs) if terminated[env_index] or truncated[env_index]}
        if self._mode == "Disabled":
            self._ended = over
        self._playing -= over
        for env_index, call in calls.items():
            observation, info = self._observation_of(observations, env_index), info_of(infos, env_index)
            if env_index in over and self._mode == "SameStep":  # what came with the step is the next episode's already
                observation, info = info["final_obs"], info.get("final_info", {})
            _settle(call, (observation, rewards[env_index], bool(terminated[env_index]), bool(truncated[env_index]), info))

    def _batch(self, actions: Mapping[int, Any]) -> Any:
        from gymnasium.vector.utils import concatenate, create_empty_array

        space, size = self.env.single_action_space, self.env.num_envs
        # A batch has an action for every lane; what becomes of lanes without an episode is not read.
        every = [actions[env_index] if env_index in actions else space.sample() for env_index in range(size)]
        return concatenate(space, every, create_empty_array(space, size))

    def _observation_of(self, observations: Any, env_index: int) -> Any:
        from gymnasium.vector.utils import iterate

        # A copy, as the next step may write into the same arrays.
        return copy.deepcopy(list(iterate(self.env.observation_space, observations))[env_index])

    async def _call(self, call: Callable[[], Any]) -> Any:
        async with asyncio.timeout(CALL_LIMIT_S):
            return await self._threads.call(call)

    def _fail(self, error: Exception) -> None:
        """End all episodes on this vector environment; later episodes run on another one."""
        self.failed, self._problem = True, f"the vector environment failed, for all its lanes: {type(error).__name__}: {error}"
        for call in (*self._resets.values(), *self._steps.values(), *self._served.values()):
            if not call.future.done():
                call.future.set_exception(RuntimeError(self._problem))
        self._resets, self._steps, self._served = {}, {}, {}
        self._threads = Threads(1)  # the old thread may hang
        self._closing = asyncio.create_task(self._close())

    async def _close(self) -> None:
        with contextlib.suppress(Exception):
            await self._threads.call(lambda: self.env.close(terminate=True))


class VectorEnvPool:
    """The vector environments of one class in one event loop; a new one is made when no lane is free."""

    def __init__(self, make: Callable[[], gymnasium.vector.VectorEnv[Any, Any, Any]], straggler_s: float) -> None:
        self._make, self._straggler_s = make, straggler_s
        self._threads, self._lock = Threads(1), asyncio.Lock()
        self.shared: list[SharedEnv] = []

    async def lend(self) -> tuple[SharedEnv, int]:
        """Return a free lane, on a new vector environment if no lane is free."""
        # Two episodes without a lane would otherwise each make a vector environment.
        async with self._lock:
            self.shared = [shared for shared in self.shared if not shared.failed]
            for shared in self.shared:
                if shared.free:
                    return shared, shared.free.pop(0)
            self.shared.append(shared := SharedEnv(await self._threads.call(self._make), self._straggler_s))
            return shared, shared.free.pop(0)


class SubEnvSpaces:
    """Stand-in for a lane's environment that lives in another process or inside a batch; offers only its spaces."""

    def __init__(self, action_space: Any, observation_space: Any) -> None:
        self.action_space, self.observation_space = action_space, observation_space

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"self.env.{name} is out of reach in a vector environment; use the observation and self.info")


def info_of(infos: Mapping[str, Any], env_index: int) -> dict[str, Any]:
    """Return the entries of a vector environment's infos that belong to one lane."""
    info: dict[str, Any] = {}
    for key, value in infos.items():
        # With `_key` gymnasium says which lanes have the entry `key`.
        if (key.startswith("_") and key[1:] in infos) or not (f"_{key}" not in infos or infos[f"_{key}"][env_index]):
            continue
        info[key] = info_of(value, env_index) if isinstance(value, Mapping) else value[env_index]
    return info


def _autoreset_mode(env: gymnasium.vector.VectorEnv[Any, Any, Any]) -> str:
    """Return the name of the autoreset mode; raise if lanes cannot be reset one by one in it."""
    from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

    base, mode = env.unwrapped, env.metadata.get("autoreset_mode")
    if mode != AutoresetMode.DISABLED and not isinstance(base, SyncVectorEnv | AsyncVectorEnv):
        problem = f"{type(base).__name__} resets its lanes by itself ({mode}), so episodes cannot begin with seeds of their own"
        raise ValueError(f"{problem}. Make it with AutoresetMode.DISABLED, or use vectorization_mode=sync.")
    if isinstance(base, AsyncVectorEnv) and mode == AutoresetMode.NEXT_STEP and not base.shared_memory:
        raise ValueError("AsyncVectorEnv without shared memory resets a lane twice in NEXT_STEP mode. Use AutoresetMode.DISABLED.")
    return str(mode.value)


def _settle(call: _Call, value: Any) -> None:
    if not call.future.done():
        call.future.set_result(value)


_POOLS: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[type[Any], VectorEnvPool]] = WeakKeyDictionary()


class GymVectorEnv(GymEnv):
    """One episode on a lane of a gymnasium vector environment; later episodes reuse the vector environment.

    The same seed gives the same episode as with `GymEnv`. A step waits for the other running episodes on the same vector
    environment, so `GymVectorEnv` pays only if one batched step costs much less than single steps.

    Attributes:
        num_envs: Lanes of a vector environment; with more episodes than lanes, there are several vector environments.
        vectorization_mode: ``sync`` (one thread) or ``async`` (a process per env_index), as for `gymnasium.make_vec`.
        straggler_s: Seconds that a batch waits for an answer; an episode that takes longer fails, and the others continue.
    """

    num_envs: ClassVar[int] = 8
    vectorization_mode: ClassVar[str] = "sync"
    straggler_s: ClassVar[float] = 30.0

    snapshot: Any = None  # a lane shares its environment with others
    restore: Any = None

    _place: tuple[SharedEnv, int] | None = None

    @classmethod
    def make_vector(cls) -> gymnasium.vector.VectorEnv[Any, Any, Any]:
        """Make a vector environment whose lanes can be reset one by one.

        gymnasium's own vector environments work in any autoreset mode. Another kind must have the mode DISABLED, and its
        `reset` must take a list of seeds with a ``reset_mask``.
        """
        import gymnasium

        options: dict[str, Any] = {"autoreset_mode": gymnasium.vector.AutoresetMode.DISABLED}
        if cls.vectorization_mode == "async":
            options["context"] = "forkserver"  # this process has threads, and forking it could deadlock
        return gymnasium.make_vec(
            cls.env_id,
            cls.num_envs,
            vectorization_mode=cls.vectorization_mode,
            vector_kwargs=options,
            disable_env_checker=True,
            **{**cls.drawing(), **cls.env_options},
        )

    async def reset(self, state: ResetState) -> ResetResult:  # type: ignore[override]
        """Take a lane and reset it."""
        shared, env_index = self._place = await self._pool().lend()
        self.env = shared.view(env_index)
        return self._begun(await shared.reset(env_index, state.seed % SEEDS))

    async def step(self, state: StepState) -> StepResult:  # type: ignore[override]
        """Take the action that the model named, together with the other lanes, or tell the model why its answer names none."""
        self._env()
        action = self._action(state)
        if isinstance(action, StepResult) or self._place is None:
            return action  # type: ignore[no-any-return]
        shared, env_index = self._place
        return self._stepped(await shared.step(env_index, action))

    async def close(self) -> None:  # type: ignore[override]
        """Give the lane back."""
        if self._place is not None:
            shared, env_index = self._place
            self._place = self.env = None
            shared.release(env_index)

    @classmethod
    def _pool(cls) -> VectorEnvPool:
        pools = _POOLS.setdefault(asyncio.get_running_loop(), {})
        return pools.setdefault(cls, VectorEnvPool(cls.make_vector, cls.straggler_s))


OWN_OPTIONS = ("num_tasks", "max_invalid", "invalid_reward", "observe")
WORDS = {"vectorization_mode": ("sync", "async"), "observe": ("text", PIXELS)}
"""Options that are words, and these."""
VECTOR_OPTIONS = ("num_envs", "vectorization_mode", "straggler_s")


def load_gym(spec: str) -> type[GymEnv]:
    """Return the class for ``gym:ID?option=value&...``: attributes of `GymEnv` and `GymVectorEnv`, else arguments of the environment."""
    env_id, options = split_spec(spec)
    own: dict[str, Any] = {key: options.pop(key) for key in OWN_OPTIONS if key in options}
    name = re.sub(r"\W", "_", env_id.rpartition("/")[2].rpartition(":")[2].partition("-v")[0])
    base = TOY_TEXT.get(name, GymEnv)
    bases: tuple[type[GymEnv], ...] = (base,)
    if "num_envs" in options:
        bases = (GymVectorEnv, base) if base is not GymEnv else (GymVectorEnv,)
        own.update((key, options.pop(key)) for key in VECTOR_OPTIONS if key in options)
    if own.get("observe") == PIXELS and base is not GymEnv:
        own["instructions"] = GymEnv.instructions  # its own explain the text
    cls = type(name or "GymEnv", bases, {"env_id": env_id, "env_options": options, "__module__": base.__module__, **own})
    _try(spec, cls, {key: value for key, value in own.items() if key != "instructions"})
    return cls


def _try(spec: str, cls: type[GymEnv], own: Mapping[str, Any]) -> None:
    """Make one environment, so that a wrong name or option fails before anything heavy starts."""
    for key, value in own.items():
        least = 1 if key in ("num_tasks", "num_envs") else 0
        if key in WORDS:
            if value not in WORDS[key]:
                raise EnvLoadError("--agent", spec, f"{key} = {value!r} is unknown", f"Give {' or '.join(WORDS[key])}.")
        elif not isinstance(value, int | float) or (key != "invalid_reward" and value < least) or (key == "num_envs" and value % 1):
            raise EnvLoadError("--agent", spec, f"{key} = {value!r} is out of range", "Give a number.")
    if own.get("observe") == PIXELS and own.get("vectorization_mode") == "async":
        problem = "draws its lanes in other processes, which give no pictures"
        raise EnvLoadError("--agent", spec, f"vectorization_mode = 'async' {problem}", "Give sync, or leave num_envs out.")
    try:
        _make_one(spec, cls)
    except EnvLoadError:
        raise
    except Exception as error:  # gymnasium's own errors, and whatever the environment's constructor raises
        remedy = "Give gym:ID?option=value, for example gym:FrozenLake-v1?is_slippery=False."
        raise EnvLoadError("--agent", spec, f"gymnasium.make raised {type(error).__name__}: {error}", remedy) from error


def _make_one(spec: str, cls: type[GymEnv]) -> None:
    """Make an environment and close it; one whose pictures are to be shown draws its beginning."""
    env = cls()
    env.env = env.make()
    try:
        if cls.observe == PIXELS:
            env.env.reset(seed=0)
            env.frame()
        elif cls.format_observation is GymEnv.format_observation and (problem := too_large(env.env.observation_space)):
            raise EnvLoadError("--agent", spec, problem, f"{SHORTER}.")
    finally:
        env.env.close()


GYM = Scheme(
    name="gym",
    load=load_gym,
    has_pictures=True,
    form="gym:ID",
    about="environments of [gymnasium](gymnasium.md), one by one or as a vector",
    needs="the package of the environment, if gymnasium does not have it",
)

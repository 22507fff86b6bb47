"""Rewards: judging one answer with a function, with several and their weights, or with a server; and the environment for it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeAlias
from urllib.parse import parse_qsl

from agentrl.core.errors import ConfigError, EnvLoadError, EnvResultError
from agentrl.core.types import Task
from agentrl.env.agent import AgentInstance, ResetState, StepResult, StepState
from agentrl.env.boundary import Threads
from agentrl.env.results import number
from agentrl.env.rewards.answers import Reward, read_answer

RewardFunction: TypeAlias = Callable[..., Any]
"""``reward(completion, label)``, or ``reward_func(queries, prompts, labels)``; plain or async."""

FORMS = "Write reward(completion, label) -> float, or reward_func(queries, prompts, labels) -> {'rewards': [...]}."
BATCH_PARAMETERS = ("queries", "prompts", "labels")
MIXED_THREADS = 16


class FunctionReward(Reward):
    """A function of the user's.

    Args:
        function: In one of the two forms; the one whose first parameter is ``queries`` gets lists of one.
        where: File and name, for messages.
    """

    def __init__(self, function: RewardFunction, where: str) -> None:
        self._function, self._where = function, where
        self._is_batch = _is_batch(function)
        self.is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)

    def judge(self, state: StepState) -> Any:
        """As `Reward.judge`."""
        if self._is_batch:
            query = state.observation_text + state.action_text
            value = self._function([query], [state.observation_text], [state.label])
        else:
            value = self._function(state.action_text, state.label)
        return self._later(value) if self.is_async else self._read(value)

    async def _later(self, value: Any) -> StepResult:
        return self._read(await value)

    def _read(self, value: Any) -> StepResult:
        if not self._is_batch:
            return StepResult(number(value, self._where, "reward"), terminated=True)
        result = read_answer(value, 1, self._where, strict=True)[0]
        if isinstance(result, EnvResultError):
            raise result
        return result


class CombinedReward(Reward):
    """The weighted sum of several; the first decides the score. See `combine_rewards`."""

    def __init__(self, parts: Mapping[str, tuple[Reward, float]]) -> None:
        self._parts = dict(parts)
        self.is_async = any(part.is_async for part, _ in self._parts.values())
        self._threads: Threads | None = None
        self._users = 0

    def open(self) -> None:
        """As `Reward.open`."""
        self._users += 1
        if self._threads is None and self.is_async:
            self._threads = Threads(MIXED_THREADS)
        for part, _ in self._parts.values():
            part.open()

    async def close(self) -> None:
        """As `Reward.close`."""
        self._users -= 1
        if not self._users and self._threads is not None:
            self._threads.close()
            self._threads = None
        for part, _ in self._parts.values():
            await part.close()

    def judge(self, state: StepState) -> Any:
        """As `Reward.judge`."""
        if self.is_async:
            return self._later(state)
        return self._sum({name: part.judge(state) for name, (part, _) in self._parts.items()})

    async def _later(self, state: StepState) -> StepResult:
        return self._sum({name: await self._one(part, state) for name, (part, _) in self._parts.items()})

    async def _one(self, part: Reward, state: StepState) -> StepResult:
        if part.is_async or self._threads is None:
            result: StepResult = await part.judge(state)
            return result
        async with self._threads as threads:
            judged: StepResult = await threads.run(partial(part.judge, state))
            return judged

    def _sum(self, results: Mapping[str, StepResult]) -> StepResult:
        first = next(iter(results.values()))
        return StepResult(
            sum(weight * results[name].reward for name, (_, weight) in self._parts.items()),
            terminated=True,
            score=min(max(first.reward, 0.0), 1.0) if first.score is None else first.score,
            info={
                **{f"{name}/{key}": value for name, result in results.items() for key, value in result.info.items()},
                **{f"reward/{name}": result.reward for name, result in results.items()},
            },
            reward_parts={name: weight * results[name].reward for name, (_, weight) in self._parts.items()},
        )


def combine_rewards(**parts: tuple[RewardFunction | Reward, float] | RewardFunction | Reward) -> Reward:
    """One reward from several: the sum of each times its weight, every one of them logged under its name.

    The first says whether the task is done: its value, between 0 and 1, is the score that filtering and evaluation use.
    So put what matters first, and what only helps (format, length) after it.

    Example:
        >>> reward = combine_rewards(right=(is_right, 1.0), short=(is_short, 0.1))

    Args:
        parts: Name and reward, or name, reward and weight; a weight left out is 1.

    Returns:
        A reward that a file may define as ``reward``.

    Raises:
        ConfigError: If there is no part, or one is not a reward.
    """
    made: dict[str, tuple[Reward, float]] = {}
    for name, part in parts.items():
        reward, weight = part if isinstance(part, tuple) and len(part) == 2 else (part, 1.0)
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            raise ConfigError(f"combine_rewards({name}=...)", weight, "the weight is not a number", "Write (reward, 0.5).")
        made[name] = (as_reward(reward, f"reward {name}"), float(weight))
    if not made:
        raise ConfigError("combine_rewards", "", "nothing to combine", "Write combine_rewards(right=(is_right, 1.0)).")
    return CombinedReward(made)


def remote_reward(*urls: str, timeout_s: float = 45.0, batch_size: int = 64) -> Reward:
    """A reward model behind HTTP in OpenRLHF's form, as a reward of its own or as a part of `combine_rewards`.

    Args:
        urls: Servers that give the same answers, asked in rotation.
        timeout_s: Deadline of an answer, further attempts included.
        batch_size: Episodes joined into one request at most.

    Raises:
        ConfigError: If an address cannot be used.
    """
    from agentrl.env.rewards.server import RemoteReward  # only now: it takes httpx, as long to import as half of agentrl

    return RemoteReward(urls, timeout_s=timeout_s, batch_size=batch_size)


def as_reward(value: Any, where: str) -> Reward:
    """A reward from a function in one of the two forms, or the reward itself.

    Raises:
        ConfigError: If it is neither.
    """
    if isinstance(value, Reward):
        return value
    if not is_reward(value):
        raise ConfigError(where, value, "is not a reward", FORMS)
    return FunctionReward(value, where)


def is_reward(value: Any) -> bool:
    """Whether it is a reward, or a function that can be called as one."""
    if isinstance(value, Reward):
        return True
    if isinstance(value, type) or not callable(value):
        return False
    try:
        inspect.signature(value).bind(*([None] * (3 if _is_batch(value) else 2)))
    except (TypeError, ValueError):
        return False
    return True


class _RewardEnvironment(AgentInstance):
    """One turn, judged on a thread."""

    reward: ClassVar[Reward]

    def step(self, state: StepState) -> StepResult:
        result: StepResult = self.reward.judge(state)
        return result


class _AsyncRewardEnvironment(AgentInstance):
    """One turn, judged on the event loop."""

    reward: ClassVar[Reward]
    _is_open = False

    async def reset(self, state: ResetState, /) -> None:
        self.reward.open()
        self._is_open = True

    async def step(self, state: StepState, /) -> StepResult:
        result: StepResult = await self.reward.judge(state)
        return result

    async def close(self) -> None:
        if self._is_open:
            self._is_open = False
            await self.reward.close()


def reward_environment(value: Any, name: str, *, module: str = "", file: str = "", tasks: Any = None) -> type[AgentInstance]:
    """The class of a single-turn environment that ends with the reward of the answer.

    Args:
        value: A reward, or a function in one of the two forms.
        name: Of the class, for messages.
        module: Where the function is defined.
        file: The file it is defined in, for messages.
        tasks: What the class's `tasks` gives: a collection, or a function of no arguments; `None`: ``--prompts`` is needed.
    """
    where = f"{Path(file).name}: {name}" if file else name
    reward = as_reward(value, where)

    def own_tasks() -> Iterable[Task] | None:
        given: Iterable[Task] | None = tasks() if callable(tasks) else tasks
        return given

    base = _AsyncRewardEnvironment if reward.is_async else _RewardEnvironment
    body = {"reward": reward, "tasks": staticmethod(own_tasks), "__module__": module or __name__, "__doc__": f"One turn, judged by {name}."}
    return type(name, (base,), body)


def load_reward_servers(spec: str) -> type[AgentInstance]:
    """The environment that ``reward:URL[,URL...][#timeout_s=...&batch_size=...]`` names.

    Raises:
        EnvLoadError: If an address or an option cannot be used.
    """
    urls, _, fragment = spec.partition(":")[2].partition("#")
    options = dict(parse_qsl(fragment))
    try:
        timeout_s, batch_size = float(options.pop("timeout_s", 45)), int(options.pop("batch_size", 64))
        if options:
            raise ValueError(f"there is no option {next(iter(options))!r}")
        return reward_environment(remote_reward(*urls.split(","), timeout_s=timeout_s, batch_size=batch_size), "RewardServer")
    except ConfigError as error:
        raise EnvLoadError("--remote-rm-url", error.value, error.problem, error.remedy) from error
    except ValueError as error:
        raise EnvLoadError("--agent", spec, str(error), "Write reward:URL#timeout_s=45&batch_size=64.") from error


def _is_batch(function: RewardFunction) -> bool:
    try:
        names = [parameter.name for parameter in inspect.signature(function).parameters.values()]
    except (TypeError, ValueError):
        return False
    return getattr(function, "__name__", "") == "reward_func" or names[:1] == [BATCH_PARAMETERS[0]]

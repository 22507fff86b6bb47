"""Rewards from a function, a weighted sum of functions or a server, and the single-turn environment around a reward."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Container, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, TypeVar

from agentrl.core.errors import ConfigError, EnvResultError, NotScoredError
from agentrl.core.types import Task
from agentrl.env.agent import AgentInstance, ResetState, StepResult, StepState
from agentrl.env.results import bad_result, clipped_score, known_keys, number
from agentrl.env.rewards.forms import FORMS, form_of
from agentrl.env.threads import Threads

if TYPE_CHECKING:
    from agentrl.env.remote.http import JsonClient

RewardFunction: TypeAlias = Callable[..., Any]
"""A function in one of the forms of `agentrl.env.rewards.forms`; plain or async."""
_T = TypeVar("_T")

MIXED_THREADS = 16


class Reward:
    """Judge of the answer to a task. Each user calls `open` before and `close` after use; several users may share one."""

    is_async = False

    def open(self) -> None:
        """Count one more user."""

    async def close(self) -> None:
        """Count one user fewer; the last one releases shared resources."""

    def reads_label(self, columns: Container[str]) -> bool:
        """Return True if the label of a task with these columns of metadata is given to the judge."""
        return True

    def judge(self, state: StepState) -> Any:
        """Return a `StepResult` that ends the episode, or an awaitable of one if `is_async`."""
        raise NotImplementedError(f"{type(self).__name__} needs a method judge(self, state)")


class RemoteReward(Reward):
    """A reward that is asked for over HTTP, by one client for all users, made at the first `open`; calls run as tasks of `_start`.

    Args:
        urls: Equivalent servers, asked in rotation.
        limits: Fields of `HttpLimits`.
    """

    is_async = True

    def __init__(self, urls: Sequence[str], **limits: Any) -> None:
        self._urls, self._limits = urls, limits
        self._users = 0
        self._client: JsonClient | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    def open(self) -> None:
        """As `Reward.open`."""
        self._users += 1
        if self._client is None:
            from agentrl.env.remote.http import HttpLimits, JsonClient  # only now: httpx takes long to import

            self._client = JsonClient(self._urls, HttpLimits(**self._limits))

    async def close(self) -> None:
        """As `Reward.close`; the last user's close also cancels open requests."""
        self._users -= 1
        if self._users or self._client is None:
            return
        # Forgotten before the first await, so that an `open` meanwhile makes a new client.
        client, self._client = self._client, None
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await client.aclose()

    def _start(self, call: Coroutine[Any, Any, _T], name: str) -> asyncio.Task[_T]:
        """Start a task that the last `close` cancels."""
        task = asyncio.create_task(call, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


class FunctionReward(Reward):
    """A reward from a user's function in one of the forms of `agentrl.env.rewards.forms`; `where` is its file and name, for messages."""

    def __init__(self, function: RewardFunction, where: str) -> None:
        self._function, self._where = function, where
        self._form = form_of(function, where)
        # An object whose `__call__` is async is no coroutine function itself.
        self.is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)

    def reads_label(self, columns: Container[str]) -> bool:
        """As `Reward.reads_label`."""
        return self._form.reads_label(columns)

    def judge(self, state: StepState) -> Any:
        """As `Reward.judge`."""
        value = self._form.call(self._function, state, self._where)
        return self._later(value) if self.is_async else self._read(value)

    async def _later(self, value: Any) -> StepResult:
        return self._read(await value)

    def _read(self, value: Any) -> StepResult:
        if self._form.kind == "plain":
            return StepResult(number(value, self._where, "reward"), terminated=True)
        if self._form.kind == "verl":
            return _verl_result(value, self._where)
        if self._form.kind == "trl" and not isinstance(value, Mapping):
            if isinstance(value, list | tuple) and list(value) == [None]:
                raise NotScoredError(f"{self._where} returned None: it does not apply to this answer")
            value = {"rewards": value}
        result = read_answer(value, 1, self._where, strict=True)[0]
        if isinstance(result, EnvResultError):
            raise result
        return result


def _verl_result(value: Any, where: str) -> StepResult:
    """Return the result that verl's form gives: a number, or a dictionary with a score and further figures."""
    if not isinstance(value, Mapping):
        return StepResult(number(value, where, "reward"), terminated=True)
    if "score" not in value:
        raise bad_result(where, "result", value, "the key 'score' is missing")
    figures = {str(key): float(item) for key, item in value.items() if key != "score" and isinstance(item, bool | int | float)}
    return StepResult(number(value["score"], where, "score"), terminated=True, info=figures)


class CombinedReward(Reward):
    """The weighted sum of several rewards; the first one that applies decides the score. See `combine_rewards`."""

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

    def reads_label(self, columns: Container[str]) -> bool:
        """As `Reward.reads_label`."""
        return any(part.reads_label(columns) for part, _ in self._parts.values())

    def judge(self, state: StepState) -> Any:
        """As `Reward.judge`."""
        if self.is_async:
            return self._later(state)
        results: dict[str, StepResult | NotScoredError] = {}
        for name, (part, _) in self._parts.items():
            try:
                results[name] = part.judge(state)
            except NotScoredError as error:
                results[name] = error
        return self._sum(results)

    async def _later(self, state: StepState) -> StepResult:
        return self._sum({name: await self._one(part, state) for name, (part, _) in self._parts.items()})

    async def _one(self, part: Reward, state: StepState) -> StepResult | NotScoredError:
        try:
            if part.is_async or self._threads is None:
                result: StepResult = await part.judge(state)
                return result
            async with self._threads as threads:
                judged: StepResult = await threads.call(partial(part.judge, state))
                return judged
        except NotScoredError as error:
            return error

    def _sum(self, judged: Mapping[str, StepResult | NotScoredError]) -> StepResult:
        results = {name: result for name, result in judged.items() if isinstance(result, StepResult)}
        if not results:
            raise NotScoredError("; ".join(map(str, judged.values())))
        first = next(iter(results.values()))
        return StepResult(
            sum(self._parts[name][1] * result.reward for name, result in results.items()),
            terminated=True,
            score=min(max(first.reward, 0.0), 1.0) if first.score is None else first.score,
            info={
                **{f"{name}/{key}": value for name, result in results.items() for key, value in result.info.items()},
                **{f"reward/{name}": result.reward for name, result in results.items()},
            },
            reward_parts={name: self._parts[name][1] * result.reward for name, result in results.items()},
        )


def combine_rewards(**parts: tuple[RewardFunction | Reward, float] | RewardFunction | Reward) -> Reward:
    """Return the weighted sum of several rewards; each one is logged under its name.

    The value of the first reward, clipped to 0..1, is the score that filtering and evaluation use: name the reward for
    solving the task first, and helpers (format, length) after it.

    Example:
        >>> reward = combine_rewards(right=(is_right, 1.0), short=(is_short, 0.1))

    Args:
        parts: Rewards by name, each a reward or a pair of reward and weight; the default weight is 1.

    Returns:
        A reward that a file may define as ``reward``.

    Raises:
        ConfigError: If there is no part, or a part is not a reward.
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


def as_reward(value: Any, where: str) -> Reward:
    """Return `value` if it is a `Reward`, else the reward of a function in one of the forms; `ConfigError` if it is neither."""
    if isinstance(value, Reward):
        return value
    if isinstance(value, type) or not callable(value):
        raise ConfigError(where, value, "is not a reward", FORMS)
    return FunctionReward(value, where)


def is_reward(value: Any) -> bool:
    """Return True for a `Reward` and for a function with the parameters of one."""
    if isinstance(value, Reward):
        return True
    if isinstance(value, type) or not callable(value):
        return False
    try:
        form_of(value, "reward")
    except ConfigError:
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


def judging_reward(cls: type[Any]) -> Reward | None:
    """Return the reward of a class that `reward_environment` made; `None` for any other."""
    return cls.reward if issubclass(cls, _RewardEnvironment | _AsyncRewardEnvironment) else None


def reward_environment(value: Any, name: str, *, module: str = "", file: str = "", tasks: Any = None) -> type[AgentInstance]:
    """Return the class of a single-turn environment that ends with the reward of the answer.

    `file` and `name` are for messages; `tasks` is a collection or a function without arguments, `None` if ``--prompts`` is needed.
    """
    where = f"{Path(file).name}: {name}" if file else name
    reward = as_reward(value, where)

    def own_tasks() -> Iterable[Task] | None:
        given: Iterable[Task] | None = tasks() if callable(tasks) else tasks
        return given

    base = _AsyncRewardEnvironment if reward.is_async else _RewardEnvironment
    body = {"reward": reward, "tasks": staticmethod(own_tasks), "__module__": module or __name__, "__doc__": f"One turn, judged by {name}."}
    return type(name, (base,), body)


KEYS = ("rewards", "scores", "extra_logs")

Column: TypeAlias = list[float | EnvResultError]
Reader: TypeAlias = Callable[[Any, str, str], float]


def read_answer(value: Any, count: int, where: str, *, strict: bool) -> list[StepResult | EnvResultError]:
    """Return each episode's result, or the error in its entries, from ``{"rewards", "scores", "extra_logs"}``.

    Each value has one entry per episode, as a list, array or tensor; for one episode, and in `extra_logs` for all, also a number.
    `strict` refuses other keys. Raises `EnvResultError` if the answer as a whole cannot be used.
    """
    if not isinstance(value, Mapping):
        raise bad_result(where, "result", value, "return a dictionary with rewards, and perhaps scores and extra_logs")
    if strict:
        known_keys(value, KEYS, where)
    if "rewards" not in value:
        raise bad_result(where, "result", value, "the key 'rewards' is missing")
    rewards = _column(value["rewards"], count, where, "rewards")
    scores = None if value.get("scores") is None else _column(value["scores"], count, where, "scores", clipped_score)
    given = value.get("extra_logs") or {}
    if not isinstance(given, Mapping):
        raise bad_result(where, "extra_logs", given, "must be a dictionary of names and numbers")
    logs = {str(name): _column(column, count, where, f"extra_logs[{name!r}]", shared=True) for name, column in given.items()}
    return [_result(rewards[i], None if scores is None else scores[i], {name: logs[name][i] for name in logs}) for i in range(count)]


def _result(
    reward: float | EnvResultError, score: float | EnvResultError | None, logs: Mapping[str, float | EnvResultError]
) -> StepResult | EnvResultError:
    info: dict[str, float] = {}
    for name, entry in logs.items():
        if isinstance(entry, EnvResultError):
            return entry
        info[name] = entry
    if isinstance(reward, EnvResultError):
        return reward
    if isinstance(score, EnvResultError):
        return score
    return StepResult(reward, terminated=True, score=score, info=info)


def _column(value: Any, count: int, where: str, field: str, read: Reader = number, *, shared: bool = False) -> Column:
    plain = value.tolist() if callable(getattr(value, "tolist", None)) else value
    if isinstance(plain, Sequence) and not isinstance(plain, str | bytes):
        if len(plain) != count:
            raise bad_result(where, field, value, f"must have {count} entries, one per query; it has {len(plain)}")
        return [_entry(read, item, where, f"{field}[{index}]") for index, item in enumerate(plain)]
    if count == 1 or shared:
        return [_entry(read, plain, where, field)] * count
    raise bad_result(where, field, value, f"must be a list of {count} numbers, one per query")


def _entry(read: Reader, value: Any, where: str, field: str) -> float | EnvResultError:
    try:
        return read(value, where, field)
    except EnvResultError as error:
        return error

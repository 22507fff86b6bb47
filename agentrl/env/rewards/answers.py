"""Answers of reward models in OpenRLHF's form, from a function or a server: checked, and taken apart by episode."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from agentrl.core.errors import EnvResultError
from agentrl.env.agent import StepResult, StepState
from agentrl.env.results import bad_result, clipped_score, known_keys, number


class Reward:
    """Judges the answer to a task. Whoever uses it calls `open` before and `close` after, any number of times."""

    is_async = False

    def open(self) -> None:
        """Another user."""

    async def close(self) -> None:
        """One user fewer; after the last, what is shared between them is released."""

    def judge(self, state: StepState) -> Any:
        """A `StepResult` that ends the episode, or an awaitable of one if `is_async`."""
        raise NotImplementedError


KEYS = ("rewards", "scores", "extra_logs")

Column: TypeAlias = list[float | EnvResultError]
Reader: TypeAlias = Callable[[Any, str, str], float]


def read_answer(value: Any, count: int, where: str, *, strict: bool) -> list[StepResult | EnvResultError]:
    """The result of each episode from ``{"rewards", "scores", "extra_logs"}``.

    Args:
        value: ``rewards`` and, if they are there, ``scores`` have one entry per episode; ``extra_logs`` has by name one
            entry per episode, or one number for all. Lists, arrays and tensors do; for one episode a number does too.
        count: Number of episodes.
        where: Who answered, for messages.
        strict: Refuse other keys.

    Returns:
        For each episode a result that ends it, or what is wrong with its entries.

    Raises:
        EnvResultError: If the answer as a whole cannot be used.
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

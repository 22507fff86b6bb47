"""Trajectories as JSON, for people and for replay.

Fields are only ever added, and a reader takes those that are missing for unknown, so that records of every age can be
read by every version.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from agentrl.core.types import FinishReason, Generation, Task, Ticket, Trajectory, Turn, floats, ints

EXACT = (str, bool, int, float, type(None))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """What an episode knew of its engine, and a replay has to know too.

    Attributes:
        max_model_len: Context length in tokens.
        end_token_ids: Tokens that end a turn.
    """

    max_model_len: int
    end_token_ids: tuple[int, ...] = ()


def trajectory_record(ticket: Ticket, trajectory: Trajectory, limits: EngineLimits | None = None) -> dict[str, Any]:
    """Everything of one trajectory in JSON's own types; the token ids suffice to compute every log-probability again.

    Args:
        ticket: Of its group.
        trajectory: Any of the group's.
        limits: Of the engine that sampled it; `None`: not known.
    """
    record = {
        "trajectory_id": trajectory.trajectory_id,
        "episode_id": trajectory.episode_id,
        "group_id": trajectory.group_id,
        "attempt": ticket.attempt,
        "version": ticket.version,
        "agent": trajectory.agent,
        "task": _task(ticket.task),
        "status": str(trajectory.status),
        "reward": trajectory.reward,
        "reward_parts": dict(trajectory.reward_parts),
        "score": trajectory.score,
        "metrics": dict(trajectory.metrics),
        "error": trajectory.error,
        "timings": {name: round(seconds, 6) for name, seconds in trajectory.timings.items()},
        "turns": [_turn(turn) for turn in trajectory.turns],
    }
    if trajectory.unanswered is not None:
        record["unanswered"] = _turn(trajectory.unanswered)
    if limits is not None:
        record["engine"] = {"max_model_len": limits.max_model_len, "end_token_ids": list(limits.end_token_ids)}
    return record


def recorded_ticket(record: Mapping[str, Any]) -> Ticket:
    """The ticket of a record's group; parts of the task listed in ``inexact`` are what JSON made of them.

    Raises:
        KeyError, TypeError, ValueError: If the record lacks something, or holds something else than was written.
    """
    task = record["task"]
    return Ticket(
        group_id=int(record["group_id"]),
        task=Task(
            task["prompt"],
            task["label"],
            id=str(task["id"]),
            images=tuple(task.get("images", ())),
            seed=task.get("seed"),
            metadata=task["metadata"],
            position=int(task["position"]),
            epoch=int(task["epoch"]),
        ),
        num_samples=1,
        version=int(record["version"]),
        attempt=int(record["attempt"]),
    )


def recorded_generations(record: Mapping[str, Any]) -> list[Generation]:
    """What the model sampled, turn by turn; the last one may be a turn that the environment failed to answer.

    Raises:
        KeyError, TypeError, ValueError: If the record lacks something, or holds something else than was written.
    """
    turns = [*record["turns"], *([record["unanswered"]] if record.get("unanswered") else [])]
    return [
        Generation(
            token_ids=ints(turn["token_ids"]),
            logprobs=floats(turn["logprobs"]),
            versions=ints(turn["versions"]),
            finish_reason=FinishReason(turn["finish_reason"]),
        )
        for turn in turns
    ]


def recorded_limits(record: Mapping[str, Any]) -> EngineLimits | None:
    """What the record says of its engine; `None` if it was written before records did."""
    engine = record.get("engine")
    if not engine:
        return None
    return EngineLimits(max_model_len=int(engine["max_model_len"]), end_token_ids=tuple(map(int, engine["end_token_ids"])))


def _task(task: Task) -> dict[str, Any]:
    fields = {"prompt": task.prompt, "label": task.label, "metadata": task.metadata, "images": task.images}
    inexact = [name for name in ("prompt", "label", "metadata") if not _is_exact(fields[name])]
    return {
        "id": task.id,
        "epoch": task.epoch,
        "position": task.position,
        "seed": task.seed,
        **{name: _json(value) for name, value in fields.items()},
        **({"inexact": inexact} if inexact else {}),
    }


def _turn(turn: Turn) -> dict[str, Any]:
    return {
        "prompt_text": turn.prompt_text,
        "text": turn.text,
        "prompt_ids": turn.prompt_ids.tolist(),
        "token_ids": turn.token_ids.tolist(),
        "logprobs": [round(value, 6) for value in turn.logprobs.tolist()],
        "versions": turn.versions.tolist(),
        "finish_reason": str(turn.finish_reason),
        "fresh": turn.fresh,
        "reward": turn.reward,
        "temperature": turn.temperature,
        "info": dict(turn.info),
    }


def _is_exact(value: Any) -> bool:
    """Whether `value` comes back from JSON as it is: a tuple would be a list, and a number as a key text."""
    if type(value) in EXACT:
        return not isinstance(value, float) or np.isfinite(value)
    if type(value) is dict:
        return all(type(key) is str and _is_exact(item) for key, item in value.items())
    return type(value) is list and all(map(_is_exact, value))


def _json(value: Any) -> Any:
    """`value` in JSON's own types; what has none becomes its `repr`."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): _json(item) for key, item in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return _json(value.tolist())
    if isinstance(value, Sequence | set | frozenset) and not isinstance(value, bytes | bytearray):
        return [_json(item) for item in value]
    return repr(value)

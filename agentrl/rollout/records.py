"""Trajectories as JSON, for people and for replay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from agentrl.core.types import Task, Ticket, Trajectory, Turn


def trajectory_record(ticket: Ticket, trajectory: Trajectory) -> dict[str, Any]:
    """Everything of one trajectory in JSON's own types; the token ids suffice to compute every log-probability again.

    Args:
        ticket: Of its group.
        trajectory: Any of the group's.
    """
    return {
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


def _task(task: Task) -> dict[str, Any]:
    return {
        "id": task.id,
        "epoch": task.epoch,
        "position": task.position,
        "prompt": _json(task.prompt),
        "label": _json(task.label),
        "metadata": _json(task.metadata),
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

"""Trajectories as JSON, for people and for replay.

Fields are only ever added, and a reader takes those that are missing for unknown, so that records of every age can be
read by every version.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np

from agentrl.core.images import ImageInput, PlacedImage
from agentrl.core.protocols import EngineLimits
from agentrl.core.types import EvalSampling, FinishReason, Group, GroupRequest, Task, Trajectory, Turn, floats, ints
from agentrl.env.images import data_url

Block: TypeAlias = list[float]
"""Place of the first of a block of tokens among those of its image, its rows and columns, and the part of the picture that it covers:
left, top, right and bottom, from 0 to 1."""
SAME_ROW = 2
"""Tokens between two tiles of a picture that are beside each other, in the form of Idefics3; at the end of a row there are more."""


def blocks_of(image: ImageInput) -> list[Block]:
    """Return the blocks of tokens whose patches are known; none if the tokens do not tell how they are arranged.

    One block covers the whole picture: of as many rows and columns as the processor says, or else a square. Several blocks of one size
    are tiles, row by row, and at the end one of the whole picture.
    """
    runs = list(_runs(image))
    sizes = {end - begin for begin, end in runs}
    if len(sizes) != 1:
        return []
    grid = _grid(image, sizes.pop())
    if grid is None:
        return []
    gaps = [after[0] - before[1] for before, after in pairwise(runs)]
    columns = next((number for number, gap in enumerate(gaps, 1) if gap != SAME_ROW), 1)
    rows, rest = divmod(len(runs) - 1, columns)
    if rest or min(gaps, default=SAME_ROW) < SAME_ROW:
        return []
    tiles = [(x / columns, y / rows, (x + 1) / columns, (y + 1) / rows) for y in range(rows) for x in range(columns)]
    return [[begin, *grid, *part] for (begin, _), part in zip(runs, [*tiles, (0, 0, 1, 1)], strict=True)]


def _runs(image: ImageInput) -> Iterator[tuple[int, int]]:
    """Yield beginnings and ends of the runs of the token that the image has most of, which is the one that pixels replace."""
    ids, counts = np.unique(image.token_ids, return_counts=True)
    token = image.placeholder if not counts.size or counts.max() == 1 else ids[counts.argmax()]
    edges = np.flatnonzero(np.diff((image.token_ids == token).astype(np.int8), prepend=0, append=0)).tolist()
    yield from zip(edges[::2], edges[1::2], strict=True)


def _grid(image: ImageInput, size: int) -> tuple[int, int] | None:
    """Return the rows and columns of a block of so many tokens."""
    known = image.tensors.get("image_grid_thw")
    if known is None:
        side = math.isqrt(size)
        return (side, side) if side * side == size else None
    _, height, width = known.array.reshape(-1).tolist()[:3]
    merged = math.isqrt(height * width // size) or 1
    rows, columns = height // merged, width // merged
    return (rows, columns) if rows * columns == size else None


PLAIN = (str, bool, int, float, type(None))
MAX_IMAGES = 500_000
"""Characters of images of observations that are recorded of a trajectory; a record of more than 1 MB is cut."""


def group_records(group_request: GroupRequest, group: Group, limits: EngineLimits | None = None) -> tuple[dict[str, Any], ...]:
    """Every trajectory of as many of the group's first episodes as the group request asks for."""
    return tuple(trajectory_record(group_request, trajectory, limits) for trajectory in group.first_episodes(group_request.record))


def trajectory_record(group_request: GroupRequest, trajectory: Trajectory, limits: EngineLimits | None = None) -> dict[str, Any]:
    """Everything of one trajectory in JSON's own types; the token ids suffice to compute every log-probability again."""
    record = {
        "trajectory_id": trajectory.trajectory_id,
        "episode_id": trajectory.episode_id,
        "group_id": trajectory.group_id,
        "attempt": group_request.attempt,
        "version": group_request.version,
        "agent": trajectory.agent,
        "frozen": trajectory.frozen,
        "task": _task(group_request.task),
        "status": str(trajectory.status),
        "reward": trajectory.reward,
        "reward_parts": dict(trajectory.reward_parts),
        "score": trajectory.score,
        "metrics": dict(trajectory.metrics),
        "error": trajectory.error,
        "timings": {name: round(seconds, 6) for name, seconds in trajectory.timings.items()},
        "spans": [[span.name, span.turn, round(span.start_s, 6), round(span.seconds, 6)] for span in trajectory.spans],
        "turns": [_turn(turn) for turn in trajectory.turns],
    }
    if trajectory.forked_turns:
        record |= {"forked_from": trajectory.forked_from, "forked_turns": trajectory.forked_turns}
    if images := trajectory.images or _sent(trajectory, group_request.task):
        record["images"] = _images(images)
    if trajectory.model_scores:
        record["model_scores"] = {name: list(scores) for name, scores in trajectory.model_scores.items()}
    if group_request.with_messages:
        record["messages"] = [dict(message) for message in trajectory.messages]
    if trajectory.unanswered is not None:
        record["unanswered"] = _turn(trajectory.unanswered)
    if trajectory.unread is not None:
        record["unread"] = _turn(trajectory.unread)
    if group_request.eval_sampling is not None:
        record["eval_sampling"] = {
            "name": group_request.eval_sampling.name,
            "seed": group_request.eval_sampling.seed,
            "temperature": group_request.eval_sampling.temperature,
        }
    if limits is not None:
        record["engine"] = limits_record(limits)
    return record


def limits_record(limits: EngineLimits) -> dict[str, Any]:
    """Facts about the engine in JSON's own types."""
    return {"max_model_len": limits.max_model_len, "end_token_ids": list(limits.end_token_ids)}


def recorded_group_request(record: Mapping[str, Any]) -> GroupRequest:
    """The request for a record's group; parts of the task that `inexact_parts` names are only what JSON made of them.

    Raises:
        KeyError, TypeError, ValueError: If the record lacks something, or holds something else than was written.
    """
    # Literals alone, so that nothing in a record is run.
    task = {**record["task"], **{name: ast.literal_eval(text) for name, text in record["task"].get("literals", {}).items()}}
    return GroupRequest(
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
        n_samples_per_prompt=1,
        version=int(record["version"]),
        attempt=int(record["attempt"]),
        eval_sampling=EvalSampling(**record["eval_sampling"]) if record.get("eval_sampling") else None,
    )


def inexact_parts(record: Mapping[str, Any]) -> list[str]:
    """Return those of the task's prompt, label and metadata that could not be recorded as they were."""
    return list(record["task"].get("inexact", ()))


def recorded_turn(turn: Mapping[str, Any], number: int = 0) -> Turn:
    """A turn as it was, but for the rounding of log-probabilities.

    `number` is its place in the episode, if the record was written before records said.

    Raises:
        KeyError, TypeError, ValueError: If the record lacks something, or holds something else than was written.
    """
    return Turn(
        prompt_ids=ints(turn["prompt_ids"]),
        token_ids=ints(turn["token_ids"]),
        logprobs=floats(turn["logprobs"]),
        versions=ints(turn["versions"]),
        finish_reason=FinishReason(turn["finish_reason"]),
        fresh=bool(turn["fresh"]),
        number=int(turn.get("number", number)),
        reward=float(turn["reward"]),
        step_rewards=tuple((int(place), float(value)) for place, value in turn.get("step_rewards", ())),
        reward_parts=turn.get("reward_parts", {}),
        temperature=float(turn["temperature"]),
        prompt_text=str(turn["prompt_text"]),
        text=str(turn["text"]),
        info=turn["info"],
        masked=str(turn.get("masked", "")),
        state_key=turn.get("state_key"),
        branch_reason=str(turn.get("branch_reason", "")),
        helper=str(turn.get("helper", "")),
        rewritten=str(turn.get("rewritten", "")),
    )


def started_s(record: Mapping[str, Any]) -> float | None:
    """Return when a recorded episode began, which is taken to be when its group did, in seconds since 1970; `None` if that is unknown."""
    if record.get("started_s") is not None:
        return float(record["started_s"])
    if record.get("ended_s") is None or record.get("group_s") is None:
        return None
    return float(record["ended_s"]) - float(record["group_s"])


def recorded_limits(record: Mapping[str, Any]) -> EngineLimits | None:
    """Return the record's facts about its engine; `None` for a record of an older version without them."""
    engine = record.get("engine")
    if not engine:
        return None
    return EngineLimits(max_model_len=int(engine["max_model_len"]), end_token_ids=tuple(map(int, engine["end_token_ids"])))


def _task(task: Task) -> dict[str, Any]:
    fields = {"prompt": task.prompt, "label": task.label, "metadata": task.metadata}
    odd = [name for name, value in fields.items() if not _is_made_of(value, list, dict)]
    literals = {name: repr(fields[name]) for name in odd if _is_made_of(fields[name], list, dict, tuple, set, bytes)}
    inexact = [name for name in odd if name not in literals]
    return {
        "id": task.id,
        "epoch": task.epoch,
        "position": task.position,
        "seed": task.seed,
        "images": list(task.images),
        **{name: _json(value) for name, value in fields.items()},
        **({"literals": literals} if literals else {}),
        **({"inexact": inexact} if inexact else {}),
    }


def _sent(trajectory: Trajectory, task: Task) -> list[tuple[int, Any]]:
    """Images that user code, such as a black-box agent, sent beside those of the task, with the numbers of their turns.

    None if the task names files, which cannot be told from what was sent without reading them.
    """
    if not all(str(image).startswith("data:") for image in task.images):
        return []
    pairs = [(turn.number, data_url(each.image.data)) for turn in trajectory.turns for each in turn.images]
    return [(number, url) for number, url in pairs if url not in task.images]


def _images(images: Sequence[tuple[int, Any]]) -> list[list[Any]]:
    """Images as paths and data URLs with the numbers of their turns; in place of others, and of those that are too large, what they are."""
    found: list[list[Any]] = []
    left = MAX_IMAGES
    for number, image in images:
        text = image if isinstance(image, str) else type(image).__name__
        if len(text) > left:
            text = f"an image of {len(text)} characters, not recorded"
        left -= len(text)
        found.append([number, text])
    return found


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
        "number": turn.number,
        "reward": turn.reward,
        "temperature": turn.temperature,
        "info": dict(turn.info),
        **({"step_rewards": [list(pair) for pair in turn.step_rewards]} if turn.step_rewards else {}),
        **({"reward_parts": dict(turn.reward_parts)} if turn.reward_parts else {}),
        **({"masked": turn.masked} if turn.masked else {}),
        **({"state_key": turn.state_key} if turn.state_key is not None else {}),
        **({"pictures": [_blocks(each) for each in turn.images]} if turn.images else {}),
        **{name: text for name in ("branch_reason", "helper", "rewritten") if (text := getattr(turn, name))},
    }


def _blocks(placed: PlacedImage) -> list[list[float]]:
    """Blocks of an image's tokens, as `blocks_of` says, with their places among the tokens of the prompt."""
    return [[placed.place + block[0], *(round(value, 6) for value in block[1:])] for block in blocks_of(placed.image)]


def _is_made_of(value: Any, *kinds: type) -> bool:
    """Return True if `value` consists of plain values and of `kinds`, without subclasses; keys are texts unless `tuple` is allowed."""
    if type(value) in PLAIN:
        return not isinstance(value, float) or math.isfinite(value)
    if type(value) not in kinds:
        return False
    if isinstance(value, dict):
        keys = all(_is_made_of(key, *kinds) if tuple in kinds else type(key) is str for key in value)
        return keys and all(_is_made_of(item, *kinds) for item in value.values())
    return isinstance(value, bytes) or all(_is_made_of(item, *kinds) for item in value)


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

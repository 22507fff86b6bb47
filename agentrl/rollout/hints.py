"""Hints for self-distillation: the prompt of a task as the teacher reads it, with what the policy does not know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from agentrl.core.errors import AgentRLError, RewardError
from agentrl.core.types import IntArray, Message, Prompt, Status, Task, Trajectory, Turn, ints
from agentrl.rollout.chat import ChatCodec
from agentrl.rollout.codecs import encode_prompt
from agentrl.rollout.learned import contexts, failed
from agentrl.rollout.template_files import TEMPLATE_FLAG, check_hint_template


class Hints:
    """Adds to the first turn of each context the prompt that the teacher reads in its place; one per rollout worker.

    A context that does not begin with the task's prompt, as one that an agent rewrote, gets no hint, and teaches nothing. An episode whose
    first context does not begin with it has failed.
    """

    def __init__(self, file: str, *, apply_chat_template: bool) -> None:
        self._template, self._apply = check_hint_template(file), apply_chat_template

    def add(self, task: Task, trajectories: tuple[Trajectory, ...], codec: ChatCodec, limit: int) -> tuple[Trajectory, ...]:
        """Return the trajectories of an episode with hints, or as failed; `limit` is the context length of the model in tokens."""
        if not any(trajectory.trainable for trajectory in trajectories):
            return trajectories
        try:
            plain = encode_prompt(codec, task.prompt, apply_chat_template=self._apply)
            hinted = encode_prompt(codec, hinted_prompt(self._template, task), apply_chat_template=self._apply)
            return tuple(_hinted(each, plain, hinted, limit) if each.trainable else each for each in trajectories)
        except AgentRLError as error:
            return failed(trajectories, Status.ENV_ERROR, f"{type(error).__name__}: {error}")


def hinted_prompt(template: str, task: Task) -> Prompt:
    """Return the prompt of a task with its text, or that of the last message of the user, put into a template.

    Raises:
        RewardError: If the template names what the task does not have, or there is no text of a user.
    """

    def filled(text: str) -> str:
        try:
            return template.format_map({**task.metadata, "label": task.label, "prompt": text})
        except KeyError as error:
            known = ", ".join(["prompt", "label", *map(str, task.metadata)])
            raise RewardError(f"{TEMPLATE_FLAG} names {error}, and task {task.id!r} has {known}") from error

    if isinstance(task.prompt, str):
        return filled(task.prompt)
    messages = list(task.prompt)
    last = max((place for place, message in enumerate(messages) if message["role"] == "user"), default=-1)
    if last < 0 or not isinstance(messages[last]["content"], str):
        raise RewardError(f"task {task.id!r} has no text of a user that {TEMPLATE_FLAG} could hold")
    messages[last] = Message(**{**messages[last], "content": filled(messages[last]["content"])})
    return messages


def _hinted(trajectory: Trajectory, plain: Sequence[int], hinted: Sequence[int], limit: int) -> Trajectory:
    turns = list(trajectory.turns)
    for number, part in enumerate(contexts(trajectory.turns)):
        first = turns[part[0]]
        if first.prompt_ids[: len(plain)].tolist() != list(plain):
            if not number:
                raise RewardError(
                    f"--teacher self: the episode does not begin with the prompt of its task, so {TEMPLATE_FLAG} has no place"
                )
            continue
        _check(trajectory, [turns[index] for index in part], len(hinted) - len(plain), limit)
        prompt: IntArray = ints([*hinted, *first.prompt_ids[len(plain) :].tolist()])
        turns[part[0]] = replace(first, hinted_ids=prompt)
    return replace(trajectory, turns=tuple(turns))


def _check(trajectory: Trajectory, turns: Sequence[Turn], more: int, limit: int) -> None:
    if any(turn.images for turn in turns):
        raise RewardError("--teacher self reads text only, and the episode has images")
    length = more + sum(len(turn.prompt_ids) + len(turn.token_ids) for turn in turns)
    if length > limit:
        problem = f"episode {trajectory.episode_id} has {length} tokens with its hint, and the model reads {limit}"
        raise RewardError(f"{problem}: shorten {TEMPLATE_FLAG}, or raise --max-model-len")

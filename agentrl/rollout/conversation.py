"""Conversation of one agent of a step environment: its prompts, completions and rewards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import Any

from agentrl.core.altered import altered
from agentrl.core.errors import EnvResultError
from agentrl.core.images import PlacedImage, compacted
from agentrl.core.types import FinishReason, Message, Prompt, Sampling, Turn, as_messages, floats, ints
from agentrl.env.agent import StepResult
from agentrl.env.images import lifted, without_images
from agentrl.env.results import RawText
from agentrl.rollout.chat import ChatCodec
from agentrl.rollout.codecs import encode_prompt
from agentrl.rollout.recorder import Recorder
from agentrl.rollout.step_rewards import placed


class Conversation:
    """The tokens of one agent, which only ever grow: a turn's prompt is every token so far and those of the new observation."""

    def __init__(self, recorder: Recorder, sampling: Sampling) -> None:
        self.recorder, self._codec, self._settings = recorder, recorder.codec, recorder.settings
        self._context = recorder.open()
        self.sampling = sampling  # of the next turn
        self.state_key: str | int | None = None  # name of the state that it begins in
        self.prompt: list[int] = []  # tokens to be read before the next turn
        self.text = ""  # all text up to the end of the last turn
        self.unanswered: Turn | None = None  # a sampled turn that the environment has not answered
        self.images: list[Any] = []  # seen so far by a model that reads text only
        self.placed: tuple[PlacedImage, ...] = ()  # images of `prompt`
        self.parts: dict[str, float] = {}  # named components of the reward
        self.messages: list[Message] | None = []  # what was read and written as chat messages; `None` once raw text was read
        self._overflows = False
        self._advance = 0.0  # rewards from before the first turn
        self._score: float | None = None

    def parted(self, recorder: Recorder | None = None) -> Conversation:
        """A conversation with the same past, before a turn that is unanswered, which goes on by itself, through `recorder`."""
        other = copy(self)
        other._context, other.unanswered = self._context.copy(), None
        other.images, other.parts = [*self.images], dict(self.parts)
        if recorder is not None:
            other.recorder = recorder
            recorder.go_on(other._context)
        return other

    @property
    def name(self) -> str:
        """Name of the conversation, unique in the run."""
        return self.recorder.name

    @property
    def turns(self) -> list[Turn]:
        """The turns that were settled."""
        return self._context.turns

    @property
    def tools(self) -> list[Any]:
        """Schemas of the tools that the agent was offered."""
        return [tool for message in self.messages or () for tool in message.get("tools") or ()]

    @property
    def room(self) -> int:
        """Tokens that may still be sampled."""
        return 0 if self._overflows else self.recorder.limit - len(self._context.tokens) - len(self.prompt)

    @property
    def overflowed(self) -> bool:
        """True if the observation takes the room that there was for another turn."""
        return self.room < 1 <= self.recorder.limit - len(self._context.tokens)

    @property
    def reward(self) -> float:
        """Reward so far, before penalties."""
        return self._advance if not self.turns else math.fsum(turn.reward for turn in self.turns)

    @property
    def score(self) -> float:
        """Score that came with the last turn or after it; without one the reward, clipped to 0..1."""
        return min(max(self.reward, 0.0), 1.0) if self._score is None else self._score

    @property
    def prompt_text(self) -> str:
        """Text of what is to be read before the next turn."""
        return self._codec.decode(compacted(self.prompt, self.placed))

    async def begin(self, prompt: Prompt, opening: Sequence[Message] | None = None, images: Sequence[Any] = ()) -> None:
        """Take in the first prompt with its images, after the messages that the agent read before it was to act.

        A user's text at their end and at the beginning of `prompt` become one message, because many templates want the roles to alternate.
        """
        is_raw = isinstance(prompt, RawText) or (isinstance(prompt, str) and not self._settings.data.apply_chat_template)
        prompt, images = with_places(self._codec, prompt if is_raw or not images else as_messages(prompt), images)
        self.messages = None if is_raw or (opening is not None and isinstance(prompt, str)) else as_messages(prompt)
        if opening is not None and not isinstance(prompt, str):
            self.messages = _joined(opening, prompt)
            self.prompt = self._codec.encode_chat(self.messages)
        elif opening is not None:
            self.prompt = self._codec.encode_chat(opening) + self._codec.encode_text(str(prompt))
        else:
            self.prompt = encode_prompt(self._codec, prompt, apply_chat_template=self._settings.data.apply_chat_template)
        await self._place(images)

    async def read(self, observation: Prompt, images: Sequence[Any] = ()) -> None:
        """Take in an observation with its images before the next turn: raw text as it is, messages by the chat template.

        An observation that cannot fit is not taken in, and leaves no room.
        """
        observation, images = with_places(self._codec, observation, images)
        self._overflows = self._codec.fewest_tokens(observation) > self.recorder.limit
        if self._overflows:
            return
        if isinstance(observation, RawText):
            self.prompt = self._codec.encode_text(observation)
        elif not isinstance(observation, str):
            self.prompt = self._codec.encode_next(observation, self._context.tokens[-1], self.messages or ())
        self.messages = None if self.messages is None or isinstance(observation, str) else [*self.messages, *observation]
        await self._place(images)

    async def _place(self, images: Sequence[Any]) -> None:
        """Replace the placeholders of images in `prompt` by the tokens of these images."""
        reader, self.placed = self._codec.images, ()
        if reader is None:
            self.images += images
        elif images or reader.placeholder in self.prompt:
            self.prompt, self.placed = reader.expand(self.prompt, await reader.read(images), len(self._context.placed))

    async def generate(self, number: int) -> Turn:
        """Sample the turn with this number in the episode; it is unanswered until it is settled."""
        placed = [*self._context.placed, *(each.moved(len(self._context.tokens)) for each in self.placed)]
        sample = await self.recorder.sample(self._context.tokens + self.prompt, self.sampling, self.images, placed=placed)
        self.unanswered = turn = self.recorder.turn(sample, self._context, number)
        return turn

    async def unread(self, observation: Prompt, images: Sequence[Any] = ()) -> Turn | None:
        """Return an observation that nobody will answer as a turn without sampled tokens; `None` if there is no room for another turn."""
        # In a copy, since the conversation itself ends with its last sampled turn.
        other = self.parted()
        await other.read(observation, images)
        nothing = ints([])
        return (
            Turn(
                prompt_ids=ints(other.prompt),
                token_ids=nothing,
                logprobs=floats([]),
                versions=nothing,
                finish_reason=FinishReason.ABORTED,
                images=other.placed,
            )
            if other.room >= 1
            else None
        )

    def settle(self, turn: Turn, result: StepResult, answer: str, where: str = "") -> None:
        """Record the sampled turn, whose text without its end is `answer`, with what the environment, `where`, said of it."""
        steps = placed(result.step_rewards, turn.token_ids.tolist(), answer, self._codec.decode, where)
        settled = altered(
            turn,
            reward=result.reward + math.fsum(value for _, value in steps) + self._advance,
            step_rewards=steps,
            reward_parts=dict(result.reward_parts),
            info=result.info,
            state_key=None if self.state_key is None else str(self.state_key),
        )
        self._context.append(settled, self.sampling.max_tokens)
        for name, value in result.reward_parts.items():
            self.parts[name] = self.parts.get(name, 0.0) + value
        self.text += turn.prompt_text + turn.text
        if self.messages is not None:
            self.messages = [*self.messages, Message(role="assistant", content=answer)]
        self._advance, self._score, self.unanswered = 0.0, result.score, None

    def earn(self, reward: float, score: float | None = None) -> None:
        """Add to the reward of the last turn; before the first turn, to that of the turn to come.

        A score, success in 0..1, replaces what was given before.
        """
        if self.turns:
            self.turns[-1] = replace(self.turns[-1], reward=self.turns[-1].reward + reward)
        else:
            self._advance += reward
        self._score = self._score if score is None else score


def with_places(codec: ChatCodec, prompt: Prompt, images: Sequence[Any]) -> tuple[Prompt, list[Any]]:
    """Return a prompt with places for its images, and all of these in order; without places for a model that reads text only.

    Raises:
        EnvResultError: If there are more or fewer images than places.
    """
    if images and codec.images is not None and not codec.template.exists and not isinstance(prompt, str):
        problem = "the tokenizer has no chat template, so images have no place in a chat"
        raise EnvResultError(f"{problem}; give one with --chat-template FILE, or raw text with the model's own placeholders")
    try:
        return (without_images if codec.images is None else lifted)(prompt, images)
    except ValueError as error:
        raise EnvResultError(str(error)) from error


def _joined(first: Sequence[Message], second: Sequence[Message]) -> list[Message]:
    before, after = first[-1], second[0]
    texts = before["content"], after["content"]
    if before["role"] == after["role"] == "user" and all(isinstance(text, str) for text in texts):
        return [*first[:-1], Message(role="user", content="\n".join(texts)), *second[1:]]
    return [*first, *second]

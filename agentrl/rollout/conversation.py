"""What one agent reads and writes in an episode, token by token."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np

from agentrl.core.errors import EngineError
from agentrl.core.protocols import Engine, GenerationRequest
from agentrl.core.types import Generation, Message, Prompt, Sampling, Turn, ints
from agentrl.env.results import RawText
from agentrl.rollout.chat import ChatCodec, encode_prompt
from agentrl.rollout.settings import EpisodeSettings

Observation: TypeAlias = Prompt | None
"""As `check_reset` and `check_step` leave it: `RawText`, chat messages or nothing; or the task's prompt."""


class Conversation:
    """The tokens of one agent; they only ever grow: a turn's context is every token so far and those of the new observation.

    Args:
        name: Unique in the run; the prefix of the requests' names.
        engine: Samples the turns.
        codec: Of the model's tokenizer.
        settings: Budgets and sampling.
        seed_of: Seed of the turn with a number.

    Attributes:
        context: Every token up to the end of the last sampled turn.
        prompt: What comes before the next sampled turn.
        text: All text of `context`.
        turns: The sampled turns.
        unanswered: A sampled turn that the environment has not answered.
        budgets: Tokens that each turn was allowed.
        sampling: How the next turn is sampled.
        images: Images seen so far.
        parts: Named components of the reward.
    """

    def __init__(self, name: str, *, engine: Engine, codec: ChatCodec, settings: EpisodeSettings, seed_of: Callable[[int], int]) -> None:
        self.name, self._engine, self._codec, self._settings, self._seed_of = name, engine, codec, settings, seed_of
        self.sampling = settings.sampling
        self.context: list[int] = []
        self.prompt: list[int] = []
        self.text = ""
        self.turns: list[Turn] = []
        self.unanswered: Turn | None = None
        self.budgets: list[int] = []
        self.images: list[Any] = []
        self.parts: dict[str, float] = {}
        self._overflows = False
        self._early = 0.0  # rewards from before the first turn
        self._score: float | None = None

    @property
    def limit(self) -> int:
        """Tokens that the conversation may have."""
        return min(self._engine.max_model_len, self._settings.max_episode_tokens or self._engine.max_model_len)

    @property
    def limit_flag(self) -> str:
        """The flag that sets the limit."""
        return "--max-episode-tokens" if self.limit == self._settings.max_episode_tokens else "--max-model-len"

    @property
    def room(self) -> int:
        """Tokens that may still be sampled."""
        return 0 if self._overflows else self.limit - len(self.context) - len(self.prompt)

    @property
    def reward(self) -> float:
        """What was earned so far, before penalties."""
        return self._early if not self.turns else math.fsum(turn.reward for turn in self.turns)

    @property
    def score(self) -> float:
        """What was given at the last turn or since; else the reward, clipped to 0..1."""
        return min(max(self.reward, 0.0), 1.0) if self._score is None else self._score

    def begin(self, prompt: Prompt, opening: Sequence[Message] | None = None) -> None:
        """Take in the first prompt.

        Args:
            prompt: What the agent is told when it is to act.
            opening: What it was told before. A user's text at its end and at the beginning of `prompt` become one message,
                because many templates want the roles to alternate.
        """
        if opening is not None and not isinstance(prompt, str):
            self.prompt = self._codec.encode_chat(_joined(opening, prompt))
        elif opening is not None:
            self.prompt = self._codec.encode_chat(opening) + self._codec.encode_text(str(prompt))
        else:
            self.prompt = encode_prompt(self._codec, prompt, apply_chat_template=self._settings.apply_chat_template)

    def read(self, observation: Prompt) -> None:
        """Take in what is to come before the next turn: raw text as it is, messages by the chat template.

        What cannot fit is not taken in, and leaves no room.
        """
        self._overflows = self._codec.fewest_tokens(observation) > self.limit
        if self._overflows:
            return
        if isinstance(observation, RawText):
            self.prompt = self._codec.encode_text(observation)
        elif not isinstance(observation, str):
            self.prompt = self._codec.encode_next(observation, self.context[-1])

    async def generate(self, number: int) -> Turn:
        """Sample a turn; it is unanswered until it is settled.

        Args:
            number: Place of the turn in the episode.

        Raises:
            EngineError: If the engine failed, or its answer cannot be used.
        """
        own = len(self.turns)
        request = GenerationRequest(
            request_id=f"{self.name}-{own}",
            prompt_ids=ints(self.context + self.prompt),
            sampling=self._turn_sampling(own),
            session=self.name,
            images=tuple(self.images),
        )
        generation = await self._engine.generate(request)
        if not len(generation.token_ids) or not np.isfinite(generation.logprobs).all():
            raise EngineError(f"request {request.request_id}: the engine gave no token, or a log-probability that is not finite")
        self.unanswered = turn = self._turn(generation, number)
        return turn

    def settle(self, turn: Turn, reward: float, score: float | None, info: Mapping[str, float]) -> None:
        """Record the sampled turn and what it earned."""
        self.turns.append(replace(turn, reward=reward + self._early, info=info))
        self.budgets.append(self.sampling.max_tokens)
        self.context += [*self.prompt, *turn.token_ids.tolist()]
        self.text += turn.prompt_text + turn.text
        self._early, self._score, self.unanswered = 0.0, score, None

    def _turn(self, generation: Generation, number: int) -> Turn:
        return Turn(
            prompt_ids=ints(self.prompt),
            token_ids=generation.token_ids,
            logprobs=generation.logprobs,
            versions=generation.versions,
            finish_reason=generation.finish_reason,
            number=number,
            temperature=self.sampling.temperature,
            prompt_text=self._codec.decode(self.prompt),
            text=self._codec.decode(generation.token_ids.tolist()),
        )

    def earn(self, reward: float, score: float | None = None) -> None:
        """Add to what the last turn earned; before the first turn, to what it will earn.

        Args:
            reward: What is added.
            score: Success in 0..1, in place of what was given before; `None`: leave it.
        """
        if self.turns:
            self.turns[-1] = replace(self.turns[-1], reward=self.turns[-1].reward + reward)
        else:
            self._early += reward
        self._score = self._score if score is None else score

    def _turn_sampling(self, number: int) -> Sampling:
        sampling = self.sampling
        seed = self._seed_of(number) if sampling.seed is None else sampling.seed
        ends = tuple(dict.fromkeys((*sampling.stop_token_ids, *self._codec.end_token_ids)))
        return replace(sampling, seed=seed, max_tokens=min(sampling.max_tokens, self.room), stop_token_ids=ends)


def _joined(first: Sequence[Message], second: Sequence[Message]) -> list[Message]:
    before, after = first[-1], second[0]
    texts = before["content"], after["content"]
    if before["role"] == after["role"] == "user" and all(isinstance(text, str) for text in texts):
        return [*first[:-1], Message(role="user", content="\n".join(texts)), *second[1:]]
    return [*first, *second]

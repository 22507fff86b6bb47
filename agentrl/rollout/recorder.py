"""The recorder of sampled tokens, the same for every kind of environment."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from agentrl.core.altered import altered
from agentrl.core.errors import ContextLengthError, EngineError
from agentrl.core.images import PlacedImage, compacted
from agentrl.core.protocols import Engine, GenerationRequest, Structure, TokenListener
from agentrl.core.types import FinishReason, Generation, Sampling, Turn, experts_of, ints
from agentrl.rollout.chat import ChatCodec
from agentrl.rollout.episode_plan import EpisodePlan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """One continuation that the engine sampled."""

    number: int  # place among the recorder's requests, by when they began, from 0
    prompt_ids: list[int]  # [P]: every token that the engine was given
    generation: Generation  # its answer
    temperature: float  # temperature of the request
    budget: int  # tokens that the request was allowed, before the end of the context limits it
    placed: tuple[PlacedImage, ...] = ()  # images of the prompt


@dataclass(slots=True, eq=False)
class Context:
    """Tokens that only ever grow: what the policy read and wrote, one turn after another."""

    reason: str = ""  # why this context was opened beside others, which makes it a branch of the episode; "" for the first one
    tokens: list[int] = field(default_factory=list)  # [L]: every token up to the end of the last turn
    turns: list[Turn] = field(default_factory=list)  # its turns
    budgets: list[int] = field(default_factory=list)  # tokens that each turn was allowed
    placed: list[PlacedImage] = field(default_factory=list)  # images among its tokens
    masked: str = ""  # why its tokens are not trained; "" if they are

    def precedes(self, prompt_ids: Sequence[int], placed: Sequence[PlacedImage] = ()) -> bool:
        """Return True if a prompt begins with every token and image of this context."""
        if list(prompt_ids[: len(self.tokens)]) != self.tokens:
            return False
        # The tokens alone do not tell, as those of two images may be the same.
        return [each.image.key for each in self.placed] == [each.image.key for each in placed[: len(self.placed)]]

    def mask(self, reason: str) -> None:
        """Keep its tokens out of the training, for this reason."""
        self.masked = reason
        self.turns = [replace(turn, masked=reason) for turn in self.turns]

    def note(self, index: int, *, helper: str = "", rewritten: str = "") -> None:
        """Add texts for people to a turn."""
        turn = self.turns[index]
        self.turns[index] = replace(turn, helper=helper or turn.helper, rewritten=rewritten or turn.rewritten)

    def copy(self) -> Context:
        """A context with the same past that grows by itself."""
        return Context(self.reason, [*self.tokens], [*self.turns], [*self.budgets], [*self.placed], self.masked)

    def append(self, turn: Turn, budget: int) -> None:
        """Add a turn that goes on with this context."""
        self.turns.append(turn)
        self.budgets.append(budget)
        self.placed += [each.moved(len(self.tokens)) for each in turn.images]
        self.tokens += [*turn.prompt_ids.tolist(), *turn.token_ids.tolist()]


class Recorder:
    """Samples for one agent of an episode, and records what was sampled token by token.

    A front end decides what the policy reads, and to which context a sample belongs. There are three: a step environment
    (`agentrl.rollout.conversation`) has one context, and settles each turn when the environment has judged it; an executor
    (`agentrl.rollout.executor_episode`) samples freely, and its samples are attached to contexts when it is over; the endpoint
    of a black-box agent (`agentrl.rollout.endpoint`) finds the context of each request by its messages.
    """

    def __init__(self, name: str, *, engine: Engine, codec: ChatCodec, settings: EpisodePlan, seed_of: Callable[[int], int | None]) -> None:
        self.name, self.engine, self.codec, self.settings, self._seed_of = name, engine, codec, settings, seed_of
        self._num_requests = 0
        self.contexts: list[Context] = []  # in the order in which they were opened
        self.failure: EngineError | None = None  # the engine's latest error
        self.generate_s = 0.0  # summed over requests that overlap
        self.waits: list[tuple[int, float, float]] = []  # number of each request that ended, and when it began and ended, by `perf_counter`
        self.is_over = False  # later requests are refused

    @cached_property
    def limit(self) -> int:
        """Tokens that a context may have."""
        return min(self.engine.max_model_len, self.settings.rollout.max_episode_tokens or self.engine.max_model_len)

    @property
    def limit_flag(self) -> str:
        """The flag that sets the limit."""
        return "--max-episode-tokens" if self.limit == self.settings.rollout.max_episode_tokens else "--max-model-len"

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The turns of all contexts, one context after another."""
        return tuple(turn for context in self.contexts for turn in context.turns)

    @property
    def budgets(self) -> list[int]:
        """Tokens that each of `turns` was allowed."""
        return [budget for context in self.contexts for budget in context.budgets]

    def open(self, reason: str = "") -> Context:
        """A new context, with the reason why it is needed beside the others; "" for the first."""
        self.contexts.append(Context(reason))
        return self.contexts[-1]

    def go_on(self, context: Context) -> None:
        """Begin with a context of another recorder; the next request has the number that the next turn had there."""
        self.contexts, self._num_requests = [context], len(context.turns)

    def reserve(self) -> int:
        """Number of the next request."""
        number, self._num_requests = self._num_requests, self._num_requests + 1
        return number

    async def abort(self, number: int) -> None:
        """End a request under way: its `sample` returns what was sampled so far, perhaps nothing."""
        await self.engine.abort(f"{self.name}-{number}")

    async def sample(
        self,
        prompt_ids: list[int],
        sampling: Sampling,
        images: Sequence[Any] = (),
        *,
        placed: Sequence[PlacedImage] = (),
        number: int | None = None,
        structure: Structure | None = None,
        on_tokens: TokenListener | None = None,
    ) -> Sample:
        """Sample one continuation of a whole context; requests may overlap, and have numbers from `reserve`.

        `images` are those that a model of text cannot read, `placed` those in the prompt, which is an expanded one.

        A seed and the tokens that end a turn are added to the settings, and `max_tokens` is cut to the room there is. With a `structure`
        the tokens are no samples of the policy, and must not be trained. `on_tokens` is told of tokens as they are sampled, by engines that
        do so.

        Raises:
            ContextLengthError: If the prompt leaves no room for one token.
            StructureError: If the engine cannot hold the text to the structure.
            EngineError: If the engine failed, its answer cannot be used, or the episode is over.
        """
        number = self.reserve() if number is None else number
        start = time.perf_counter()
        try:
            held = self._held(number, prompt_ids, sampling)
            request = GenerationRequest(
                request_id=f"{self.name}-{number}",
                prompt_ids=ints(prompt_ids),
                sampling=held,
                session=self.name,
                images=tuple(images),
                placed=tuple(placed),
                structure=structure,
                on_tokens=on_tokens,
            )
            generation = await self.engine.generate(request)
            is_empty = not len(generation.token_ids) and generation.finish_reason is not FinishReason.ABORTED
            if is_empty or not np.isfinite(generation.logprobs).all():
                problem = "the engine gave no token, or a log-probability that is not finite"
                raise EngineError(f"request {self.name}-{number}: {problem}")
        except EngineError as error:
            self.failure = error
            raise
        finally:
            end = time.perf_counter()
            self.generate_s += end - start
            self.waits.append((number, start, end))
        return Sample(
            number=number,
            prompt_ids=prompt_ids,
            generation=generation,
            temperature=sampling.temperature,
            budget=sampling.max_tokens,
            placed=tuple(placed),
        )

    def turn(self, sample: Sample, context: Context, number: int | None = None) -> Turn:
        """The turn that a sample makes of a context that its prompt extends, which is left as it is; `number` defaults to the request's."""
        generation, prompt_ids = sample.generation, sample.prompt_ids[len(context.tokens) :]
        images = tuple(each.moved(-len(context.tokens)) for each in sample.placed if each.place >= len(context.tokens))
        experts, first = generation.experts, max(0, len(context.tokens) - 1)  # the last sampled token was never computed until now
        return Turn(
            prompt_ids=ints(prompt_ids),
            token_ids=generation.token_ids,
            logprobs=generation.logprobs,
            versions=generation.versions,
            finish_reason=generation.finish_reason,
            fresh=bool(context.reason) and not context.turns,
            number=sample.number if number is None else number,
            temperature=sample.temperature,
            prompt_text=self.codec.decode(compacted(prompt_ids, images) if images else prompt_ids),
            masked=context.masked,
            branch_reason="" if context.turns else context.reason,
            text=self.codec.decode(generation.token_ids.tolist()),
            experts=None if experts is None else experts_of(experts[first:]),
            images=images,
        )

    def longest(self, sample: Sample) -> Context | None:
        """The longest context that the prompt of a sample extends; `None` if it extends none."""
        fitting = [context for context in self.contexts if context.precedes(sample.prompt_ids, sample.placed)]
        return max(fitting, key=lambda context: len(context.tokens), default=None)

    def add(self, sample: Sample, context: Context | None, reason: str = "", masked: str = "") -> Context:
        """Add a sample to a context that its prompt is known to extend, or to a new one, opened for this reason; returns the context.

        `masked` says why a new context is recorded and not trained.
        """
        context = context or self.open(reason if self.contexts else "")
        context.masked = masked or context.masked
        context.append(self.turn(sample, context), sample.budget)
        return context

    def detach(self, context: Context, reason: str) -> None:
        """Move the last turn of a context to one of its own that is not trained, for this reason."""
        if len(context.turns) == 1:
            context.mask(reason)
            return
        turn, budget = context.turns.pop(), context.budgets.pop()
        before = context.tokens[: len(context.tokens) - len(turn.prompt_ids) - len(turn.token_ids)]
        context.tokens, own = before, self.open(reason)
        images, context.placed = tuple(context.placed), [each for each in context.placed if each.place < len(before)]
        own.masked = reason
        whole = ints([*before, *turn.prompt_ids.tolist()])
        # The experts belong to the new tokens alone, while this prompt has all tokens, so they are left out.
        own.append(replace(turn, prompt_ids=whole, images=images, fresh=True, masked=reason, experts=None), budget)

    def end(self) -> None:
        """The episode is over: later requests are refused."""
        self.is_over = True

    def _held(self, number: int, prompt_ids: list[int], sampling: Sampling) -> Sampling:
        """The settings of a request, with its seed, every token that ends a turn, and no more tokens than there is room for."""
        name, room = f"{self.name}-{number}", self.limit - len(prompt_ids)
        if self.is_over:
            raise EngineError(f"request {name}: the episode is over, so nothing is sampled for it any more")
        if room < 1:
            problem = f"a prompt of {len(prompt_ids)} tokens leaves no room in a context of {self.limit}"
            raise ContextLengthError(f"request {name}: {problem}; shorten it, or raise --max-model-len or --max-episode-tokens")
        seed = self._seed_of(number) if sampling.seed is None else sampling.seed
        ends = tuple(dict.fromkeys((*sampling.stop_token_ids, *self.codec.end_token_ids)))
        return altered(sampling, seed=seed, max_tokens=min(sampling.max_tokens, room), stop_token_ids=ends)

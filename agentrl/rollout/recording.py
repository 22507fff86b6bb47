"""The policy as an executor sees it: every call is recorded, and the calls become the turns of a trajectory."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from agentrl.core.errors import ContextLengthError, EngineError
from agentrl.core.protocols import Engine, GenerationRequest
from agentrl.core.types import Generation, Prompt, Sampling, Turn, as_messages, ints
from agentrl.env.agent import SamplingParams
from agentrl.env.executor import Completion, Policy
from agentrl.env.results import bad_result, check_sampling
from agentrl.rollout.chat import ChatCodec, encode_prompt
from agentrl.rollout.settings import EpisodeSettings

WHERE = "llm.generate"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Call:
    """One call that was answered.

    Attributes:
        number: Place among the calls, by when they began.
        prompt_ids: What the engine was given. # [P]
        generation: What it answered.
        temperature: It was sampled at.
        budget: Tokens that the call was allowed, before the context's end limits it.
    """

    number: int
    prompt_ids: list[int]
    generation: Generation
    temperature: float
    budget: int


class RecordingPolicy(Policy):
    """Samples for one episode and keeps what was sampled.

    Args:
        name: Of the episode; the prefix of the requests' names.
        engine: Samples.
        codec: Of the model's tokenizer.
        settings: Budgets and sampling.
        seed_of: Seed of the call with a number.
        images: Images of the task.

    Attributes:
        failure: The engine's latest error, `None` without any.
        generate_s: Seconds in calls, summed over calls that overlap.
    """

    def __init__(
        self,
        name: str,
        *,
        engine: Engine,
        codec: ChatCodec,
        settings: EpisodeSettings,
        seed_of: Callable[[int], int],
        images: Sequence[Any] = (),
    ) -> None:
        self._name, self._engine, self._codec, self._settings, self._seed_of = name, engine, codec, settings, seed_of
        self._images = tuple(images)
        self._calls: list[tuple[Completion, Call]] = []  # in order of completion
        self._begun = 0
        self._over = False
        self.failure: EngineError | None = None
        self.generate_s = 0.0

    @property
    def tokenizer(self) -> Any:
        """As `Policy.tokenizer`."""
        return self._codec.tokenizer

    @property
    def max_length(self) -> int:
        """As `Policy.max_length`."""
        return min(self._engine.max_model_len, self._settings.max_episode_tokens or self._engine.max_model_len)

    @property
    def sampling(self) -> SamplingParams:
        """As `Policy.sampling`."""
        return given(self._settings.sampling)

    @property
    def calls(self) -> list[Call]:
        """What was sampled and not discarded, in order of completion."""
        return [call for _, call in self._calls]

    async def generate(self, prompt_ids: Sequence[int], sampling: Mapping[str, Any] | None = None) -> Completion:
        """As `Policy.generate`."""
        prompt = _token_ids(prompt_ids)
        changed = replace(self._settings.sampling, **(check_sampling(sampling, WHERE, self.sampling) or {}))
        number, self._begun = self._begun, self._begun + 1
        start = time.perf_counter()
        try:
            generation = await self._sample(number, prompt, changed)
        except EngineError as error:
            self.failure = error
            raise
        finally:
            self.generate_s += time.perf_counter() - start
        completion = Completion(
            prompt_ids=tuple(prompt),
            token_ids=tuple(generation.token_ids.tolist()),
            logprobs=tuple(generation.logprobs.tolist()),
            versions=tuple(generation.versions.tolist()),
            text=self._codec.decode_action(generation.token_ids.tolist()),
            finish_reason=str(generation.finish_reason),
        )
        call = Call(number=number, prompt_ids=prompt, generation=generation, temperature=changed.temperature, budget=changed.max_tokens)
        if not self._over:
            self._calls.append((completion, call))
        return completion

    def discard(self, completion: Completion) -> None:
        """As `Policy.discard`."""
        self._calls = [(kept, call) for kept, call in self._calls if kept is not completion]

    def encode(self, text: str) -> list[int]:
        """As `Policy.encode`."""
        return self._codec.encode_text(text)

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        """As `Policy.encode_prompt`."""
        return encode_prompt(self._codec, prompt, apply_chat_template=self._settings.apply_chat_template)

    def encode_next(self, messages: Prompt, after: Completion) -> list[int]:
        """As `Policy.encode_next`."""
        return self._codec.encode_next(as_messages(messages), after.token_ids[-1])

    def decode(self, ids: Sequence[int]) -> str:
        """As `Policy.decode`."""
        return self._codec.decode(ids)

    def end(self) -> None:
        """The episode is over: later calls are refused, and those under way are not recorded."""
        self._over = True

    async def _sample(self, number: int, prompt: list[int], sampling: Sampling) -> Generation:
        name, room = f"{self._name}-{number}", self.max_length - len(prompt)
        if self._over:
            raise EngineError(f"request {name}: the episode is over, so nothing is sampled for it any more")
        if room < 1:
            problem = f"a prompt of {len(prompt)} tokens leaves no room in a context of {self.max_length}"
            raise ContextLengthError(f"request {name}: {problem}; shorten it, or raise --max-model-len or --max-episode-tokens")
        seed = self._seed_of(number) if sampling.seed is None else sampling.seed
        ends = tuple(dict.fromkeys((*sampling.stop_token_ids, *self._codec.end_token_ids)))
        request = GenerationRequest(
            request_id=name,
            prompt_ids=ints(prompt),
            sampling=replace(sampling, seed=seed, max_tokens=min(sampling.max_tokens, room), stop_token_ids=ends),
            session=self._name,
            images=self._images,
        )
        generation = await self._engine.generate(request)
        if not len(generation.token_ids) or not np.isfinite(generation.logprobs).all():
            raise EngineError(f"request {name}: the engine gave no token, or a log-probability that is not finite")
        return generation


def turns_of(calls: Sequence[Call], decode: Callable[[Sequence[int]], str]) -> tuple[tuple[Turn, ...], list[int]]:
    """The turns that calls make, branch by branch.

    A call whose prompt begins with every token of a branch goes on with it, with the longest such branch if there are
    several; any other opens a new one. So calls that overlap, sub-agents and rewritten contexts each keep the tokens that
    the engine saw.

    Args:
        calls: In order of completion.
        decode: Text of token ids.

    Returns:
        The turns, and the tokens that each was allowed.
    """
    branches: list[list[tuple[Turn, Call]]] = []
    tokens: list[list[int]] = []
    for call in calls:
        fitting = [number for number, so_far in enumerate(tokens) if call.prompt_ids[: len(so_far)] == so_far]
        if fitting:
            place = max(fitting, key=lambda number: len(tokens[number]))
        else:
            place = len(branches)
            branches.append([])
            tokens.append([])
        fresh = place > 0 and not branches[place]
        branches[place].append((_turn(call, call.prompt_ids[len(tokens[place]) :], fresh, decode), call))
        tokens[place] = [*call.prompt_ids, *call.generation.token_ids.tolist()]
    ordered = [pair for branch in branches for pair in branch]
    return tuple(turn for turn, _ in ordered), [call.budget for _, call in ordered]


def given(sampling: Sampling) -> SamplingParams:
    """What the user sees; the seed is left out, so that handing the settings back does not fix it for all later turns."""
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_tokens,
        stop=list(sampling.stop),
        stop_token_ids=list(sampling.stop_token_ids),
    )


def _turn(call: Call, prompt_ids: list[int], fresh: bool, decode: Callable[[Sequence[int]], str]) -> Turn:
    generation = call.generation
    return Turn(
        prompt_ids=ints(prompt_ids),
        token_ids=generation.token_ids,
        logprobs=generation.logprobs,
        versions=generation.versions,
        finish_reason=generation.finish_reason,
        fresh=fresh,
        number=call.number,
        temperature=call.temperature,
        prompt_text=decode(prompt_ids),
        text=decode(generation.token_ids.tolist()),
    )


def _token_ids(value: Any) -> list[int]:
    plain = value.tolist() if callable(getattr(value, "tolist", None)) else value
    if not isinstance(plain, Sequence) or isinstance(plain, str) or not plain or not all(type(token) is int for token in plain):
        raise bad_result(WHERE, "prompt_ids", value, "must be a list of token ids, at least one; llm.encode makes them of text")
    return list(plain)

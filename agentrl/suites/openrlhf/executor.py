"""OpenRLHF's executors that override `execute`: they get an engine that looks like vLLM's and records what it samples."""

from __future__ import annotations

import asyncio
import copy
import inspect
from collections.abc import Awaitable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol, cast

from agentrl.core.errors import ContextLengthError, EngineError, EnvLoadError, EnvResultError
from agentrl.core.protocols import GenerationRequest
from agentrl.core.types import FinishReason, Generation, Task, Trajectory, floats, ints
from agentrl.env.agent import AgentClass, AgentInstance, SamplingParams, StepResult, StepState
from agentrl.env.executor import Completion, Executor, Policy, Sampler
from agentrl.env.results import SAMPLING_KEYS, RawText, bad_result, clipped_score
from agentrl.suites.openrlhf.agents import PLAY

NEEDED = ("observation_tokens", "action_ranges", "reward")
NO_REWARD = (
    "OpenRLHF would have a reward model score it, and here `execute` must return a number: call your reward function or server in it "
    "(in `run_agent`, return its reward); raise an exception for a failure"
)


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log-probability of one token, in vLLM's form."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One sampled continuation, in vLLM's form."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]]
    finish_reason: str
    stop_reason: int | str | None = None
    cumulative_logprob: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """The answer to one request, in vLLM's form."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True


class RecordingPolicy(Protocol):
    """The runtime's policy with what executors of OpenRLHF need besides `Policy`."""

    async def sample(self, prompt_ids: Sequence[int], sampling: Mapping[str, Any] | None = None) -> tuple[Completion, Any]:
        """As `Policy.generate`, but recorded only by `keep`; returns the completion and its sample."""

    def keep(self, completion: Completion, sample: Any) -> None:
        """Record a completion, whichever policy of the same worker sampled it."""

    async def play(
        self, cls: AgentClass, task: Task, *, sampling: Mapping[str, Any], max_length: int, sampler: Sampler
    ) -> tuple[Trajectory, list[StepResult]]:
        """Play one episode of at most `max_length` tokens; return what was sampled, and the result of `step` for each turn."""

    def encode(self, text: str) -> list[int]:
        """As `agentrl.env.executor.Policy.encode`."""

    def decode(self, ids: Sequence[int]) -> str:
        """As `agentrl.env.executor.Policy.decode`."""


@dataclass(slots=True, eq=False)
class RunningEpisode:
    """One episode of an executor, while its `execute` runs."""

    llm: RecordingPolicy
    prompt: str  # as its chat template renders it
    loop: asyncio.AbstractEventLoop
    number: int  # of episodes that began before it
    requests: int = 0  # sampled for it


@dataclass(frozen=True, slots=True, eq=False)
class Recorded:
    """One completion, until an episode claims it."""

    completion: Completion
    sample: Any
    episode: RunningEpisode  # for which it was sampled


ASKING: ContextVar[RunningEpisode] = ContextVar("ASKING")
"""The episode whose `execute` is running in this context."""


class SharedEngine:
    """The `llm_engine` of an executor, the same object for all of its episodes.

    An executor may keep the engine of its first episode, and may ask it from a server of its own, on another thread and loop, where no
    context says for which episode. So whatever is asked is sampled for an episode that runs: the one that asks if that is known, else one
    whose prompt fits. At its end an episode claims the completions that its result is made of, which decides where they are trained.
    """

    partial_rollout = False
    mask_offpolicy_in_partial_rollout = False

    def __init__(self) -> None:
        self._running: list[RunningEpisode] = []  # in the order in which they began
        self._unclaimed: list[Recorded] = []  # in the order in which they were sampled
        self._failure: tuple[int, EngineError] | None = None  # latest error, and the number of episodes that had begun before it
        self._begun = self._sampled = 0  # episodes, and completions
        self._version = 0

    async def generate(self, prompt_token_ids: Sequence[int], sampling_params: Any, multi_modal_data: Any = None) -> RequestOutput:
        """Sample one continuation with vLLM's `SamplingParams`; `EnvResultError` for images, `n` above 1 and settings out of range."""
        if multi_modal_data:
            raise bad_result("llm_engine.generate", "multi_modal_data", multi_modal_data, "this engine takes text only")
        if (getattr(sampling_params, "n", 1) or 1) != 1:
            raise bad_result("llm_engine.generate", "sampling_params.n", sampling_params.n, "call it once for each continuation")
        running, asking = list(self._running), ASKING.get(None)
        if not running:
            raise EngineError("llm_engine.generate was called while no episode of the executor runs, so nothing is sampled")
        loop = asking.loop if asking in running else running[0].loop
        sampling = self._sample(asking, list(prompt_token_ids), chosen_sampling(sampling_params))
        # A server of the executor has a loop of its own, and the engine belongs to that of the episodes.
        if asyncio.get_running_loop() is loop:
            done = await sampling
        else:
            done = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(sampling, loop))
        output = CompletionOutput(
            index=0,
            text=done.text,
            token_ids=list(done.token_ids),
            logprobs=[{token: Logprob(value)} for token, value in zip(done.token_ids, done.logprobs, strict=True)],
            finish_reason=done.finish_reason,
            cumulative_logprob=sum(done.logprobs),
        )
        return RequestOutput(request_id=str(self._sampled), prompt_token_ids=list(prompt_token_ids), outputs=[output])

    def get_weight_version(self) -> int:
        """Newest policy version seen so far; versions of tokens are recorded beside them, whatever this says."""
        return self._version

    def begin(self, llm: RecordingPolicy, prompt: str) -> RunningEpisode:
        """Note that an episode with this rendered prompt runs from now on."""
        episode = RunningEpisode(llm, prompt, asyncio.get_running_loop(), self._begun)
        self._begun += 1
        self._running.append(episode)
        return episode

    def end(self, episode: RunningEpisode) -> None:
        """Note that an episode has ended; completions sampled for it that nobody has claimed stay for the others while any of them runs."""
        self._running.remove(episode)
        if not self._running:
            self._unclaimed.clear()

    def own(self, episode: RunningEpisode) -> list[Recorded]:
        """Unclaimed completions, those that were sampled for the episode first."""
        return sorted(self._unclaimed, key=lambda recorded: recorded.episode is not episode)

    def claim(self, recorded: Sequence[Recorded], episode: RunningEpisode) -> None:
        """Record completions in the episode whose result they are part of."""
        for item in recorded:
            self._unclaimed.remove(item)
            episode.llm.keep(item.completion, item.sample)

    def failure_since(self, episode: RunningEpisode) -> EngineError | None:
        """The engine's latest error since an episode began in an answer to a server of the executor, which hides it from `execute`."""
        return self._failure[1] if self._failure is not None and self._failure[0] > episode.number else None

    async def _sample(self, asking: RunningEpisode | None, prompt_ids: list[int], sampling: Mapping[str, Any]) -> Completion:
        """Sample for the episode that asks, if it is known and runs, else for one that fits; on the loop of the episodes."""
        known = asking in self._running
        episode = asking if asking is not None and known else self._fitting(prompt_ids)
        episode.requests += 1
        try:
            completion, sample = await episode.llm.sample(prompt_ids, sampling)
        except EngineError as error:
            if not known and not isinstance(error, ContextLengthError):
                self._failure = self._begun, error
            raise
        self._sampled += 1
        self._version = max(self._version, *completion.versions)
        self._unclaimed.append(Recorded(completion, sample, episode))
        return completion

    def _fitting(self, prompt_ids: list[int]) -> RunningEpisode:
        """An episode to sample for: one whose completion the prompt extends, or whose first prompt it has, and of those the least busy."""
        earlier = {item.episode for item in self._unclaimed if prompt_ids[: len(item.completion.ids)] == item.completion.ids}
        text = self._running[0].llm.decode(prompt_ids)
        fits = [episode for episode in self._running if episode in earlier]
        fits = fits or [episode for episode in self._running if episode.prompt in text]
        return min(fits or self._running, key=lambda episode: episode.requests)


class OpenRLHFExecutor(Executor):
    """Runs an executor of OpenRLHF's; `shared` and `engine` are set by `as_executor`.

    As in OpenRLHF there is one executor in a process, and its `execute` runs many times side by side.
    """

    shared: ClassVar[Any]
    engine: ClassVar[SharedEngine]

    async def execute(self, task: Task, llm: Policy) -> StepResult:
        """Call `execute` as OpenRLHF does, and check what it returns against what was sampled."""
        original, policy = type(self.shared), cast("RecordingPolicy", llm)
        options = {"images": list(task.images) or None} if _takes_images(original) else {}
        prompt = llm.decode(llm.encode_prompt(task.prompt))

        def play_again(cls: Any, prompt: str, label: Any, params: Any, max_length: int, llm_engine: Any) -> Awaitable[dict[str, Any]]:
            return play(policy, cls, replace(task, prompt=prompt, label=label), params, max_length, llm_engine)

        PLAY.set(play_again)
        episode = self.engine.begin(policy, prompt)
        ASKING.set(episode)
        where = f"{Path(inspect.getsourcefile(original) or '').name}: {original.__name__}.execute"
        used: list[Recorded] = []
        try:
            params = _sampling_params(llm)
            value = await self.shared.execute(prompt, task.label, params, llm.max_length, llm.tokenizer, self.engine, **options)
            used = _used(value, self.engine.own(episode), where)
            return _result(value, where)
        except Exception as error:
            used = used or [recorded for recorded in self.engine.own(episode) if recorded.episode is episode]  # for the record
            failure = self.engine.failure_since(episode)
            # A result that cannot be used is the executor's own fault, whatever became of the engine.
            if failure is not None and not isinstance(error, EnvResultError):
                raise failure from error
            raise
        finally:
            self.engine.claim(used, episode)
            self.engine.end(episode)


def as_executor(flag: str, spec: str, shared: Any) -> type[OpenRLHFExecutor]:
    """Return the class that plays episodes of an executor that overrides `execute`, which must be an ``async def``."""
    cls = type(shared)
    if not inspect.iscoroutinefunction(cls.execute):
        raise EnvLoadError(flag, spec, f"{cls.__name__}.execute is a plain def", "Write async def: it has to wait for llm_engine.generate.")
    body = {"shared": shared, "engine": SharedEngine(), "__module__": cls.__module__, "__doc__": cls.__doc__}
    return type(cls.__name__, (OpenRLHFExecutor,), body)


def _takes_images(cls: type[Any]) -> bool:
    parameters = inspect.signature(cls.execute).parameters.values()
    return any(parameter.name == "images" or parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def _sampling_params(llm: Policy) -> SamplingParams:
    """Our settings, with the entries that executors look at; log-probabilities always come."""
    return SamplingParams(copy.deepcopy(dict(llm.sampling)), n=1, logprobs=1, min_tokens=0, skip_special_tokens=False, seed=None)


def _used(value: Any, sampled: Sequence[Recorded], where: str) -> list[Recorded]:
    """Return the completions that the action ranges are made of; `EnvResultError` for a token that was not sampled right there."""
    if not isinstance(value, Mapping):
        raise bad_result(where, "result", value, f"return a dictionary with {', '.join(NEEDED)}")
    missing = [key for key in NEEDED if key not in value]
    if missing:
        raise bad_result(where, "result", value, f"the key {missing[0]!r} is missing")
    tokens = _ints(value["observation_tokens"], where, "observation_tokens")
    left, used = list(sampled), []
    for index, entry in enumerate(_sequence(value["action_ranges"], where, "action_ranges")):
        field = f"action_ranges[{index}]"
        bounds = _ints(entry, where, field)
        if len(bounds) != 2 or not 0 <= bounds[0] < bounds[1] <= len(tokens):
            raise bad_result(where, field, entry, f"must be (start, end) within the {len(tokens)} observation_tokens")
        place, end = bounds
        while place < end:
            found = next((item for item in left if _is_at(item.completion, tokens, place, end)), None)
            if found is None:
                raise _not_sampled(where, field, tokens, place, end, [item.completion for item in left])
            left.remove(found)
            used.append(found)
            place += len(found.completion.token_ids)
    return used


def _is_at(done: Completion, tokens: list[int], place: int, end: int) -> bool:
    size = len(done.token_ids)
    return place + size <= end and list(done.token_ids) == tokens[place : place + size] and list(done.prompt_ids) == tokens[:place]


def _not_sampled(where: str, field: str, tokens: list[int], place: int, end: int, left: Sequence[Completion]) -> EnvResultError:
    shown = tokens[place:end]
    same = [done for done in left if list(done.token_ids) == shown[: len(done.token_ids)]]
    if same:
        problem = "were sampled, but after other tokens than those before them in observation_tokens, so they cannot be trained there"
    else:
        problem = "are not what llm_engine.generate sampled there; give back its token ids as they are, and tokenise nothing again"
    text = ", ".join(map(str, shown[:12])) + (", ..." if len(shown) > 12 else "")
    return EnvResultError(f"{where} returned {field}: tokens {place} to {end - 1} of observation_tokens ({text}) {problem}")


def _result(value: Mapping[str, Any], where: str) -> StepResult:
    """The rest of the answer; what it holds is checked with every other result."""
    logs = value.get("extra_logs") or {}
    if not isinstance(logs, Mapping):
        raise bad_result(where, "extra_logs", logs, "must be a dictionary of names and numbers")
    if value["reward"] is None:
        raise bad_result(where, "reward", None, NO_REWARD)
    score = None if value.get("scores") is None else clipped_score(value["scores"], where, "scores")
    return StepResult(value["reward"], terminated=True, score=score, info=logs, truncated=bool(value.get("truncated", False)))


def _sequence(value: Any, where: str, field: str) -> Sequence[Any]:
    plain = value.tolist() if callable(getattr(value, "tolist", None)) else value
    if not isinstance(plain, Sequence) or isinstance(plain, str):
        raise bad_result(where, field, value, "must be a list")
    return plain


def _ints(value: Any, where: str, field: str) -> list[int]:
    numbers = list(_sequence(value, where, field))
    if not all(type(number) is int for number in numbers):
        raise bad_result(where, field, value, "must hold whole numbers")
    return numbers


class Unjudged(AgentInstance):
    """An environment of one turn that earns nothing: the override of `execute` says what it is worth."""

    def step(self, state: StepState, /) -> StepResult:
        """End the episode."""
        return StepResult(terminated=True)


def chosen_sampling(params: Any) -> dict[str, Any]:
    """The settings that are set in vLLM's `SamplingParams`, or in an object with the same names."""
    settings = {key: getattr(params, key, None) for key in SAMPLING_KEYS}
    return {key: value for key, value in settings.items() if value is not None}


async def play(
    player: RecordingPolicy, cls: AgentClass | None, task: Task, params: Any, max_length: int, llm_engine: Any
) -> dict[str, Any]:
    """Play one episode with the executor's engine (`None`: nothing judges it); return the dictionary that `execute` returns."""

    async def sample(request: GenerationRequest) -> Generation:
        asked = request.sampling
        settings = SamplingParams({key: getattr(asked, key) for key in SAMPLING_KEYS if getattr(asked, key) is not None}, n=1)
        output = (await llm_engine.generate(request.prompt_ids.tolist(), settings)).outputs[0]
        return Generation(
            token_ids=ints(output.token_ids),
            logprobs=floats([entry[token].logprob for token, entry in zip(output.token_ids, output.logprobs, strict=True)]),
            versions=ints([0] * len(output.token_ids)),  # those that are trained on are recorded where llm_engine samples
            finish_reason=FinishReason(output.finish_reason),
        )

    trajectory, results = await player.play(cls or Unjudged, task, sampling=chosen_sampling(params), max_length=max_length, sampler=sample)
    last = results[-1].observation if results and (results[-1].terminated or results[-1].truncated) else None
    return {
        "prompt": task.prompt,
        "label": task.label,
        **_tokens(trajectory, player.encode(last) if isinstance(last, RawText) else []),
        **_earned(trajectory, results if cls is not None else []),
    }


def _tokens(trajectory: Trajectory, feedback: Sequence[int]) -> dict[str, Any]:
    """Every token of the episode, the ranges of the sampled ones, and their log-probabilities."""
    tokens: list[int] = []
    logprobs: list[float] = []
    ranges: list[tuple[int, int]] = []
    for turn in trajectory.turns:
        tokens += turn.prompt_ids.tolist()
        ranges.append((len(tokens), len(tokens) + len(turn.token_ids)))
        tokens += turn.token_ids.tolist()
        logprobs += [*[0.0] * len(turn.prompt_ids), *turn.logprobs.tolist()]
    return {"observation_tokens": [*tokens, *feedback], "action_ranges": ranges, "rollout_log_probs": [*logprobs, *[0.0] * len(feedback)]}


def _earned(trajectory: Trajectory, results: Sequence[StepResult]) -> dict[str, Any]:
    reward = sum(result.reward for result in results) if results else None
    score = results[-1].score if results else None
    return {
        "reward": reward,
        "scores": reward if score is None else score,
        "truncated": trajectory.truncated_by_length or trajectory.status == "truncated",
        "extra_logs": dict(trajectory.metrics),
    }

"""OpenRLHF's executors that override `execute`: they get an engine that looks like vLLM's and records what it samples."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol, cast

from agentrl.core.errors import EnvLoadError, EnvResultError
from agentrl.core.protocols import GenerationRequest
from agentrl.core.types import FinishReason, Generation, Task, Trajectory, floats, ints
from agentrl.env.agent import AgentClass, AgentInstance, SamplingParams, StepResult, StepState
from agentrl.env.executor import Completion, Executor, Policy, Sampler
from agentrl.env.openrlhf.agents import PLAY
from agentrl.env.results import SAMPLING_KEYS, RawText, bad_result, clipped_score

NEEDED = ("observation_tokens", "action_ranges", "reward")


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


class RecordingEngine:
    """The `llm_engine` of an executor, which records what it samples; one per episode."""

    partial_rollout = False
    mask_offpolicy_in_partial_rollout = False

    def __init__(self, llm: Policy) -> None:
        self._llm = llm
        self._version = 0
        self.completions: list[Completion] = []

    async def generate(self, prompt_token_ids: Sequence[int], sampling_params: Any, multi_modal_data: Any = None) -> RequestOutput:
        """Sample one continuation with vLLM's `SamplingParams`; `EnvResultError` for images, `n` above 1 and settings out of range."""
        if multi_modal_data:
            raise bad_result("llm_engine.generate", "multi_modal_data", multi_modal_data, "this engine takes text only")
        if (getattr(sampling_params, "n", 1) or 1) != 1:
            raise bad_result("llm_engine.generate", "sampling_params.n", sampling_params.n, "call it once for each continuation")
        done = await self._llm.generate(prompt_token_ids, chosen_sampling(sampling_params))
        self._version = max(self._version, *done.versions)
        self.completions.append(done)
        output = CompletionOutput(
            index=0,
            text=done.text,
            token_ids=list(done.token_ids),
            logprobs=[{token: Logprob(value)} for token, value in zip(done.token_ids, done.logprobs, strict=True)],
            finish_reason=done.finish_reason,
            cumulative_logprob=sum(done.logprobs),
        )
        return RequestOutput(request_id=str(len(self.completions)), prompt_token_ids=list(prompt_token_ids), outputs=[output])

    def get_weight_version(self) -> int:
        """Newest policy version seen in this episode; versions of tokens are recorded beside them, whatever this says."""
        return self._version


class OpenRLHFExecutor(Executor):
    """Runs an executor of OpenRLHF's; `shared` is set by `as_executor`.

    As in OpenRLHF there is one executor in a process, and its `execute` runs many times side by side.
    """

    shared: ClassVar[Any]

    async def execute(self, task: Task, llm: Policy) -> StepResult:
        """Call `execute` as OpenRLHF does, and check what it returns against what was sampled."""
        original, engine = type(self.shared), RecordingEngine(llm)
        options = {"images": list(task.images) or None} if _takes_images(original) else {}
        prompt = llm.decode(llm.encode_prompt(task.prompt))

        def play_again(cls: Any, prompt: str, label: Any, params: Any, max_length: int, llm_engine: Any) -> Awaitable[dict[str, Any]]:
            return play(cast("StepPlayer", llm), cls, replace(task, prompt=prompt, label=label), params, max_length, llm_engine)

        PLAY.set(play_again)
        value = await self.shared.execute(prompt, task.label, _sampling_params(llm), llm.max_length, llm.tokenizer, engine, **options)
        where = f"{Path(inspect.getsourcefile(original) or '').name}: {original.__name__}.execute"
        used = _used(value, engine.completions, where)
        for completion in engine.completions:
            if completion not in used:
                llm.discard(completion)
        return _result(value, where)


def as_executor(flag: str, spec: str, shared: Any) -> type[OpenRLHFExecutor]:
    """Return the class that plays episodes of an executor that overrides `execute`, which must be an ``async def``."""
    cls = type(shared)
    if not inspect.iscoroutinefunction(cls.execute):
        raise EnvLoadError(flag, spec, f"{cls.__name__}.execute is a plain def", "Write async def: it has to wait for llm_engine.generate.")
    return type(cls.__name__, (OpenRLHFExecutor,), {"shared": shared, "__module__": cls.__module__, "__doc__": cls.__doc__})


def _takes_images(cls: type[Any]) -> bool:
    parameters = inspect.signature(cls.execute).parameters.values()
    return any(parameter.name == "images" or parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def _sampling_params(llm: Policy) -> SamplingParams:
    """Our settings, with the entries that executors look at; log-probabilities always come."""
    return SamplingParams(copy.deepcopy(dict(llm.sampling)), n=1, logprobs=1, min_tokens=0, skip_special_tokens=False, seed=None)


def _used(value: Any, completions: Sequence[Completion], where: str) -> list[Completion]:
    """Return the completions that the action ranges are made of; `EnvResultError` for a token that was not sampled right there."""
    if not isinstance(value, Mapping):
        raise bad_result(where, "result", value, f"return a dictionary with {', '.join(NEEDED)}")
    missing = [key for key in NEEDED if key not in value]
    if missing:
        raise bad_result(where, "result", value, f"the key {missing[0]!r} is missing")
    tokens = _ints(value["observation_tokens"], where, "observation_tokens")
    left, used = list(completions), []
    for index, entry in enumerate(_sequence(value["action_ranges"], where, "action_ranges")):
        field = f"action_ranges[{index}]"
        bounds = _ints(entry, where, field)
        if len(bounds) != 2 or not 0 <= bounds[0] < bounds[1] <= len(tokens):
            raise bad_result(where, field, entry, f"must be (start, end) within the {len(tokens)} observation_tokens")
        place, end = bounds
        while place < end:
            found = next((done for done in left if _is_at(done, tokens, place, end)), None)
            if found is None:
                raise _not_sampled(where, field, tokens, place, end, left)
            left.remove(found)
            used.append(found)
            place += len(found.token_ids)
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
        raise bad_result(where, "reward", None, "an episode needs one; a failure should be raised, not returned")
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


class StepPlayer(Protocol):
    """A policy that also plays step environments; the runtime's does."""

    async def play(
        self, cls: AgentClass, task: Task, *, sampling: Mapping[str, Any], max_length: int, sampler: Sampler
    ) -> tuple[Trajectory, list[StepResult]]:
        """Play one episode of at most `max_length` tokens; return what was sampled, and the result of `step` for each turn."""

    def encode(self, text: str) -> list[int]:
        """As `agentrl.env.executor.Policy.encode`."""


class Unjudged(AgentInstance):
    """An environment of one turn that earns nothing: the override of `execute` says what it is worth."""

    def step(self, state: StepState, /) -> StepResult:
        """End the episode."""
        return StepResult(terminated=True)


def chosen_sampling(params: Any) -> dict[str, Any]:
    """The settings that are set in vLLM's `SamplingParams`, or in an object with the same names."""
    settings = {key: getattr(params, key, None) for key in SAMPLING_KEYS}
    return {key: value for key, value in settings.items() if value is not None}


async def play(player: StepPlayer, cls: AgentClass | None, task: Task, params: Any, max_length: int, llm_engine: Any) -> dict[str, Any]:
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
    return {
        "observation_tokens": [*tokens, *feedback],
        "action_ranges": ranges,
        "rollout_log_probs": [*logprobs, *[0.0] * len(feedback)],
    }


def _earned(trajectory: Trajectory, results: Sequence[StepResult]) -> dict[str, Any]:
    reward = sum(result.reward for result in results) if results else None
    score = results[-1].score if results else None
    return {
        "reward": reward,
        "scores": reward if score is None else score,
        "truncated": trajectory.truncated_by_length or trajectory.status == "truncated",
        "extra_logs": dict(trajectory.metrics),
    }

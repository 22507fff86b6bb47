"""The episode of an executor: user code calls the model, and every call is recorded."""

from __future__ import annotations

import inspect
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentrl.core.errors import EngineError
from agentrl.core.images import PlacedImage
from agentrl.core.protocols import Engine
from agentrl.core.types import GroupRequest, Message, Prompt, Sampling, Status, Task, Trajectory, as_messages
from agentrl.env.agent import AgentClass, SamplingParams, StepResult
from agentrl.env.boundary import EnvSession
from agentrl.env.executor import Completion, ExecutorSession, Policy, Sampler
from agentrl.env.multi_agent import multi_agent_spec
from agentrl.env.results import bad_result, check_sampling
from agentrl.env.states import make_sampling_params
from agentrl.env.threads import Threads
from agentrl.rollout.chat import ChatCodec
from agentrl.rollout.codecs import encode_prompt
from agentrl.rollout.episode import Episode
from agentrl.rollout.episode_plan import EpisodePlan
from agentrl.rollout.observers import ResetEvent, SampleEvent, SamplerEngine, StepEvent, WatchedSession
from agentrl.rollout.program_episode import ProgramEpisode
from agentrl.rollout.recorder import Recorder, Sample

WHERE = "llm.generate"
NEW_PROMPT = "the prompt does not begin with the tokens of any context so far"


class RecordedPolicy(Policy):
    """The policy that an executor is given: a front end of the recorder that samples whatever it is asked for."""

    def __init__(self, group_request: GroupRequest, index: int, recorder: Recorder) -> None:
        self._group_request, self._index = group_request, index
        self._recorder, self._codec, self._settings = recorder, recorder.codec, recorder.settings
        self._kept: list[tuple[Completion, Sample]] = []  # in order of completion
        self._tools: list[Any] = []

    @property
    def tokenizer(self) -> Any:
        """As `Policy.tokenizer`."""
        return self._codec.tokenizer

    @property
    def max_length(self) -> int:
        """As `Policy.max_length`."""
        return self._recorder.limit

    @property
    def sampling(self) -> SamplingParams:
        """As `Policy.sampling`."""
        return make_sampling_params(self._settings.sampling)

    @property
    def samples(self) -> list[Sample]:
        """Every sample that was not discarded, in order of completion."""
        return [sample for _, sample in self._kept]

    async def generate(self, prompt_ids: Sequence[int], sampling: Mapping[str, Any] | None = None) -> Completion:
        """As `Policy.generate`."""
        completion, sample = await self.sample(prompt_ids, sampling)
        if not self._recorder.is_over:
            self.keep(completion, sample)
        return completion

    async def sample(self, prompt_ids: Sequence[int], sampling: Mapping[str, Any] | None = None) -> tuple[Completion, Sample]:
        """As `agentrl.suites.openrlhf.executor.RecordingPolicy.sample`."""
        prompt = _token_ids(prompt_ids)
        images: Sequence[Any] = self._group_request.task.images
        placed: Sequence[PlacedImage] = ()
        expanded = prompt
        if (reader := self._codec.images) is not None:
            expanded, placed = reader.expand(prompt, await reader.read(images))
            # They are in the prompt now, and are not given to the engine a second time.
            images = ()
        sample = await self._recorder.sample(expanded, self._changed(sampling), images, placed=placed)
        generation = sample.generation
        completion = Completion(
            prompt_ids=tuple(prompt),
            token_ids=tuple(generation.token_ids.tolist()),
            logprobs=tuple(generation.logprobs.tolist()),
            versions=tuple(generation.versions.tolist()),
            text=self._codec.decode_answer(generation.token_ids.tolist(), self._tools),
            finish_reason=str(generation.finish_reason),
        )
        return completion, sample

    def keep(self, completion: Completion, sample: Sample) -> None:
        """As `agentrl.suites.openrlhf.executor.RecordingPolicy.keep`."""
        taken = {kept.number for _, kept in self._kept}
        if sample.number in taken:  # another episode's policy counted
            sample = replace(sample, number=max(taken) + 1)
        self._kept.append((completion, sample))

    def discard(self, completion: Completion) -> None:
        """As `Policy.discard`."""
        self._kept = [(kept, sample) for kept, sample in self._kept if kept is not completion]

    def encode(self, text: str) -> list[int]:
        """As `Policy.encode`."""
        return self._codec.encode_text(text)

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        """As `Policy.encode_prompt`; the tools of the latest prompt that has some are those that answers call."""
        if not isinstance(prompt, str):
            self._tools = [tool for message in prompt for tool in message.get("tools") or ()] or self._tools
        return encode_prompt(self._codec, prompt, apply_chat_template=self._settings.data.apply_chat_template)

    def encode_next(self, messages: Prompt, after: Completion) -> list[int]:
        """As `Policy.encode_next`."""
        history = [Message(role="assistant", content=after.text)]
        return self._codec.encode_next(as_messages(messages), after.token_ids[-1], history)

    def decode(self, ids: Sequence[int]) -> str:
        """As `Policy.decode`."""
        return self._codec.decode(ids)

    async def play(
        self, cls: AgentClass, task: Task, *, sampling: Mapping[str, Any], max_length: int, sampler: Sampler
    ) -> tuple[Trajectory, list[StepResult]]:
        """As `agentrl.suites.openrlhf.executor.RecordingPolicy.play`; each turn gets its seed where it is recorded."""
        settings = self._settings.for_part()
        results: list[StepResult] = []
        source, threads = inspect.getsourcefile(cls) or cls.__module__, Threads(1)
        session = WatchedSession(EnvSession(cls, source, threads, settings.env), lambda event: _add_result(results, event))
        episode = Episode(
            replace(self._group_request, task=task),
            self._index,
            engine=SamplerEngine(sampler, max_model_len=max_length),
            codec=self._codec,
            env=session,
            settings=settings,
            agents_spec=multi_agent_spec(cls, source),
            sampling=self._changed(sampling),
            seeded=False,
        )
        try:
            status = await episode.play()
        finally:
            await session.close()
            threads.close()
        trajectory, *others = episode.trajectories(status)
        if others:
            raise bad_result(source, "agents", cls.agents, "an executor records one agent; use the class without an execute of its own")
        return trajectory, results

    def _changed(self, sampling: Mapping[str, Any] | None) -> Sampling:
        given = check_sampling(sampling, WHERE, self.sampling) or {}
        return self._settings.changed_sampling(self._settings.sampling, given, WHERE)


class ExecutorEpisode(ProgramEpisode):
    """The episode of an `Executor`, which it closes at the end.

    The reward is earned at the end, less the penalties for length. The number of calls is not limited, their time is.
    """

    def __init__(
        self, group_request: GroupRequest, index: int, *, engine: Engine, codec: ChatCodec, env: ExecutorSession, settings: EpisodePlan
    ) -> None:
        super().__init__(group_request, index, engine=engine, codec=codec, settings=settings, tools=env.take_spans)
        self._env = env
        self._llm = RecordedPolicy(group_request, index, self._recorder)

    async def _play(self) -> Status:
        self._called_s = time.perf_counter()
        try:
            self._result = await self._env.execute(self._group_request.task, self._llm, self._settings.rollout.episode_timeout_s)
        except Exception as error:
            # It counts only if it ended user code, which may have caught an earlier one and gone on.
            failure = self._recorder.failure
            if failure is not None and _caused(error, failure):
                raise failure from error
            raise
        return Status.TRUNCATED if self._result.truncated else Status.FINISHED

    async def _close(self) -> None:
        # First, so that code which goes on while it is closed samples nothing more.
        self._recorder.end()
        await self._env.close()

    def _trajectories(self, status: Status, error: str | None, timings: Mapping[str, float]) -> tuple[Trajectory, ...]:
        """The trajectory; each sample belongs to the longest context that its prompt extends.

        So requests that overlap, sub-agents and rewritten histories each keep the tokens that the engine saw.
        """
        for sample in self._llm.samples:
            self._recorder.add(sample, self._recorder.longest(sample), NEW_PROMPT)
        return (self._trajectory(status, error, timings, self._recorder.contexts, self._result.reward),)


def _add_result(results: list[StepResult], event: ResetEvent | SampleEvent | StepEvent) -> None:
    if isinstance(event, StepEvent):
        results.append(event.result)


def _caused(error: BaseException, failure: EngineError) -> bool:
    """Return True if `failure` is among the causes of the error that ended user code."""
    seen: BaseException | None = error
    while seen is not None:
        if seen is failure:
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def _token_ids(value: Any) -> list[int]:
    plain = value.tolist() if callable(getattr(value, "tolist", None)) else value
    if not isinstance(plain, Sequence) or isinstance(plain, str) or not plain or not all(type(token) is int for token in plain):
        raise bad_result(WHERE, "prompt_ids", value, "must be a list of token ids, at least one; llm.encode makes them of text")
    return list(plain)

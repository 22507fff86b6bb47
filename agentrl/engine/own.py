"""Engines of one's own, ``--engine file.py:Name``: a base class that turns a sampling function into a whole engine, and their loading."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from agentrl.core import protocols
from agentrl.core.errors import AgentRLError, ConfigError, ContextLengthError, EngineDeadError, EngineError, StructureError, WeightSyncError
from agentrl.core.plugins import load_plugin
from agentrl.core.protocols import EngineStats, GenerationRequest, WeightUpdate
from agentrl.core.tokenizers import load_tokenizer
from agentrl.core.types import FinishReason, Generation, Sampling, floats, ints
from agentrl.engine.usage import UsageMeter

if TYPE_CHECKING:
    from agentrl.engine.settings import EngineSettings

FLAG = "--engine"
CONTEXT = 4096
"""Largest context of an engine that neither its class nor the settings give one."""

Sampled: TypeAlias = tuple[Sequence[int], Sequence[float]]
"""Token ids and their log-probabilities, as many. # [T], [T]"""


class Engine:
    """An engine that samples by a method of yours: inherit, define `sample`, and say whether it takes weights.

    Everything else of `agentrl.core.protocols.Engine` is here: budgets, end tokens, versions, aborted requests, counters. Any of it may be
    defined anew; ``agentrl.testing.check_engine`` tells what an engine has to keep to.

    Attributes:
        takes_weights: Set it to False for an engine whose samples do not depend on the weights that are trained; otherwise define
            `take_weights`. The versions of its tokens then only say when they were sampled.
        takes_stop_strings: Set it to True if `sample` ends a turn at the texts in ``sampling.stop``, and keeps them in the turn.
        max_model_len: Context length in tokens; once started that of the settings, of the class, or of the model.
        end_token_ids: Tokens that end a turn; once started those of the model's tokenizer, unless the class has its own.
        settings: Settings of the engine: ``settings.model.model``, ``settings.engine`` with the flags, ``settings.device``, ``seed``.
        version: Version of the weights.
    """

    takes_weights = True
    takes_stop_strings = False
    max_model_len: int = 0
    end_token_ids: tuple[int, ...] = ()

    def __init__(self, settings: EngineSettings) -> None:
        self.settings, self.version = settings, 0
        self._meter = UsageMeter()
        self._dead = "it was not started"
        self._requests: dict[str, asyncio.Task[Generation]] = {}
        self._sampling: set[asyncio.Task[Any]] = set()
        self._open = asyncio.Event()  # clear while weights are taken

    def sample(self, prompt_ids: list[int], sampling: Sampling) -> Sampled | Awaitable[Sampled]:
        """Continue a context; define it with ``async def``, or with ``def`` if it returns at once.

        Args:
            prompt_ids: Token ids of the whole context. # [P]
            sampling: Temperature, ``max_tokens`` that there is room for, ``seed`` of the request, and so on.

        Returns:
            The sampled token ids, the end token included if there is one, and the natural logarithm of the probability with which each was
            sampled. # [T], [T]
        """
        raise NotImplementedError

    def take_weights(self, tensors: Mapping[str, Any]) -> Awaitable[None] | None:
        """Take over weights while nothing is sampled: PyTorch's tensors, on the CPU, by their names in a checkpoint of the model."""
        raise NotImplementedError

    async def start(self) -> None:
        """Become ready; call it if you define your own."""
        from agentrl.rollout.tasks import context_length

        model = self.settings.model
        own = min(context_length(model.model) or CONTEXT, CONTEXT)
        self.max_model_len = self.settings.engine.max_model_len or self.max_model_len or own
        if not self.end_token_ids:
            tokenizer = await asyncio.to_thread(load_tokenizer, model.model, trust_remote_code=model.trust_remote_code)
            self.end_token_ids = (int(tokenizer.eos_token_id),)
        self._meter, self._dead = UsageMeter(), ""
        self._open.set()

    async def generate(self, request: GenerationRequest) -> Generation:
        """As the protocol says; cancelling it cancels `sample`."""
        self._check(request)
        self._meter.begin(len(request.prompt_ids))
        task = self._requests[request.request_id] = asyncio.ensure_future(self._answer(request))
        try:
            # Not awaited itself: `abort` cancels the task, and that must not pass for a cancellation of this call.
            await asyncio.wait({task})
        finally:
            task.cancel()
            self._requests.pop(request.request_id, None)
            self._meter.end()
        if not task.cancelled():
            generation = task.result()
            self._meter.produced(len(generation.token_ids), 0)
            return generation
        if self._dead:
            raise EngineDeadError(f"{type(self).__name__} cannot be used: {self._dead}")
        return Generation(token_ids=ints([]), logprobs=floats([]), versions=ints([]), finish_reason=FinishReason.ABORTED)

    async def abort(self, request_id: str) -> None:
        """End a request with nothing sampled."""
        if request_id in self._requests:
            self._requests[request_id].cancel()

    async def load_weights(self, update: WeightUpdate) -> int:
        """Wait until nothing is sampled, take the weights, and count the version; samples that come meanwhile wait.

        Raises:
            EngineDeadError: If the engine could not be used before.
            WeightSyncError: If they were not taken; the engine refuses everything from then on.
        """
        self._alive()
        if self.takes_weights:
            self._open.clear()
            self._meter.pause()
            try:
                await self._load(update)
            except BaseException as error:
                self._end(f"weights of version {update.version} did not load: {type(error).__name__}: {error}")
                if not isinstance(error, Exception):
                    raise
                raise WeightSyncError(f"{type(self).__name__}: {self._dead}") from error
            finally:
                self._meter.resume()
                self._open.set()
        self.version = update.version
        return self.version

    def stats(self) -> EngineStats:
        """Counters since the start."""
        stats = self._meter.stats()
        return replace(stats, fault=self._dead or stats.fault, load=protocols.EngineLoad(running=self._meter.active))

    async def close(self) -> None:
        """Refuse everything from now on; call it if you define your own."""
        self._end("it was closed")

    async def _load(self, update: WeightUpdate) -> None:
        if update.transport != "shm":
            raise ValueError(f"the update comes by {update.transport!r} but the engine expects 'shm'")
        from safetensors.torch import load_file

        # The file is read while the last samples of the old weights end.
        tensors = await asyncio.to_thread(load_file, update.payload["update"]["path"])
        while self._sampling:
            await asyncio.wait(set(self._sampling))
        await _value(self.take_weights(tensors))

    async def _answer(self, request: GenerationRequest) -> Generation:
        # In a loop, because the next weights may have come before this task runs again.
        while not self._open.is_set():
            await self._open.wait()
        self._alive()
        version, name = self.version, f"{type(self).__name__}.sample"
        prompt = [int(token) for token in request.prompt_ids]
        sampling = replace(request.sampling, max_tokens=min(request.sampling.max_tokens, self.max_model_len - len(prompt)))
        task = asyncio.current_task()
        if task is not None:
            self._sampling.add(task)
            task.add_done_callback(self._sampling.discard)
        try:
            ids, logprobs = await _value(self.sample(prompt, sampling))
            if len(ids) != len(logprobs) or not np.all(np.isfinite(logprobs)) or np.any(np.asarray(logprobs) > 0):
                raise ValueError(f"returned {len(ids)} tokens with log-probabilities {logprobs}: must be one finite number <= 0 for each")
        except AgentRLError:
            raise
        except Exception as error:
            self._meter.failed(f"{type(error).__name__}: {error}")
            raise EngineError(f"request {request.request_id}: {name} raised {type(error).__name__}: {error}") from error
        return self._turn(ids, logprobs, sampling, version)

    def _turn(self, ids: Sequence[int], logprobs: Sequence[float], sampling: Sampling, version: int) -> Generation:
        """Cut a turn behind its first end token, or at its budget."""
        ends = {*self.end_token_ids, *sampling.stop_token_ids}
        length = next((place + 1 for place, token in enumerate(ids) if token in ends), len(ids))
        cut = length > sampling.max_tokens or (length == sampling.max_tokens and ids[length - 1] not in ends)
        length = min(length, sampling.max_tokens)
        return Generation(
            token_ids=ints(list(ids[:length])),
            logprobs=floats(list(logprobs[:length])),
            versions=ints([version] * length),
            finish_reason=FinishReason.LENGTH if cut else FinishReason.STOP,
        )

    def _check(self, request: GenerationRequest) -> None:
        self._alive()
        ids, sampling, name = request.prompt_ids, request.sampling, f"request {request.request_id}"
        if len(ids) >= self.max_model_len:
            raise ContextLengthError(f"{name}: a prompt of {len(ids)} tokens leaves no room in a context of {self.max_model_len}")
        if request.structure is not None:
            raise StructureError(f"{name}: {type(self).__name__} cannot hold a text to a structure")
        if not len(ids) or ids.min() < 0 or sampling.temperature < 0 or not 0 < sampling.top_p <= 1 or sampling.max_tokens < 1:
            raise EngineError(f"{name}: the prompt {ids} or {sampling} is out of range")
        if request.images or (sampling.stop and not self.takes_stop_strings):
            problem = f"takes no images and, without takes_stop_strings, no stop = {sampling.stop!r}"
            raise EngineError(f"{name}: {type(self).__name__} {problem}")

    def _alive(self) -> None:
        if self._dead:
            raise EngineDeadError(f"{type(self).__name__} cannot be used: {self._dead}")

    def _end(self, reason: str) -> None:
        self._dead = self._dead or reason
        for task in list(self._requests.values()):
            task.cancel()


async def _value(returned: Any) -> Any:
    return await returned if isinstance(returned, Awaitable) else returned


def load_engine_class(spec: str) -> Any:
    """Import the class that ``--engine file.py:Name`` names, and check it.

    Raises:
        ConfigError: If there is no such file or class, or it cannot be an engine.
    """
    cls = load_plugin(FLAG, spec)
    if not inspect.isclass(cls):
        raise ConfigError(FLAG, spec, f"is a {type(cls).__name__}, not a class", "Name a class that inherits from agentrl.Engine.")
    wanted = [name for name in vars(protocols.Engine) if not name.startswith("_") and callable(vars(protocols.Engine)[name])]
    if missing := [name for name in wanted if not callable(getattr(cls, name, None))]:
        remedy = "Inherit from agentrl.Engine, which has them."
        raise ConfigError(FLAG, spec, f"{cls.__name__} has no method {' and no method '.join(missing)}", remedy)
    if issubclass(cls, Engine) and cls.generate is Engine.generate and cls.sample is Engine.sample:
        raise ConfigError(FLAG, spec, f"{cls.__name__} does not say how it samples", "Define sample(self, prompt_ids, sampling).")
    own = Engine.take_weights, Engine.load_weights
    if issubclass(cls, Engine) and cls.takes_weights and (cls.take_weights, cls.load_weights) == own:
        problem = f"{cls.__name__} neither takes the weights that are trained nor says that it does not"
        raise ConfigError(FLAG, spec, problem, "Define take_weights(self, tensors), or set takes_weights = False.")
    try:
        inspect.signature(cls).bind(None)
    except TypeError as error:
        problem = f"{cls.__name__} must be made from one argument, its settings: {error}"
        raise ConfigError(FLAG, spec, problem, "Change the parameters of __init__.") from None
    return cls

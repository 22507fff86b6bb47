"""Requests to vLLM's core: they are checked and sent as `AsyncLLM.generate` does it, and an answer is the tokens alone.

`AsyncLLM` looks at every output of every step for texts, figures and streams that nobody reads here, and checks the same settings
for each request. A request of 8 tokens takes three times as long there. Import this module only after `prepare_environment`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Hashable
from copy import copy, deepcopy
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.engine import FinishReason
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.engine.exceptions import EngineDeadError

from agentrl.core.protocols import TokenListener

_log = logging.getLogger(__name__)

AT_ONCE = 64
"""Requests that are sent before the round of the event loop is over, so that the core does not wait while others are made."""
MAX_CHECKED = 64
"""Settings that are known to be right; user code may choose others for every turn."""


@dataclass(slots=True, eq=False)
class Answer:
    """The tokens that were sampled for one request, so far."""

    name: str  # of the request, as its caller knows it
    listener: TokenListener | None
    detokenizer: Any  # vLLM's, which looks for stop strings; `None` without any
    over: asyncio.Future[None]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)  # of the weights that sampled each token; 0 where vLLM does not say
    experts: list[Any] = field(default_factory=list)  # one array for each step that reported some # [tokens, layers, top_k]
    cached_tokens: int | None = None  # of the prompt; `None` before the first step
    finish_reason: FinishReason | None = None

    def take(self, output: Any, version: int) -> None:
        """Take in an `EngineCoreOutput`, sampled by weights of this version; a request that ends with it is over."""
        ids, reason = output.new_token_ids, output.finish_reason
        if self.cached_tokens is None:
            self.cached_tokens = 0 if output.prefill_stats is None else output.prefill_stats.num_cached_tokens
        if output.routed_experts is not None:
            self.experts.append(output.routed_experts)
        if self.detokenizer is not None:
            before = self.detokenizer.num_output_tokens()
            if self.detokenizer.update(ids, reason == FinishReason.STOP):
                ids, reason = ids[: self.detokenizer.num_output_tokens() - before], FinishReason.STOP
        if ids:
            self.token_ids += ids
            self.versions += [version] * len(ids)
            # Copied, because an array may be a part of the message that brought it.
            self.logprobs += output.new_logprobs.logprobs[: len(ids), 0].tolist()
            if self.listener is not None:
                self.listener(ids)
        if reason is not None:
            self.end(reason)

    def end(self, reason: FinishReason) -> None:
        """Let the caller have what there is."""
        self.finish_reason = reason
        if not self.over.done():
            self.over.set_result(None)

    def fail(self, error: BaseException) -> None:
        """Let the caller have an error."""
        if not self.over.done():
            self.over.set_exception(error)


class Requests:
    """The requests of one engine that are under way.

    Requests of one round of the event loop are sent together, because the core begins a step with whatever has come: one for the first
    of two hundred takes nearly as long as one for all of them. A task takes in the outputs of vLLM's core, step by step. It waits for
    the core alone, and ends when that is gone: then every present request fails, and every later one.

    Args:
        llm: The engine, whose `generate` must not be used beside this.
        on_load: Called with the scheduler's figures after each step.
        stamps: True if the core names the version of the weights of each step; else every token has version 0.
    """

    def __init__(self, llm: AsyncLLM, on_load: Callable[[Any], None], *, stamps: bool) -> None:
        self._llm, self._core, self._inputs, self._on_load = llm, llm.engine_core, llm.input_processor, on_load
        self._stamps = stamps
        self._running: dict[str, Answer] = {}
        self._names = itertools.count()
        self._unsent: deque[Any] = deque()
        self._sender: asyncio.Task[None] | None = None  # while something is unsent
        self._checked: dict[Hashable, Any] = {}  # a request that vLLM has checked, by its settings
        self._reader: asyncio.Task[None] | None = None  # from the first request on, which may be on another event loop than the start
        self.error: BaseException | None = None  # why nothing is read any more

    async def sample(
        self,
        name: str,
        prompt: Any,
        make_params: Callable[..., Any],
        *,
        max_tokens: int,
        seed: int | None,
        settings: Hashable = None,
        adapter: Any = None,
        listener: TokenListener | None = None,
    ) -> Answer:
        """Sample one continuation; a call that is cancelled drops the request from the engine.

        Args:
            name: Of the request.
            prompt: Token ids or more, in vLLM's form of rendered inputs.
            make_params: Makes vLLM's `SamplingParams` of `max_tokens` and `seed`, with the log-probability of the sampled token alone.
            max_tokens: Tokens that may be sampled, from 1.
            seed: Of the samples; `None` leaves it to vLLM.
            settings: All that `make_params` uses besides. Requests with a prompt of token ids alone are made from one that vLLM has
                checked with the same settings. `None` has vLLM check this one.
            adapter: vLLM's `LoRARequest`.
            listener: Told of tokens as they are sampled; what it raises ends the request.

        Raises:
            EngineDeadError: If the core is gone, vLLM's error; `error` is its cause.
            VLLMValidationError: If vLLM refuses the request.
        """
        if self.error is not None:
            raise EngineDeadError from self.error
        key = None if settings is None else (settings, seed is None)
        if (known := self._checked.get(key)) is not None:
            request = _like(known, prompt, max_tokens, seed)
        else:
            tasks, params = await self._llm.get_supported_tasks(), make_params(max_tokens=max_tokens, seed=seed)
            request = self._inputs.process_inputs(name, prompt, params, supported_tasks=tasks, lora_request=adapter)
            self._note(key, request)
        request.external_req_id, request.request_id = name, f"{name}-{next(self._names)}"  # an ended one may still be in the core
        if self._reader is None:
            self._reader = asyncio.create_task(self._read(), name="outputs of vLLM")
        looks = request.sampling_params.detokenize
        detokenizer = IncrementalDetokenizer.from_new_request(self._inputs.tokenizer, request) if looks else None
        answer = Answer(name, listener, detokenizer, asyncio.get_running_loop().create_future())
        self._running[request.request_id] = answer
        try:
            self._unsent.append(request)
            if self._sender is None or self._sender.done():
                self._sender = asyncio.create_task(self._send(), name="requests to vLLM")
            if len(self._unsent) >= AT_ONCE:
                await self._send()
            await answer.over
        finally:
            if self._running.pop(request.request_id, None) is not None:  # else the core knows, or is gone
                await self._core.abort_requests_async([request.request_id])
        return answer

    async def abort(self, name: str) -> None:
        """End the requests of this name with what was sampled so far."""
        found = [key for key, answer in self._running.items() if answer.name == name]
        for key in found:
            self._running.pop(key).end(FinishReason.ABORT)
        if found:
            await self._core.abort_requests_async(found)

    def fail(self, error: BaseException) -> None:
        """End every present request with an error."""
        running, self._running = self._running, {}
        for answer in running.values():
            answer.fail(error)

    def close(self, error: BaseException) -> None:
        """Take in nothing any more: every present and later request fails."""
        self.error = self.error or error
        self.fail(error)
        for task in (self._reader, self._sender):
            if task is not None:
                task.cancel()

    async def _send(self) -> None:
        """Send the requests that are still wanted; one that cannot be sent fails, as does one whose sender is cancelled."""
        while self._unsent:
            request = self._unsent.popleft()
            answer = self._running.get(request.request_id)
            if answer is None or answer.over.done():
                continue
            try:
                await self._core.add_request_async(request)
            except BaseException as error:
                answer.fail(error if isinstance(error, Exception) else RuntimeError("it was not sent"))
                if not isinstance(error, Exception):
                    raise

    def _note(self, key: Hashable, request: Any) -> None:
        """Remember a request that was checked, unless it has no key."""
        if key is not None:
            if len(self._checked) >= MAX_CHECKED:
                self._checked.clear()
            self._checked[key] = deepcopy(request)

    async def _read(self) -> None:
        """Hand the outputs of each step to the requests that they belong to."""
        try:
            while True:
                outputs = await self._core.get_output_async()
                version = int(outputs.weight_version or 0) if self._stamps else 0
                unknown = [output.request_id for output in outputs.outputs if self._take(output, version)]
                if unknown:
                    await self._core.abort_requests_async(unknown)
                self._on_load(outputs.scheduler_stats)
        except Exception as error:
            self.error = error
            if not isinstance(error, EngineDeadError):
                _log.exception("the outputs of vLLM cannot be read")
            self.fail(error)

    def _take(self, output: Any, version: int) -> bool:
        """Hand an output to its request; returns True if that is over, and the core does not know."""
        answer = self._running.get(output.request_id)
        if answer is None or answer.over.cancelled():  # it was aborted, or its caller is about to say so
            return False
        try:
            answer.take(output, version)
        except Exception as error:  # of the listener, or of a detokenizer
            answer.fail(error)
        if not answer.over.done():
            return False
        del self._running[output.request_id]
        return output.finish_reason is None


def _like(request: Any, prompt: Any, max_tokens: int, seed: int | None) -> Any:
    """Return a request for a prompt of token ids with the settings of another one."""
    other, params = copy(request), copy(request.sampling_params)
    params.max_tokens, params.seed = max_tokens, seed
    other.sampling_params, other.arrival_time = params, time.time()
    other.prompt_token_ids, other.cache_salt = prompt["prompt_token_ids"], prompt.get("cache_salt")
    return other

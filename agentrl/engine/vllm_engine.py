"""The `Engine` protocol on vLLM's `AsyncLLM`, on CPU and CUDA."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from agentrl.core.errors import ContextLengthError, EngineDeadError, EngineError, StructureError, TransferAbandonedError, WeightSyncError
from agentrl.core.protocols import EngineLoad, EngineStats, GenerationRequest, Memory, WeightUpdate
from agentrl.core.types import ExpertArray, FinishReason, Generation, experts_of, floats, ints
from agentrl.engine.adapters import Adapters, LoadedAdapter
from agentrl.engine.settings import EngineSettings, prepare_environment, without_gc
from agentrl.engine.usage import UsageMeter


class VllmEngine:
    """Generates with vLLM; see `agentrl.core.protocols.Engine`.

    A publication pauses generation and keeps every request. vLLM then preempts the running requests and forgets all
    cached keys and values, so after the resumption the tokens of a request so far are processed again by the new weights
    before the next one is sampled: no key or value of old weights survives. Tokens sampled before keep the
    log-probability and the version they were sampled with.

    With ``--kv-on-publish keep`` nothing is forgotten. Each request carries the version at its start as the salt of its prefix hashes,
    so a request that starts after a publication finds no key or value of older weights.

    With adapters nothing is paused: a request goes on with the adapter that it began with, and its tokens have that adapter's version.

    If weights fail to load, the engine stays fenced: it may hold a mixture of two versions, so every present and later
    request gets `EngineDeadError`, and the owner has to start a new engine.
    """

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._meter = UsageMeter()
        self._llm: Any = None
        self._make_params: Callable[..., Any]
        self._dead: str | None = None
        self._publishing = asyncio.Lock()
        self._update_info: dict[str, Any] = {}
        self._end_ids: tuple[int, ...] = ()
        self._vocabulary = 0
        self._load_now = EngineLoad()
        self._version = 0  # of the weights that a request finds when it starts
        self._keep_kv = settings.weights.kv_on_publish == "keep"
        self._adapters = Adapters(settings.adapters)
        self._asleep: set[Memory] = set()

    @property
    def max_model_len(self) -> int:
        """Context length in tokens; known once started."""
        return int(self._running().model_config.max_model_len)

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a turn; known once started."""
        return self._end_ids

    async def start(self) -> None:
        """Load the model; returns when ready to generate with version 0.

        Raises:
            EngineError: If vLLM cannot start with these settings; the message is vLLM's.
        """
        started = self._llm is not None
        if started:
            return
        prepare_environment(self._settings.device, self._settings.transport)
        try:
            await asyncio.to_thread(self._load)
            if self._settings.device == "cpu":
                await self._llm.collective_rpc("make_row_invariant")
            await self._llm.update_weight_version("0")
        except Exception as error:
            await self.close()
            raise EngineError(f"vLLM did not start with model {self._settings.model.model!r}: {_reason(error)}") from error
        self._end_ids = _end_token_ids(self._llm.model_config)
        self._vocabulary = int(self._llm.model_config.get_vocab_size())
        self._meter = UsageMeter()
        self._llm.output_processor.update_scheduler_stats = self._loaded

    async def generate(self, request: GenerationRequest) -> Generation:
        """Sample one continuation; cancelling the call drops the request from the engine.

        Raises:
            ContextLengthError: If the prompt leaves no room for one token.
            StructureError: If vLLM makes no grammar of the structure that is asked for.
            EngineDeadError: If the engine is gone or fenced.
            EngineError: If this request failed.
        """
        llm = self._running()
        room = self.max_model_len - len(request.prompt_ids)
        if room < 1:
            raise ContextLengthError(
                f"request {request.request_id}: a prompt of {len(request.prompt_ids)} tokens leaves no room in a context of "
                f"{self.max_model_len}; shorten it or raise --max-model-len"
            )
        self._check(request)
        self._meter.begin(len(request.prompt_ids))
        try:
            with self._vllm_errors(request), self._adapters.latest() as adapter:
                output = await self._final_output(llm, request, room, adapter)
        finally:
            self._meter.end()
        generation = _generation(request.request_id, output, adapter)
        self._meter.produced(len(generation.token_ids), generation.cached_tokens)
        return generation

    async def abort(self, request_id: str) -> None:
        """End a request now: its `generate` returns what was sampled so far, perhaps nothing. Requests that are over are passed over."""
        if self._llm is not None and not self._dead:
            await self._llm.abort(request_id)

    async def load_weights(self, update: WeightUpdate) -> int:
        """Pause keeping requests, load, stamp the version, resume; returns the version the engine reports.

        Raises:
            EngineDeadError: If the engine was gone or fenced before.
            WeightSyncError: If loading failed or the engine reports another version; the engine is fenced.
        """
        async with self._publishing:
            llm = self._running()
            self._meter.pause()
            try:
                reported = await self._replace_weights(llm, update)
            except TransferAbandonedError:  # generation stays paused until weights of some version are loaded
                raise
            except BaseException as error:
                self._fence(f"weights of version {update.version} did not load: {_reason(error)}")
                if not isinstance(error, Exception):
                    raise
                raise WeightSyncError(f"engine {self._settings.index}: {self._dead}") from error
            finally:
                self._meter.resume()
            return reported

    async def sleep(self, level: int) -> None:
        """As `SleepingEngine.sleep`; a sleeping engine stays as it is.

        Raises:
            EngineDeadError: If the engine was gone or fenced before, or cannot sleep.
        """
        async with self._publishing:
            llm = self._running()
            if not self._asleep:
                self._meter.pause()
                with self._fenced_on_error("the engine could not go to sleep"):
                    await llm.sleep(level, mode="keep")
            self._asleep = {"weights", "kv_cache"}

    async def wake(self, *parts: Memory) -> None:
        """As `SleepingEngine.wake`; vLLM goes on by itself once all of its memory is there.

        Raises:
            EngineDeadError: If the engine was gone or fenced before, or its memory is not free.
        """
        async with self._publishing:
            llm = self._running()
            parts = tuple(part for part in parts if part in self._asleep)  # vLLM would wake none of several if one is awake
            if not parts:
                return
            with self._fenced_on_error(f"the engine could not take back the memory of {' and '.join(parts)}"):
                await llm.wake_up(list(parts))
            self._asleep -= set(parts)
            if not self._asleep:
                self._meter.resume()

    def stats(self) -> EngineStats:
        """Counters since the start, and why the engine cannot be used if so."""
        stats = replace(self._meter.stats(), load=self._load_now if self._meter.active else EngineLoad())
        dead = self._dead or ("its process or thread ended" if self._llm is not None and self._llm.errored else "")
        return replace(stats, fault=dead) if dead else stats

    async def close(self) -> None:
        """Release processes and memory; safe to call twice."""
        llm, self._llm = self._llm, None
        self._dead = self._dead or "it was closed"
        if llm is None:
            return
        # First, or calls of `generate` that are under way would wait for ever.
        llm.output_processor.propagate_error(RuntimeError(self._dead))
        if llm.output_handler is not None:
            llm.output_handler.cancel()
        await asyncio.to_thread(llm.shutdown, 30.0)
        del llm
        gc.collect()  # vLLM's objects form cycles; the model would stay until some later collection

    def _loaded(self, stats: Any) -> None:
        """Called by vLLM with the scheduler's figures after every step."""
        if stats is not None:
            self._load_now = EngineLoad(running=stats.num_running_reqs, waiting=stats.num_waiting_reqs, kv_usage=stats.kv_cache_usage)

    def _load(self) -> None:
        with without_gc():
            from agentrl.engine import launch
        self._make_params = launch.sampling_params
        self._llm = launch.build(self._settings)  # not returned: something in vLLM's start keeps the caller's future alive

    def _running(self) -> Any:
        if self._llm is not None and self._llm.errored:
            self._dead = self._dead or "its process or thread ended"
        if self._llm is None or self._dead:
            raise EngineDeadError(f"engine {self._settings.index} cannot be used: {self._dead or 'it was not started'}")
        return self._llm

    def _check(self, request: GenerationRequest) -> None:
        """Refuse what vLLM would not: without a tokenizer it looks at no token id, and one unknown id ends the engine."""
        ids = request.prompt_ids
        if not len(ids) or ids.min() < 0 or ids.max() >= self._vocabulary:
            known = f"from 0 to {self._vocabulary - 1}"
            raise EngineError(f"request {request.request_id}: the prompt must be token ids {known}, at least one; got {ids}")
        if request.images:
            raise EngineError(f"request {request.request_id}: this engine takes text only, got {len(request.images)} images")
        if request.structure is not None and not self._settings.stop_strings:
            problem = "the engine was started without a tokenizer, so it cannot constrain texts; set stop_strings in its settings"
            raise StructureError(f"request {request.request_id}: {problem}")
        if request.sampling.stop and not self._settings.stop_strings:
            raise EngineError(
                f"request {request.request_id}: stop = {request.sampling.stop!r}: the engine was started without stop strings; "
                "set stop_strings in its settings or use stop_token_ids"
            )

    async def _final_output(self, llm: Any, request: GenerationRequest, room: int, adapter: LoadedAdapter | None) -> Any:
        salt = {"cache_salt": str(self._version)} if self._keep_kv else {}
        prompt = {"type": "token", "prompt_token_ids": request.prompt_ids.tolist(), **salt}
        sampling, final = request.sampling, None
        seed = self._settings.seed if sampling.seed is None else sampling.seed
        budget = min(sampling.max_tokens, room)
        params = self._make_params(sampling, max_tokens=budget, end_ids=self._end_ids, seed=seed, structure=request.structure)
        async for output in llm.generate(prompt, params, request.request_id, lora_request=adapter and adapter.request):
            final = output
        return final

    @contextlib.contextmanager
    def _vllm_errors(self, request: GenerationRequest) -> Iterator[None]:
        """Turn vLLM's exceptions into ours."""
        from vllm.exceptions import VLLMValidationError
        from vllm.v1.engine.exceptions import EngineDeadError as VllmDeadError

        try:
            yield
        except Exception as error:
            if isinstance(error, VllmDeadError) or self._dead or self._llm is None or self._llm.errored:
                self._dead = self._dead or _reason(error)
                raise EngineDeadError(f"engine {self._settings.index} is gone: {self._dead}") from error
            if request.structure is not None and isinstance(error, VLLMValidationError):
                raise StructureError(f"vLLM makes no grammar of it: {_reason(error)}") from error
            self._meter.failed(_reason(error))
            raise EngineError(f"request {request.request_id} failed: {_reason(error)}") from error

    async def _replace_weights(self, llm: Any, update: WeightUpdate) -> int:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest

        if self._settings.adapters and update.transport == "adapter":
            return await self._adapters.load(llm, update)
        if update.transport != self._settings.transport:
            raise ValueError(f"the update comes by {update.transport!r} but the engine expects {self._settings.transport!r}")
        # AsyncLLM.pause_generation would do the same and then sleep for 20 ms.
        await llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=not self._keep_kv)
        if (meeting := self._meeting(update)) is not None:
            await llm.init_weight_transfer_engine(WeightTransferInitRequest(meeting))
            await self._check_transfer(llm, update)
        await llm.start_weight_update()
        self._update_info = dict(update.payload.get("update", self._update_info))  # to a group it is said once
        await llm.update_weights(WeightTransferUpdateRequest(self._update_info))
        await self._check_transfer(llm, update, begun=True)
        await llm.finish_weight_update(weight_version=str(update.version))
        reported = await llm.get_weight_version()
        if reported != str(update.version):
            raise ValueError(f"the engine reports version {reported!r}")
        self._version = update.version
        if not self._asleep:
            await llm.resume_generation()
        return int(reported)

    def _meeting(self, update: WeightUpdate) -> dict[str, Any] | None:
        """Return what workers have to know to join the group of a membership that is new to them."""
        connect, members = update.payload.get("connect"), update.members
        if connect is None or members is None:
            return None
        size, own = self._settings.engine.gpus_per_engine, self._settings.index
        position = own if update.transport == "ipc" else members.engines.index(f"engine-{own}")
        return {**connect, "before": position * size, "size": len(members.engines) * size}

    async def _check_transfer(self, llm: Any, update: WeightUpdate, *, begun: bool = False) -> None:
        """Raise `TransferAbandonedError` if the latest transfer in a group was given up, once the model is ready for another."""
        if update.members is None:
            return
        reasons = [reason for reason in await llm.collective_rpc("weights_outcome") if reason]
        if reasons and begun:
            await llm.finish_weight_update()
        if reasons:
            raise TransferAbandonedError(f"engine {self._settings.index}: weights of version {update.version}: {reasons[0]}")

    @contextlib.contextmanager
    def _fenced_on_error(self, what: str) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._fence(f"{what}: {_reason(error)}")
            if not isinstance(error, Exception):
                raise
            raise EngineDeadError(f"engine {self._settings.index}: {self._dead}") from error

    def _fence(self, reason: str) -> None:
        self._dead = self._dead or reason
        if self._llm is not None:
            self._llm.output_processor.propagate_error(RuntimeError(reason))


def _end_token_ids(model_config: Any) -> tuple[int, ...]:
    """The ids that end a sequence, from the model's generation settings and its configuration."""
    sources = (model_config.try_get_generation_config().get("eos_token_id"), getattr(model_config.hf_text_config, "eos_token_id", None))
    found: set[int] = set()
    for ids in sources:
        found.update(ids if isinstance(ids, list | tuple) else [] if ids is None else [ids])
    return tuple(sorted(found))


_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORTED}


def _generation(request_id: str, output: Any, adapter: LoadedAdapter | None) -> Generation:
    completion = output.outputs[0]
    reason = _REASONS.get(completion.finish_reason)
    if reason is None:
        raise EngineError(f"request {request_id} ended with {completion.finish_reason!r}")
    versions = np.zeros(len(completion.token_ids), dtype=np.int32)
    for span in completion.weight_versions or ():
        versions[span.start : span.end] = int(span.version)
    if adapter is not None:  # vLLM counts versions of the model's own weights only
        versions[:] = adapter.version
    return Generation(
        token_ids=ints(list(completion.token_ids)),
        logprobs=floats(completion.logprobs.logprobs),
        versions=ints(versions),
        finish_reason=reason,
        cached_tokens=output.num_cached_tokens or 0,
        experts=_experts(completion.routed_experts, len(output.prompt_token_ids) + len(completion.token_ids) - 1),
    )


def _experts(rows: np.ndarray[Any, Any] | None, tokens: int) -> ExpertArray | None:
    """Experts that vLLM recorded of a request # [tokens, layers, top_k]; `None` if it recorded none, or not those of every token."""
    return None if rows is None or len(rows) != tokens else experts_of(rows)


def _reason(error: BaseException) -> str:
    """Return the type and message of an exception on one line."""
    said = str(error.args[-1] if error.args else error).splitlines()
    told = " ".join(line.strip() for line in said if "further information" not in line)
    return f"{type(error).__name__}: {told[:600]}"

"""The `Engine` protocol on vLLM's `AsyncLLM`, on CPU and CUDA."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import re
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from agentrl.core.errors import ConfigError, EngineDeadError, EngineError, StructureError, TransferAbandonedError
from agentrl.core.process import without_main
from agentrl.core.protocols import EngineLoad, GenerationRequest, Memory, WeightUpdate
from agentrl.core.types import ExpertArray, FinishReason, Generation, Sampling, experts_of, floats, ints
from agentrl.engine.adapters import Adapters, LoadedAdapter
from agentrl.engine.failures import Failures, reason_of
from agentrl.engine.fenced import FencedEngine
from agentrl.engine.gate import Gate
from agentrl.engine.settings import EngineSettings, prepare_environment, without_gc
from agentrl.engine.usage import UsageMeter
from agentrl.engine.vllm_window import stamps_tokens
from agentrl.weights.digests import DIGESTS, joined

if TYPE_CHECKING:
    from agentrl.engine.vllm_images import ImagePrompts
    from agentrl.engine.vllm_requests import Answer, Requests


class VllmEngine(FencedEngine):
    """Generates with vLLM; see `agentrl.core.protocols.Engine`.

    A publication pauses generation and keeps every request. vLLM then preempts the running requests and forgets all
    cached keys and values, so after the resumption the tokens of a request so far are processed again by the new weights
    before the next one is sampled: no key or value of old weights survives. Tokens sampled before keep the
    log-probability and the version they were sampled with.

    With ``--kv-on-publish keep`` nothing is forgotten. Each request carries the version at its start as the salt of its prefix hashes,
    so a request that starts after a publication finds no key or value of older weights.

    A vLLM before 0.32 does not say which weights sampled a token. There a publication waits for the requests under way instead, and later
    ones wait for its end, so that each has one version.

    With adapters nothing is paused: a request goes on with the adapter that it began with, and its tokens have that adapter's version.
    """

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings)
        self._llm: Any = None
        self._make_params: Callable[..., Any]
        self._images: ImagePrompts
        self._requests: Requests
        self._update_info: dict[str, Any] = {}
        self._end_ids: tuple[int, ...] = ()
        self._context = 0  # tokens; 0 before the start
        self._version = 0  # of the weights that a request finds when it starts
        self._keep_kv = settings.weights.kv_on_publish == "keep"
        self._adapters = Adapters(settings.adapters)
        self._stamps = True  # whether vLLM says which weights sampled a token
        self._gate: Gate | None = None
        self._failures = Failures()  # of vLLM's processes

    @property
    def max_model_len(self) -> int:
        """Context length in tokens; known once started."""
        if not self._context:
            self._check_alive()
        return self._context

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a turn; known once started."""
        return self._end_ids

    async def start(self) -> None:
        """Load the model; returns when ready to generate with version 0.

        Raises:
            ConfigError: If vLLM has no model of this architecture.
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
            if self._stamps:
                await self._llm.update_weight_version("0")
            elif not self._settings.adapters:
                self._gate = Gate()
        except Exception as error:
            cause = self._failures.cause() or reason_of(error)
            await self.close()
            remedy = "Use --engine transformers if that computes it, or another model."
            if unknown := re.search(r"Model architectures \['(\w+)'.*\] are not supported", cause):
                raise ConfigError("--engine", "vllm", f"has no model {unknown[1]}", remedy) from error
            raise EngineError(f"vLLM did not start with model {self._settings.model.model!r}: {cause}") from error
        self._context, self._end_ids = int(self._llm.model_config.max_model_len), _end_token_ids(self._llm.model_config)
        self._vocabulary = int(self._llm.model_config.get_vocab_size())
        cache = self._llm.vllm_config.cache_config
        self._kv_tokens = int(cache.num_gpu_blocks or 0) * int(cache.block_size or 0)
        self._meter, self._is_started = UsageMeter(), True

    async def abort(self, request_id: str) -> None:
        """End a request now: its `generate` returns what was sampled so far, perhaps nothing. Requests that are over are passed over."""
        if self._llm is not None and not self._dead:
            await self._requests.abort(request_id)

    async def close(self) -> None:
        """Release processes and memory; safe to call twice."""
        llm, self._llm = self._llm, None
        self._dead = self._dead or "it was closed"
        if llm is not None:
            # First, or calls of `generate` that are under way would wait for ever.
            self._requests.close(RuntimeError(self._dead))
            del self._requests
            await asyncio.to_thread(llm.shutdown, 30.0)
        self._failures.close()
        del llm
        gc.collect()  # vLLM's objects form cycles; the model would stay until some later collection

    def _loaded(self, stats: Any) -> None:
        """Called by vLLM with the scheduler's figures after every step."""
        if stats is not None:
            self._load_now = EngineLoad(running=stats.num_running_reqs, waiting=stats.num_waiting_reqs, kv_usage=stats.kv_cache_usage)

    def _load(self) -> None:
        with without_gc():
            from agentrl.engine import launch
            from agentrl.engine.vllm_images import ImagePrompts
            from agentrl.engine.vllm_requests import Requests
        self._stamps = stamps_tokens()
        self._make_params = launch.sampling_params
        with without_main():  # the engine is not returned: something in vLLM's start keeps the caller's future alive
            self._llm = launch.build(self._settings, self._failures)
        self._requests = Requests(self._llm, self._loaded, stamps=self._stamps)
        self._placeholders = launch.placeholders(self._llm)
        self._images = ImagePrompts(self._llm.renderer, launch.image_problem(self._llm.model_config.hf_config, self._settings.device))

    async def _sample(self, request: GenerationRequest) -> Generation:
        async with self._gate.request(request.request_id) if self._gate else contextlib.nullcontext():
            self._check_alive()  # the weights that it waited for may have failed to load
            version, adapter = None if self._stamps else self._version, self._adapters.begin()
            try:
                answer = await self._answer(request, adapter)
            except EngineError:
                raise
            except Exception as error:
                raise self._named_error(request, error) from error
            finally:
                self._adapters.end(adapter)
        return _generation(request, answer, version if adapter is None else adapter.version)

    async def _sleep(self, level: int) -> None:
        await self._llm.sleep(level, mode="keep")

    async def _wake(self, *parts: Memory) -> None:
        await self._llm.wake_up(list(parts))  # goes on by itself once all of its memory is there

    def _fault(self) -> str:
        is_gone = self._llm is not None and (self._llm.errored or self._requests.error is not None)
        return self._failures.cause() or "its process or thread ended" if is_gone else ""

    def _end_requests(self, reason: str) -> None:
        if self._llm is not None:
            self._requests.fail(RuntimeError(reason))

    def _structure_problem(self) -> str:
        if self._settings.stop_strings:
            return ""
        return "the engine was started without a tokenizer, so it cannot constrain texts; set stop_strings in its settings"

    async def _answer(self, request: GenerationRequest, adapter: LoadedAdapter | None) -> Answer:
        salt = {"cache_salt": str(self._version)} if self._keep_kv else {}
        prompt: Any = {"type": "token", "prompt_token_ids": request.prompt_ids.tolist(), **salt}
        if request.placed:
            prompt = await self._images.prompt(request, salt)
        sampling, structure = request.sampling, request.structure
        own: dict[str, Any] = {"end_ids": self._end_ids, "excluded": self._placeholders, "structure": structure}
        return await self._requests.sample(
            request.request_id,
            prompt,
            partial(self._make_params, sampling, **own),
            max_tokens=min(sampling.max_tokens, self.max_model_len - len(request.prompt_ids)),
            seed=self._settings.seed if sampling.seed is None else sampling.seed,
            settings=None if request.placed or structure or adapter else _lasting(sampling),
            adapter=adapter and adapter.request,
            listener=request.on_tokens,
        )

    def _named_error(self, request: GenerationRequest, error: Exception) -> EngineError:
        """Return vLLM's exception as one of ours."""
        # Here, because an import of each request would take as long as its checks.
        from vllm.exceptions import VLLMValidationError
        from vllm.v1.engine.exceptions import EngineDeadError as VllmDeadError

        if isinstance(error, VllmDeadError) or self._dead or self._llm is None or self._llm.errored:
            self._dead = self._dead or self._failures.cause() or reason_of(error)
            return EngineDeadError(f"engine {self._settings.index} is gone: {self._dead}")
        if request.structure is not None and isinstance(error, VLLMValidationError):
            return StructureError(f"vLLM makes no grammar of it: {reason_of(error)}")
        self._meter.failed(reason_of(error))
        return EngineError(f"request {request.request_id} failed: {reason_of(error)}")

    async def _load_weights(self, update: WeightUpdate) -> int:
        llm = self._llm
        if self._settings.adapters and update.transport == "adapter":
            return await self._adapters.load(llm, update)
        if update.transport != self._settings.transport:
            raise ValueError(f"the update comes by {update.transport!r} but the engine expects {self._settings.transport!r}")
        gate = self._gate.publication(self.abort if self._asleep else None) if self._gate else contextlib.nullcontext()
        async with gate:
            return await self._take(llm, update)

    async def _take(self, llm: Any, update: WeightUpdate) -> int:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest

        # AsyncLLM.pause_generation would do the same and then sleep for 20 ms.
        await llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=not self._keep_kv)
        if (meeting := self._meeting(update)) is not None:
            await llm.init_weight_transfer_engine(WeightTransferInitRequest(meeting))
            await self._check_transfer(llm, update)
        await llm.start_weight_update()
        self._update_info = dict(update.payload.get("update", self._update_info))  # to a group it is said once
        await llm.update_weights(WeightTransferUpdateRequest(self._update_info))
        await self._check_transfer(llm, update, begun=True)
        await llm.finish_weight_update(**({"weight_version": str(update.version)} if self._stamps else {}))
        if (wanted := update.payload.get(DIGESTS)) is not None:
            shapes = {name: shape for name, (_, shape) in wanted["tensors"].items()}
            self._verify(update, joined(await llm.collective_rpc("weight_digests", args=(shapes, wanted["dtype"]))))
        reported = await llm.get_weight_version() if self._stamps else str(update.version)
        if reported != str(update.version):
            raise ValueError(f"the engine reports version {reported!r}")
        # Before generation goes on: a request that starts then must not share prefixes with older weights.
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


def _end_token_ids(model_config: Any) -> tuple[int, ...]:
    """The ids that end a sequence, from the model's generation settings and its configuration."""
    sources = (model_config.try_get_generation_config().get("eos_token_id"), getattr(model_config.hf_text_config, "eos_token_id", None))
    found: set[int] = set()
    for ids in sources:
        found.update(ids if isinstance(ids, list | tuple) else [] if ids is None else [ids])
    return tuple(sorted(found))


_lasting = attrgetter(*(name for name in Sampling.__dataclass_fields__ if name not in ("seed", "max_tokens")))
"""The settings of a request that those of an episode have in common."""

_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORTED}


def _generation(request: GenerationRequest, answer: Answer, version: int | None) -> Generation:
    """Return the answer of vLLM in our form; `version` is that of all its tokens, unless vLLM says it of each."""
    reason = _REASONS.get(str(answer.finish_reason))
    if reason is None:
        raise EngineError(f"request {request.request_id} ended with {str(answer.finish_reason)!r}")
    # Of an adapter too: vLLM counts versions of the model's own weights only.
    versions = answer.versions if version is None else [version] * len(answer.token_ids)
    return Generation(
        token_ids=ints(answer.token_ids),
        logprobs=floats(answer.logprobs),
        versions=ints(versions),
        finish_reason=reason,
        cached_tokens=answer.cached_tokens or 0,
        experts=_experts(np.concatenate(answer.experts) if answer.experts else None, len(request.prompt_ids) + len(answer.token_ids) - 1),
    )


def _experts(rows: np.ndarray[Any, Any] | None, tokens: int) -> ExpertArray | None:
    """Experts that vLLM recorded of a request # [tokens, layers, top_k]; `None` if it recorded none, or not those of every token."""
    return None if rows is None or len(rows) != tokens else experts_of(rows)

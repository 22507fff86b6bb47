"""Starting vLLM's `AsyncLLM` from `EngineSettings`; import it only after `prepare_environment`."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.model_executor.models.registry import ModelRegistry
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.engine.async_llm import AsyncLLM

from agentrl.core.model_shape import engine_context, mutual_layers, placeholder_ids, trained_positions
from agentrl.core.named_args import parse_named_args
from agentrl.core.protocols import Structure
from agentrl.core.types import Sampling
from agentrl.engine.adapters import SPARE_ADAPTERS, room_for
from agentrl.engine.failures import Failures
from agentrl.engine.inprocess import with_core_stats
from agentrl.engine.settings import EngineSettings
from agentrl.engine.vllm_plugin import owned
from agentrl.engine.vllm_scheduler import SCHEDULER
from agentrl.engine.vllm_window import check_vllm
from agentrl.weights.vllm_backend import BACKEND, EXTENSION
from agentrl.weights.vllm_groups import BACKENDS

CPU_BLOCK = 32
"""Tokens of a block of the KV cache; only whole blocks are found again, and vLLM's 128 would be longer than many conversations."""

EXCLUDED = -100.0
"""Number that vLLM adds to logits of tokens that are never sampled, the lowest that it takes."""

_BACKENDS = {"shm": BACKEND, **BACKENDS}


def placeholders(llm: AsyncLLM) -> tuple[int, ...]:
    """Return the tokens in whose places the model puts what it sees; () if it reads text only."""
    config = llm.model_config
    return placeholder_ids(config.hf_config) if config.is_multimodal_model else ()


def image_problem(config: Any, device: str) -> str:
    """Return why vLLM would compute a model's images in another way than the learner; "" if it would not."""
    if device == "cuda" or not mutual_layers(config):
        return ""
    return "on a CPU vLLM does not let the tokens of an image attend to each other in both directions; use --engine transformers"


def build(settings: EngineSettings, failures: Failures) -> AsyncLLM:
    """Load the model and start the engine: its core in a process, which notes its failures, or on a thread of this process."""
    check_vllm()
    own = parse_named_args(settings.engine.engine_args)
    config = AutoConfig.from_pretrained(settings.model.model, trust_remote_code=settings.model.trust_remote_code)
    on_device = _cuda if settings.device == "cuda" else _cpu
    arguments = AsyncEngineArgs(**{**_common(settings, config), **on_device(settings, config), **own})
    if settings.device == "cpu":
        _inspect_here(config)
    if not settings.engine.core_on_thread(settings.device):
        with failures.noted(), owned():
            return with_core_stats(lambda: AsyncLLM.from_engine_args(arguments), in_process=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # vLLM reads every attribute of every module, deprecated ones too
        return with_core_stats(lambda: AsyncLLM.from_engine_args(arguments), in_process=True)


def sampling_params(
    sampling: Sampling,
    *,
    max_tokens: int,
    end_ids: Sequence[int],
    seed: int | None,
    structure: Structure | None = None,
    excluded: Sequence[int] = (),
) -> SamplingParams:
    """Return the settings of a request in vLLM's form.

    The `end_ids` end a turn too, the `excluded` tokens are never sampled, and without a seed the request is not reproducible.
    """
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=max_tokens,
        stop=list(sampling.stop),
        include_stop_str_in_output=True,
        stop_token_ids=[*end_ids, *sampling.stop_token_ids],
        seed=seed,
        # Of the sampled token alone.
        logprobs=0,
        detokenize=bool(sampling.stop),
        logit_bias=dict.fromkeys(excluded, EXCLUDED) or None,
        structured_outputs=None if structure is None else _structured(structure),
        skip_clone=True,  # made for this request alone; a deep copy takes longer than everything else here
    )


def _structured(structure: Structure) -> StructuredOutputsParams:
    return StructuredOutputsParams(json=structure.json_schema or None, structural_tag=structure.structural_tag or None)


def _inspect_here(config: Any) -> None:
    """Let vLLM look at the model's class in this process.

    Otherwise it starts Python anew for that, to keep CUDA untouched: 6 s on the first start with an empty cache.
    """
    for name in config.architectures or ():
        if name in ModelRegistry.models:
            ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())


def _common(settings: EngineSettings, config: Any) -> dict[str, Any]:
    return {
        "model": settings.model.model,
        "dtype": settings.dtype,
        "max_num_seqs": settings.engine.max_num_seqs,
        "seed": settings.seed,
        "trust_remote_code": settings.model.trust_remote_code,
        "skip_tokenizer_init": not settings.stop_strings and not placeholder_ids(config),
        **(_images(settings) if placeholder_ids(config) else {}),
        "enable_prefix_caching": True,
        # Those of the distribution sampled from, as the learner computes them: vLLM's default is before the temperature.
        "logprobs_mode": "processed_logprobs",
        # By default the first request would choose a backend for all that follow, and small models write spaces without end.
        "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "weight_transfer_config": {"backend": _BACKENDS[settings.transport]},
        "worker_extension_cls": EXTENSION,
        "tensor_parallel_size": settings.engine.tensor_parallel_size,
        # In an actor vLLM would choose Ray, which wants resources of its own for every worker.
        "distributed_executor_backend": "uni" if settings.engine.gpus_per_engine == 1 else "mp",
        **_adapters(settings),
        **({"enable_return_routed_experts": True} if settings.routed_experts else {}),
    }


def _images(settings: EngineSettings) -> dict[str, Any]:
    # vLLM's cache of processed images wants requests in the order of their processing; of several under way at once, some would fail.
    return {"limit_mm_per_prompt": {"image": settings.max_images}, "mm_processor_cache_gb": 0, "scheduler_cls": SCHEDULER}


def _adapters(settings: EngineSettings) -> dict[str, Any]:
    if not settings.adapters:
        return {}
    held = settings.adapters + SPARE_ADAPTERS
    return {"enable_lora": True, "max_lora_rank": room_for(settings.lora_rank), "max_loras": held, "max_cpu_loras": held}


def _cuda(settings: EngineSettings, config: Any) -> dict[str, Any]:
    return {
        "max_model_len": settings.engine.max_model_len or trained_positions(config) or None,
        "gpu_memory_utilization": settings.engine.memory_share(settings.weights, torch.cuda.get_device_properties(0).total_memory),
        "enable_sleep_mode": settings.weights.sleeps,
    }


def _cpu(settings: EngineSettings, config: Any) -> dict[str, Any]:
    context = engine_context(config, asked=settings.engine.max_model_len, cpu=True)
    return {
        "max_model_len": context,
        "block_size": CPU_BLOCK,
        "enforce_eager": True,
        "kv_cache_memory_bytes": int(settings.engine.kv_cache_gib * 2**30),
        "async_scheduling": False,
        # Whole prompts only: vLLM 0.32 rewinds a seeded request's generator after each part of a prompt, which a CPU
        # generator refuses, and the engine dies.
        "enable_chunked_prefill": False,
        # A prompt that is not divided has to fit into one batch.
        "max_num_batched_tokens": max(context, 2048),
    }

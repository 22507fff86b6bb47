"""The names of vLLM that agentrl relies on without a promise of vLLM's, and the versions that have them.

They are looked for when an engine starts, so that another version of vLLM is one error and not a puzzle. vLLM stamps tokens with the
version of the weights since 0.32; for older ones `agentrl.engine.gate` keeps requests and publications apart.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
from dataclasses import dataclass
from typing import Any

from agentrl.core.errors import ConfigError

WINDOW = ">=0.26,<0.34"
"""Versions that have every name below; engines have been run with 0.32 alone."""


@dataclass(frozen=True, slots=True)
class Used:
    """A function, class, method or variable, and the parameters or fields of it that are used."""

    module: str
    name: str
    parameters: tuple[str, ...] = ()


_LLM, _CORE, _BASE = "vllm.v1.engine.async_llm", "vllm.v1.engine.core", "vllm.distributed.weight_transfer.base"
_LAYERS = "vllm.model_executor.layers"

USED = (
    Used(_LLM, "AsyncLLM.from_engine_args", ("engine_args",)),
    Used(_LLM, "AsyncLLM.generate", ("prompt", "sampling_params", "request_id", "lora_request")),
    Used(_LLM, "AsyncLLM.abort", ("request_id",)),
    Used(_LLM, "AsyncLLM.shutdown", ("timeout",)),
    Used(_LLM, "AsyncLLM.collective_rpc", ("method", "args")),
    Used(_LLM, "AsyncLLM.init_weight_transfer_engine"),
    Used(_LLM, "AsyncLLM.start_weight_update"),
    Used(_LLM, "AsyncLLM.update_weights"),
    Used(_LLM, "AsyncLLM.finish_weight_update"),
    Used(_LLM, "AsyncLLM.resume_generation"),
    Used(_LLM, "AsyncLLM.sleep", ("level", "mode")),
    Used(_LLM, "AsyncLLM.wake_up", ("tags",)),
    Used(_CORE, "EngineCore", ("vllm_config", "executor_class", "log_stats")),
    Used(_CORE, "EngineCore.preprocess_add_request"),
    Used(_CORE, "EngineCore.post_step", ("model_executed",)),
    Used(_CORE, "EngineCore.pause_scheduler", ("mode", "clear_cache")),
    Used("vllm.v1.engine.core_client", "EngineCoreClient.make_async_mp_client", ("vllm_config", "executor_class", "log_stats")),
    Used("vllm.v1.engine.core_client", "AsyncMPClient.pause_scheduler_async", ("mode", "clear_cache")),
    Used("vllm.v1.engine.output_processor", "OutputProcessor.propagate_error"),
    Used("vllm.v1.engine.output_processor", "OutputProcessor.update_scheduler_stats"),
    Used("vllm.v1.core.sched.interface", "PauseState"),
    Used("vllm.distributed.parallel_state", "destroy_model_parallel"),
    Used("vllm.distributed.parallel_state", "_WORLD"),
    Used("vllm.distributed.parallel_state", "_NODE_COUNT"),
    Used(_BASE, "WeightTransferInitRequest", ("init_info",)),
    Used(_BASE, "WeightTransferUpdateRequest", ("update_info",)),
    Used(_BASE, "WeightTransferEngine.start_weight_update"),
    Used(_BASE, "WeightTransferEngine.receive_weights", ("update_info",)),
    Used(_BASE, "WeightTransferEngine.finish_weight_update"),
    Used("vllm.distributed.weight_transfer.factory", "WeightTransferEngineFactory.register_engine"),
    Used(f"{_LAYERS}.utils", "dispatch_cpu_unquantized_gemm", ("layer", "remove_weight")),
    Used(f"{_LAYERS}.vocab_parallel_embedding", "ParallelLMHead"),
    Used(f"{_LAYERS}.linear", "QKVParallelLinear"),
    Used(f"{_LAYERS}.linear", "MergedColumnParallelLinear"),
    Used("vllm.model_executor.model_loader.reload", "initialize_layerwise_reload", ("model",)),
    Used("vllm.model_executor.model_loader.reload", "finalize_layerwise_reload"),
    Used("vllm.model_executor.model_loader.reload.layerwise", "get_layerwise_info", ("layer",)),
    Used("vllm.distributed.device_communicators.pynccl", "PyNcclCommunicator.broadcast", ("tensor", "src", "stream")),
    Used("vllm.distributed.device_communicators.pynccl", "PyNcclCommunicator.destroy"),
    Used("vllm.distributed.utils", "create_tcp_store"),
)

STAMPS = (
    Used(_LLM, "AsyncLLM.update_weight_version"),
    Used(_LLM, "AsyncLLM.get_weight_version"),
    Used(_LLM, "AsyncLLM.finish_weight_update", ("weight_version",)),
)
"""Names by which vLLM stamps tokens with the version of the weights that sampled them."""


def check_vllm() -> None:
    """Look for every name.

    Raises:
        ConfigError: If some are missing, or take other parameters.
    """
    missing = [problem for used in USED if (problem := _problem(used))]
    if missing:
        version = importlib.metadata.version(importlib.metadata.packages_distributions()["vllm"][0])
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        problem = f"vLLM {version} has not {', '.join(missing[:3])}{more}, which training relies on"
        raise ConfigError("--engine", "vllm", problem, f"Install vllm{WINDOW}, or use --engine transformers.")


def stamps_tokens() -> bool:
    """Return True if the installed vLLM says which weights sampled a token."""
    return not any(_problem(used) for used in STAMPS)


def _problem(used: Used) -> str:
    """Return what is missing, in words; nothing if it is there."""
    try:
        found: Any = importlib.import_module(used.module)
        for part in used.name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return f"{used.module}.{used.name}"
    if not used.parameters:
        return ""
    known = set(inspect.signature(found).parameters)
    lacking = [name for name in used.parameters if name not in known]
    return f"{used.module}.{used.name}({', '.join(lacking)})" if lacking else ""

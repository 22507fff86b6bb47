"""Settings of the engines, and of the weights on their way to them."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Annotated, Literal

from agentrl.core.settings import Alias, Count, CountOrZero, NonNegative, Positive, ResumeMayChange, Share, UserFile
from agentrl.engine.engine_args import parse_engine_args, workers_per_engine


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The engines that sample. They are vLLM, or models of transformers."""

    engine: Annotated[str, UserFile] = "auto"
    """Software that samples: ``vllm``, ``transformers``, which is for small models and single devices, or a class of your own,
    ``file.py:Name``. ``auto``: vLLM if it is installed, else transformers; training takes transformers for a tiny model on a CPU."""
    num_engines: Annotated[Count, ResumeMayChange, Alias("--vllm-num-engines")] = 1
    """Inference engines; a group runs on the least loaded one."""
    tensor_parallel_size: Annotated[Count, Alias("--vllm-tensor-parallel-size")] = 1
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
    gpu_memory_utilization: Annotated[Share | None, ResumeMayChange, Alias("--vllm-gpu-memory-utilization")] = None
    """Share of GPU memory an engine may take. Unset: 0.9; with ``--colocate`` what ``--learner-memory-gib`` leaves."""
    engine_timeout_s: Annotated[Positive, ResumeMayChange] = 300.0
    """Replace an engine that is busy for this many seconds and finishes no request."""
    max_engine_restarts: Annotated[CountOrZero, ResumeMayChange] = 3
    """Times that a lost engine is started again before the run goes on without it, or ends if none is left."""
    enforce_eager: Annotated[bool, ResumeMayChange] = False
    """Do not capture CUDA graphs; always so on CPU."""

    @property
    def uses_vllm(self) -> bool:
        """True if vLLM samples."""
        return self.engine == "vllm" or (self.engine == "auto" and importlib.util.find_spec("vllm") is not None)

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
        return "quantization" in parse_engine_args(self.engine_args)


@dataclass(frozen=True, kw_only=True)
class WeightsConfig:
    """Weights on their way to engines, and shared GPUs."""

    weight_transport: Literal["auto", "nccl", "ipc", "shm", "disk"] = "auto"
    """Path of new weights to engines: between GPUs (``nccl``), on shared GPUs (``ipc``), through shared memory of one machine (``shm``), or
    through ``--run-dir``, for engines that cannot join a group of NCCL (``disk``). ``auto``: one of the first three."""
    weight_bucket_mib: Count = 512
    """Size of a bucket of weights on their way through NCCL, MiB; the first learner rank and every engine hold two of them."""
    publish_timeout_s: Annotated[Positive, ResumeMayChange] = 300.0
    """Deadline of a publication: an engine that has not taken the weights by then is lost, and the others take them without it."""
    verify_weights_every: Annotated[CountOrZero, ResumeMayChange] = 100
    """Steps between two publications after which the weights of every engine are compared with the learner's, tensor by tensor; the first
    publication of a run and of a new group of engines is among them. A difference ends the run. 0: never."""
    kv_on_publish: Literal["recompute", "keep"] = "recompute"
    """Keys and values of requests under way when new weights arrive. ``recompute``: the new weights process their tokens again.
    ``keep``: they go on at once, on keys and values of older weights; requests that begin later never read those."""
    colocate: Annotated[bool, ResumeMayChange] = False
    """Engines and learner ranks share GPUs, each engine those of ``--tensor-parallel-size`` ranks, and take turns; weights move over
    CUDA IPC."""
    sleep_level: Annotated[Literal[0, 1, 2], ResumeMayChange] = 1
    """With ``--colocate``: what engines do while the learner has the GPUs. 1: their weights go to CPU memory. 2: their weights are
    dropped where new ones follow. 0: there are no turns, and both stay in GPU memory."""
    learner_memory_gib: Annotated[NonNegative, ResumeMayChange] = 0.0
    """With ``--colocate``: GPU memory that a learner rank keeps while its engine generates, GiB; 0: as ``agentrl plan`` computes it."""
    publish: Literal["merged", "adapter"] = "merged"
    """Form of the engines' weights: whole with the adapter ``merged`` in, or the ``adapter`` alone, which vLLM runs beside the model."""

    @property
    def sleeps(self) -> bool:
        """True if engines and learner take turns on the GPUs that they share."""
        return self.colocate and self.sleep_level > 0

    def memory_share(self, engine: EngineConfig, gpu_bytes: float) -> float:
        """Return the share of a GPU of `gpu_bytes` that an engine may take; half of one whose learner's needs are not known."""
        if engine.gpu_memory_utilization is not None:
            return engine.gpu_memory_utilization
        if not self.colocate:
            return 0.9
        return max(0.05, 0.95 - self.learner_memory_gib * 2**30 / gpu_bytes) if self.learner_memory_gib else 0.5

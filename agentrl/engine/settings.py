"""What an inference engine is started with; imports no heavy library, so that any process may build and pickle it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from agentrl.core.errors import ConfigError

CPU_CONTEXT_LIMIT = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Settings of one engine.

    Attributes:
        model: Hugging Face directory or hub name.
        device: Where the engine runs.
        dtype: Data type of the weights; ``auto`` is float32 on CPU and bfloat16 on CUDA.
        max_model_len: Context length in tokens; 0 is the model's own, at most 4096 on CPU.
        max_num_seqs: Sequences decoded at once.
        kv_cache_gib: Memory for the KV cache of a CPU engine, GiB.
        gpu_memory_utilization: Share of GPU memory the engine may take.
        tensor_parallel_size: GPUs of this engine.
        enforce_eager: Capture no CUDA graphs; always so on CPU.
        seed: Seed for requests that carry none.
        trust_remote_code: Allow the model's own Python code to run.
        transport: How new weights arrive: a file in shared memory, NCCL, or CUDA IPC.
        index: Place of this engine among all engines, from 0; its ranks in an NCCL group follow from it.
        stop_strings: Load the tokenizer, so that requests may carry stop strings.
        deterministic: On the CPU, make a request's tokens and log-probabilities independent, bit for bit, of the requests
            that share its batch. Costs nothing for small models; a lone request to a model with layers of more than
            about 1,000 inputs is decoded at a bit over half the speed. On CUDA set ``VLLM_BATCH_INVARIANT=1`` instead.
    """

    model: str
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    max_model_len: int = 0
    max_num_seqs: int = 256
    kv_cache_gib: float = 0.25
    gpu_memory_utilization: float = 0.9
    tensor_parallel_size: int = 1
    enforce_eager: bool = False
    seed: int = 0
    trust_remote_code: bool = False
    transport: Literal["shm", "nccl", "ipc"] = "shm"
    index: int = 0
    stop_strings: bool = False
    deterministic: bool = True

    def __post_init__(self) -> None:
        if self.device == "cpu" and self.transport != "shm":
            raise ConfigError("transport", self.transport, "needs CUDA", "Use shm for engines on the CPU.")
        if self.device == "cpu" and self.tensor_parallel_size != 1:
            raise ConfigError(
                "--tensor-parallel-size", self.tensor_parallel_size, "must be 1 on the CPU", "Use --num-engines for more engines."
            )

    @property
    def resolved_dtype(self) -> str:
        """The data type in force."""
        if self.dtype != "auto":
            return self.dtype
        return "float32" if self.device == "cpu" else "bfloat16"

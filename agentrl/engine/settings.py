"""What an inference engine is started with; imports no heavy library, so that any process may build and pickle it."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from agentrl.core.errors import ConfigError

_ALWAYS = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}

# One process holds the engine: no worker process, one OpenMP thread (faster than many on few cores, and summation order
# is fixed), and none of vLLM's helper functions compiled on first use, which would cost the first request 6 to 20 s.
_CPU = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_ATTN_SPLIT_KV": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    # The engine is in this process: a failure arrives as an exception with its traceback, and needs no second report.
    "VLLM_LOGGING_LEVEL": "CRITICAL",
}

_CUDA = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}

_TRANSPORTS = {
    # CUDA IPC handles are tuples that vLLM hands to its own engine process as pickles, over a socket private to the two.
    "ipc": {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "VLLM_HOST_IP": "127.0.0.1"},
    "shm": {"VLLM_HOST_IP": "127.0.0.1"},
    "nccl": {},
}


def engine_environment(device: Literal["cpu", "cuda"], transport: str = "shm") -> dict[str, str]:
    """The variables a process that hosts an engine should start with.

    Args:
        device: Where the engine runs.
        transport: How weights arrive, as in `EngineSettings.transport`.
    """
    return {**_ALWAYS, **(_CPU if device == "cpu" else _CUDA), **_TRANSPORTS[transport]}


def prepare_environment(device: Literal["cpu", "cuda"], transport: str = "shm") -> None:
    """Set, in this process, what `engine_environment` lists and the user has not set.

    Call it before torch and vLLM are imported: OpenMP and vLLM read some of these only once.
    """
    for name, value in engine_environment(device, transport).items():
        os.environ.setdefault(name, value)
    if device == "cpu":
        logging.getLogger("torch._library.triton").setLevel(logging.ERROR)  # it warns that Triton is missing
        compiler: Any = sys.modules.get("torch._dynamo.config")
        if compiler is not None:  # PyTorch is there already and has read the variable
            compiler.disable = os.environ["TORCHDYNAMO_DISABLE"] == "1"


@contextlib.contextmanager
def without_gc() -> Iterator[None]:
    """Import large libraries without garbage collection, and leave what they made out of later collections.

    Importing PyTorch and vLLM makes millions of lasting objects, which the collector would walk again and again: 3 of the
    7 seconds that it takes to start an engine for a small model.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()


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

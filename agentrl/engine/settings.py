"""Settings and environment variables of an inference engine; no heavy import, so that any process may build and pickle them."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from agentrl.core.process import LOOPBACK, without_collections
from agentrl.engine.plan import EngineConfig
from agentrl.rollout.plan import ModelConfig
from agentrl.weights.plan import WeightsConfig

Device = Literal["cpu", "cuda"]
Transport = Literal["shm", "nccl", "ipc"]

# VLLM_ALLOW_INSECURE_SERIALIZATION is left out everywhere: vLLM would unpickle what it is sent, which can run code.
_ALWAYS = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}

# One process holds a model: no worker process, one OpenMP thread (faster than many on few cores, and summation order
# is fixed), and none of vLLM's helper functions compiled on first use, which would cost the first request 6 to 20 s.
_CPU = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_ATTN_SPLIT_KV": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # for workers of a tensor-parallel engine
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # vLLM would want a NUMA node for each of those workers
    "VLLM_HOST_IP": LOOPBACK,
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    # A failure arrives as an exception with its traceback, or with the note of vLLM's process, and needs no second report.
    "VLLM_LOGGING_LEVEL": "CRITICAL",
}

_CUDA = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}

_TRANSPORTS = {"ipc": {"VLLM_HOST_IP": LOOPBACK}, "shm": {"VLLM_HOST_IP": LOOPBACK}, "nccl": {}}


def weight_transport(engine: EngineConfig, weights: WeightsConfig, device: Device) -> Transport:
    """Return the path of new weights, as asked for; else shared memory without GPUs or vLLM, CUDA IPC between colocated pairs, NCCL.

    To an engine, files on disk are the same as files in shared memory.
    """
    if weights.weight_transport in ("shm", "disk"):
        return "shm"
    if device == "cpu" or not engine.facts.joins_groups:
        return "shm"
    return "ipc" if weights.colocate else "nccl"


def engine_environment(device: Device, transport: Transport) -> dict[str, str]:
    """Return the environment variables that a process with an engine starts with."""
    return {**_ALWAYS, **(_CPU if device == "cpu" else _CUDA), **_TRANSPORTS[transport]}


def prepare_environment(device: Device, transport: Transport = "shm") -> None:
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
    with without_collections():
        try:
            yield
        finally:
            gc.freeze()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Settings of one engine."""

    model: ModelConfig  # with the bundled one already filled in
    engine: EngineConfig
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    device: Device = "cpu"
    seed: int = 0  # of requests that carry none
    index: int = 0  # place of this engine among all engines, from 0; its ranks in an NCCL group follow from it
    adapters: int = 0  # low-rank adapters that are held at once; 0: weights come merged
    lora_rank: int = 0  # rank of those adapters
    routed_experts: bool = False  # report the experts that each token went through
    max_images: int = 16  # images of a prompt at most, for a model that reads images
    stop_strings: bool = True  # load the tokenizer, so that requests may carry stop strings, as environments do at any turn

    @property
    def dtype(self) -> str:
        """Data type of the weights."""
        return self.engine.dtype(self.device)

    def at(self, index: int) -> EngineSettings:
        """Return the settings of the engine of another number."""
        return replace(self, index=index)

    def of_model(self, model: str) -> EngineSettings:
        """Return the settings of an engine that runs another model, which never gets new weights."""
        return replace(self, model=replace(self.model, model=model), index=0, adapters=0, routed_experts=False)

    @property
    def transport(self) -> Transport:
        """Path of new weights to this engine."""
        return weight_transport(self.engine, self.weights, self.device)

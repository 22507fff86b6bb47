"""Settings of weights on their way to engines, and of GPUs that engines and learner share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from agentrl.core.settings import Count, CountOrZero, NonNegative, ResumeMayChange

PUBLISH_TIMEOUT_S = 300.0
"""Deadline of a publication: an engine that has not taken the weights by then is lost, and the others take them without it."""


@dataclass(frozen=True, kw_only=True)
class WeightsConfig:
    """Weights on their way to engines, and shared GPUs."""

    weight_transport: Literal["auto", "nccl", "ipc", "shm", "disk"] = "auto"
    """Path of new weights to engines: between GPUs (``nccl``), on shared GPUs (``ipc``), through shared memory of one machine (``shm``), or
    through ``--run-dir``, for engines that cannot join a group of NCCL (``disk``). ``auto``: one of the first three."""
    weight_bucket_mib: Count = 512
    """Size of a bucket of weights on their way through NCCL, MiB; the first learner rank and every engine hold two of them."""
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


def never(step: int) -> bool:
    """Return False: no engine asks for the weights of a step again."""
    return False


@dataclass(frozen=True, kw_only=True)
class SenderPlan:
    """The way on which a learner rank sends weights.

    Attributes:
        transport: ``shm``, ``nccl`` or ``ipc``.
        folder: Folder for files with weights; `None` stands for shared memory.
        held: Says of a step whether its files are kept until the engines for evaluations have read them.
        bucket_bytes: Bytes that move at once in a group of processes.
        timeout_s: Deadline of a publication, seconds.
        workers: GPUs of one engine.
        adapter: The adapter that is sent alone; `None` if whole weights are.
    """

    transport: Literal["shm", "nccl", "ipc"] = "shm"
    folder: Path | None = None
    held: Callable[[int], bool] = never
    bucket_bytes: int = 0
    timeout_s: float = PUBLISH_TIMEOUT_S
    workers: int = 1
    adapter: AdapterPlan | None = None


@dataclass(frozen=True, kw_only=True)
class AdapterPlan:
    """A low-rank adapter on its way: its rank, the factor of its scale, and how many versions of it are kept."""

    rank: int
    alpha: int
    rslora: bool
    kept: int

"""The data-parallel ranks of one learner: joining, summing, leaving."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore, Store, TCPStore

from agentrl.core.metrics import MetricSums
from agentrl.core.process import LOOPBACK


@dataclass(frozen=True, slots=True)
class Ranks:
    """Number of this rank among all, and the collective operations that a step needs."""

    rank: int  # from 0
    world_size: int  # number of ranks
    device: torch.device  # where this rank's tensors live
    sequence_parallel: int = 1  # consecutive ranks that run each micro-batch together, each with a part of its tokens
    tensor_parallel: int = 1  # the same, each with a part of every layer
    owner: bool = True  # whether `leave` takes the process group down; not if somebody else in the process made it
    end: Callable[[], None] = dist.destroy_process_group  # takes it down

    @property
    def first(self) -> bool:
        """True for the rank that writes and reports."""
        return self.rank == 0

    @property
    def together(self) -> int:
        """Number of ranks that run each micro-batch together."""
        return self.sequence_parallel * self.tensor_parallel

    @property
    def data_rank(self) -> int:
        """Number of this rank's share of the rows; ranks that run micro-batches together have the same."""
        return self.rank // self.together

    @property
    def data_size(self) -> int:
        """Number of shares of the rows."""
        return self.world_size // self.together

    @property
    def leads(self) -> bool:
        """True for one of the ranks that run micro-batches together, the one that reports what they did."""
        return self.rank % self.together == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, the same bits on each; `tensor` itself is left alone."""
        if self.world_size == 1:
            return tensor
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    def merge(self, stats: MetricSums) -> MetricSums:
        """The statistics of all ranks folded together in the order of ranks."""
        if self.world_size == 1:
            return stats
        gathered: list[MetricSums | None] = [None] * self.world_size
        dist.all_gather_object(gathered, stats)
        merged = MetricSums()
        for part in gathered:
            merged.merge(part or MetricSums())
        return merged

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.world_size > 1:
            dist.barrier()

    def leave(self) -> None:
        """Take the process group down; safe to call twice."""
        if self.owner and dist.is_initialized():
            self.end()


def choose_device(device: Literal["cpu", "cuda"], place: int) -> torch.device:
    """Return the device of the rank with this place on its machine: with CUDA the only one that this process sees, or its rank's.

    It becomes the current one. On a CPU a rank computes with one thread, unless ``OMP_NUM_THREADS`` says otherwise.
    """
    if device == "cuda":
        here = torch.device("cuda", place % max(1, torch.cuda.device_count()))
        torch.cuda.set_device(here)
        return here
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    return torch.device("cpu")


def meet(rank: int, world_size: int, addr: str, port: int, device: Literal["cpu", "cuda"], timeout: timedelta) -> None:
    """Make the process group of all ranks, which meet at rank 0; one rank opens no port. On one machine it listens on loopback only."""
    if world_size == 1:
        store: Store = HashStore()
    elif addr == LOOPBACK:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        listener = _loopback_listener(port) if rank == 0 else None
        store = TCPStore(addr, port, world_size, rank == 0, timeout, master_listen_fd=listener)
    else:
        store = TCPStore(addr, port, world_size, rank == 0, timeout)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)


def _loopback_listener(port: int) -> int:
    """A descriptor that listens on loopback only; the store takes it over and would otherwise listen everywhere."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((LOOPBACK, port))
    listener.listen(512)
    return listener.detach()

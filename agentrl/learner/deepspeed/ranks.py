"""The data-parallel ranks of one learner under DeepSpeed: how a process becomes one of them."""

from __future__ import annotations

import os
import warnings
from datetime import timedelta
from typing import Literal

import torch.distributed as dist

from agentrl.learner.ranks import Ranks, choose_device, meet


def join(
    rank: int,
    world_size: int,
    *,
    master_port: int,
    master_addr: str,
    device: Literal["cpu", "cuda"],
    timeout_s: float,
    place: tuple[int, int] | None = None,
    sequence_parallel: int = 1,
    tensor_parallel: int = 1,
) -> Ranks:
    """Meet the other ranks at rank 0, and set DeepSpeed up quietly for this device.

    One rank opens no port. On one machine the meeting point listens on loopback only. With CUDA, this process sees exactly its own device
    as device 0, or all and takes its rank's. A collective operation waits at most `timeout_s` seconds for the others. `place` is the number
    of this rank among those of its machine, and how many those are.
    """
    on_machine, size = place or (rank, world_size)
    here = choose_device(device, on_machine)
    local = on_machine if here.index is None else here.index
    os.environ["DS_ACCELERATOR"] = device
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(local), WORLD_SIZE=str(world_size), LOCAL_SIZE=str(size))
    os.environ.update(MASTER_ADDR=master_addr, MASTER_PORT=str(master_port))
    owner = not dist.is_initialized()
    if owner:
        meet(rank, world_size, master_addr, master_port, device, timedelta(seconds=timeout_s))
    _prepare_deepspeed()
    return Ranks(rank, world_size, here, sequence_parallel, tensor_parallel, owner, _leave)


def _leave() -> None:
    # Not torch's function of the same name: DeepSpeed keeps groups made of this one and must forget them too.
    from deepspeed import comm

    comm.destroy_process_group()


def _prepare_deepspeed() -> None:
    import deepspeed
    from deepspeed.utils import logger

    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    logger.setLevel("ERROR")
    # Asked which ops it could compile, DeepSpeed tries out the compiler, and with several ranks then compiles one for
    # minutes that only inference collectives call, which are not used here. So it is told.
    deepspeed.ops.__compatible_ops__ = {}
    deepspeed.init_distributed(verbose=False, auto_mpi_discovery=False)

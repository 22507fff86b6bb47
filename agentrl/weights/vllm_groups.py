"""The engines' side of publication over NCCL and CUDA IPC: vLLM weight-transfer backends that meet the learner in groups.

vLLM's own backends have no deadline, keep the group that they formed first, and go on with what was in memory when a group is aborted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from agentrl.core.errors import TransferAbandonedError
from agentrl.weights.buckets import TensorInfo, receive_in_buckets
from agentrl.weights.channels import connect_nccl
from agentrl.weights.cuda import connect_shared
from agentrl.weights.groups import Connect, Group, join

Load: TypeAlias = Callable[[Sequence[tuple[str, Tensor]]], object]


@dataclass
class GroupInit(WeightTransferInitInfo):  # type: ignore[misc]
    """Meeting point of a membership."""

    places: dict[str, tuple[str, int]]  # learner rank -> address and port at which it forms its group
    bucket_bytes: int
    timeout_s: float
    before: int  # workers of members that come before this engine; with CUDA IPC learner ranks before those that it shares GPUs with
    size: int  # workers of all members


@dataclass
class GroupUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Parameters in the order in which they come."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]

    def infos(self) -> Iterator[TensorInfo]:
        """Yield their descriptions."""
        for name, dtype, shape in zip(self.names, self.dtype_names, self.shapes, strict=True):
            yield TensorInfo(name, getattr(torch, dtype), tuple(shape))


class GroupMember:
    """One worker's part in the groups of a run: it joins one after the other, and receives weights in the latest."""

    def __init__(self, connect: Connect, device: torch.device, *, paired: bool) -> None:
        self._connect, self._device, self._paired = connect, device, paired  # paired: each worker has a learner rank of its own
        self._group: Group | None = None
        self._info: GroupInit
        self.reason = ""  # why the latest transfer was given up; empty if it was not

    def join(self, info: GroupInit, worker: int) -> None:
        """Leave the group before, and join that of another membership as number `worker` of this engine's workers."""
        self.leave()
        self._info, self.reason = info, ""
        number = info.before + worker
        place, rank, size = (str(number), 1, 2) if self._paired else ("0", 1 + number, 1 + info.size)
        address, port = info.places[place]
        try:
            self._group = join(address, port, rank, size, self._connect, self._device, info.timeout_s)
        except TransferAbandonedError as error:
            self.reason = str(error)

    def receive(self, update: GroupUpdate, load: Load) -> None:
        """Receive all weights, or note why they did not come; `load` is given them bucket by bucket."""
        if self._group is None:
            return
        self.reason = ""
        try:
            with self._group.transfer(self._info.timeout_s) as channel:
                receive_in_buckets(list(update.infos()), channel, self._device, self._info.bucket_bytes, load)
        except TransferAbandonedError as error:
            self.reason = str(error)
            self.leave()

    def leave(self) -> None:
        """Leave the group; safe to call twice."""
        group, self._group = self._group, None
        if group is not None:
            group.close()


class Receiving:
    """Part of the weight-transfer backends here: vLLM before 0.29 wants a sender with each, and the learner sends by itself."""

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: Any) -> None:
        """Never called: `agentrl.weights.sender` is the sender.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError("agentrl's learner sends weights by agentrl.weights.sender")


class GroupTransfer(Receiving, WeightTransferEngine[GroupInit, GroupUpdate]):  # type: ignore[misc]
    """Loads weights that arrive in buckets over NCCL."""

    init_info_cls = GroupInit
    update_info_cls = GroupUpdate
    connect: Connect = staticmethod(connect_nccl)
    paired = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._member = GroupMember(type(self).connect, self.device, paired=self.paired)

    def init_transfer_engine(self, init_info: GroupInit) -> None:
        """Join the group of a membership; whether that succeeded is told by `outcome`."""
        parallel = self.parallel_config
        self._member.join(init_info, parallel.data_parallel_index * parallel.world_size + parallel.rank)

    def start_weight_update(self) -> None:
        """Put the model into the state in which it takes checkpoint tensors."""
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: GroupUpdate) -> None:
        """Load every tensor, or note why they did not all come."""
        self._member.receive(update_info, self.model.load_weights)

    def finish_weight_update(self) -> None:
        """Leave that state; after a transfer that was given up some layers hold old weights and some nothing sensible."""
        finalize_layerwise_reload(self.model, self.model_config)

    def outcome(self) -> str:
        """Return why the latest transfer was given up; empty if it was not."""
        return self._member.reason

    def shutdown(self) -> None:
        """Leave the group."""
        self._member.leave()


class PairedTransfer(GroupTransfer):
    """Loads weights from the buffers of the learner rank on the same GPU, which are mapped by CUDA IPC."""

    connect: Connect = staticmethod(connect_shared)
    paired = True


BACKENDS = {"nccl": "agentrl_nccl", "ipc": "agentrl_ipc"}

for _kind, _class in (("nccl", GroupTransfer), ("ipc", PairedTransfer)):
    if BACKENDS[_kind] not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKENDS[_kind], _class)

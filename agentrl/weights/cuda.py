"""The learner's side of publication between GPUs: NCCL between machines or GPUs, CUDA IPC on one GPU.

Both use the trainer classes that vLLM documents for reinforcement learning. Those expect to steer the engines themselves;
here the engines are steered by `VllmEngine.load_weights`, so they get clients that only note what they are told.
Neither class has been run on a GPU; what does not need one is tested.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

from torch import Tensor

from agentrl.core.errors import WeightSyncError
from agentrl.core.protocols import WeightUpdate
from agentrl.weights.sender import NamedTensors

TRANSFER_TIMEOUT_S = 600.0


class NcclSender:
    """Broadcasts from the first learner rank to every worker of every engine, in one NCCL group.

    The group is formed while the engines handle the first update, which tells them where to meet. Each version is copied on
    the learner's GPU and broadcast from a thread, so that the learner may go on; the next `send` waits for it. `engine_ranks` is
    engines times tensor-parallel size; with several machines, `host` must be an address that the engines can reach.
    """

    every_rank = False

    def __init__(self, engine_ranks: int, host: str = "127.0.0.1") -> None:
        self._connect = {"master_address": host, "master_port": free_port(host), "world_size": engine_ranks + 1, "packed": True}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="agentrl-nccl")
        self._transfer: Future[None] | None = None
        self._snapshot = _Snapshot()
        self._trainer: Any = None

    def send(self, named_tensors: NamedTensors, version: int) -> WeightUpdate:
        """Copy the weights and start to broadcast them.

        Raises:
            WeightSyncError: If the version before did not reach the engines.
        """
        self._wait()
        self._snapshot.take(named_tensors)
        update = self._snapshot.description()
        self._transfer = self._thread.submit(self._broadcast)
        return WeightUpdate(version=version, transport="nccl", payload={"connect": self._connect, "update": update})

    def close(self) -> None:
        """Leave the group; a broadcast that an engine never joined is abandoned."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        trainer, self._trainer = self._trainer, None
        if trainer is not None and self._transfer is not None and self._transfer.done():
            trainer.shutdown()

    def _wait(self) -> None:
        if self._transfer is None:
            return
        try:
            self._transfer.result(TRANSFER_TIMEOUT_S)
        except FutureTimeoutError as error:
            raise WeightSyncError(f"engines did not take the weights of the version before within {TRANSFER_TIMEOUT_S:.0f} s") from error
        except Exception as error:
            raise WeightSyncError(f"the broadcast of the version before failed: {error}") from error

    def _broadcast(self) -> None:
        if self._trainer is None:
            from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

            self._trainer = NCCLTrainerWeightTransferEngine.trainer_init(
                NCCLTrainerInitInfo(**self._connect, rank=0), client=NotingClient(), source=_source(self._snapshot)
            )
        self._trainer.send_weights()


class IpcSender:
    """Lends engines on the same GPU the learner's copy of the weights, by CUDA IPC handles.

    Every learner rank calls `send`: each contributes the handles for the GPU it shares with an engine, and what the first
    rank returns holds all of them. The copy is kept until the next version is sent.
    """

    every_rank = True

    def __init__(self, rank: int = 0) -> None:
        self._rank = rank
        self._snapshot = _Snapshot()
        self._client = NotingClient()
        self._trainer: Any = None

    def send(self, named_tensors: NamedTensors, version: int) -> WeightUpdate:
        """Copy the weights and make their handles."""
        self._snapshot.take(named_tensors)
        if self._trainer is None:
            from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo, IPCTrainerWeightTransferEngine

            self._trainer = IPCTrainerWeightTransferEngine.trainer_init(
                IPCTrainerInitInfo(rank=self._rank), client=self._client, source=_source(self._snapshot)
            )
        self._trainer.send_weights()
        update = {name: value for name, value in self._client.update.items() if value is not None}
        return WeightUpdate(version=version, transport="ipc", payload={"connect": {"packed": False}, "update": update})

    def close(self) -> None:
        """Give up the copy."""
        self._snapshot.tensors.clear()


class NotingClient:
    """Stands where vLLM's trainer expects to call engines; keeps the last update it was told."""

    def __init__(self) -> None:
        self.update: dict[str, Any] = {}

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Engines connect when they handle the update."""

    def start_weight_update(self) -> None:
        """Engines start on their own."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Note what engines have to be told."""
        self.update = update_info

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Engines finish on their own."""


class _Snapshot:
    """A copy of the weights on their own device."""

    def __init__(self) -> None:
        self.tensors: list[tuple[str, Tensor]] = []

    def take(self, named_tensors: NamedTensors) -> None:
        """Replace the copy."""
        self.tensors.clear()
        self.tensors.extend((name, tensor.detach().clone().contiguous()) for name, tensor in named_tensors)

    def description(self) -> dict[str, Any]:
        """Names, data types and shapes, as vLLM's receivers take them."""
        return {
            "names": [name for name, _ in self.tensors],
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in self.tensors],
            "shapes": [list(tensor.shape) for _, tensor in self.tensors],
        }


def _source(snapshot: _Snapshot) -> Any:
    """The snapshot in the form vLLM's trainers read."""
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    class SnapshotSource(WeightSource):  # type: ignore[misc]
        def metadata(self) -> list[ParamMeta]:
            return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in snapshot.tensors]

        def __iter__(self) -> Iterator[tuple[str, Tensor]]:
            return iter(snapshot.tensors)

    return SnapshotSource()


def free_port(host: str) -> int:
    """Return a TCP port of `host` that is free at this moment."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])

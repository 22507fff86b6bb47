"""The learner's side of publication to engines with GPUs: buckets of weights, in groups that are formed anew when their members change.

Over NCCL the first learner rank sends to every worker of every engine. Over CUDA IPC every rank sends to the worker on its own GPU.
The engines' side is `agentrl.weights.vllm_groups`. On one H100 `agentrl doctor` has moved buckets
by CUDA IPC, equal by digest; nothing has gone to vLLM or over NCCL. All but the channels is tested without a GPU.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, Literal

import torch
from torch import Tensor

from agentrl.core.errors import WeightSyncError
from agentrl.core.process import LOOPBACK
from agentrl.core.protocols import Membership, WeightUpdate
from agentrl.weights.buckets import BUCKET_BYTES, TensorInfo, as_vllm_reads, describe, send_in_buckets
from agentrl.weights.channels import CudaHandles, SharedBuffers, connect_nccl
from agentrl.weights.groups import Channel, Connect, Group, host
from agentrl.weights.sender import NamedTensors

TRANSFER_TIMEOUT_S = 300.0
"""Deadline of a publication: for the members to meet, and again for the transfer."""


def connect_shared(store: Any, rank: int, size: int, device: torch.device) -> SharedBuffers:
    """Share buffers with the other process on the same GPU."""
    return SharedBuffers(store, rank, device, CudaHandles())


class GroupSender:
    """Sends weights in buckets to the engines of a membership, without a copy of the model.

    Every learner rank calls `send`. A thread of each rank then goes over the parameters, which under ZeRO-3 gathers them one at a time,
    and the ranks that have engines to send to pack them into buckets (`agentrl.weights.buckets`). `settle` waits for it, and comes
    before anything that changes a weight or calls a collective operation. The first update for a membership tells engines where to meet
    and what they get; later ones say the version alone. A group is formed while engines handle that update, at a port that this rank has
    listened on since before it told anybody. When a transfer is given up the ranks still go over all parameters, as they do it together.
    """

    every_rank = True

    def __init__(
        self,
        kind: Literal["nccl", "ipc"],
        *,
        workers: int = 1,  # of an engine
        host: str = LOOPBACK,  # an address of this rank's machine that engines reach
        rank: int = 0,
        bucket_bytes: int = BUCKET_BYTES,
        timeout_s: float = TRANSFER_TIMEOUT_S,
    ) -> None:
        self._kind, self._workers, self._rank, self._bucket_bytes, self._timeout_s = kind, workers, rank, bucket_bytes, timeout_s
        self._host = LOOPBACK if kind == "ipc" else host  # processes on one GPU are on one machine
        self._connect: Connect = connect_shared if kind == "ipc" else connect_nccl
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="agentrl-weights")
        self._transfer: Future[None] | None = None
        self._infos: list[TensorInfo] = []
        self._members: Membership | None = None  # of the group
        self._group: Group | None = None
        self._listener: socket.socket | None = None  # of a group that is not formed yet
        self._given_up = ""
        self._lock = threading.Lock()

    def send(self, named_tensors: NamedTensors, version: int, members: Membership | None = None) -> WeightUpdate:
        """Start to send to `members`; `named_tensors` is gone over twice the first time, and on a thread of this sender.

        A transfer that is still under way is given up.

        Raises:
            WeightSyncError: If no members are named.
        """
        if members is None:
            raise WeightSyncError(f"weights go over {self._kind} to engines that are named, and none are")
        self.abandon("the weights are sent again")
        if not self._infos:
            self._infos = describe(named_tensors)
        others = self._others(members)
        payload: dict[str, Any] = {}
        if self._members != members or (others and self._group is None):
            payload = self._meet(members, others)
        self._transfer = self._thread.submit(self._run, named_tensors, self._moment(), others)
        return WeightUpdate(version=version, transport=self._kind, payload=payload, members=members)

    def abandon(self, reason: str) -> None:
        """Give up a transfer that is under way, tell the engines that take part in it, and wait for the end of this rank's part."""
        transfer, self._transfer = self._transfer, None
        if transfer is None:
            return
        if not transfer.done():
            with self._lock:
                self._given_up, group = reason, self._group
            if group is not None:
                group.abandon(reason)
        # The members' meeting and the transfer have a deadline each, so whatever takes longer than both hangs.
        if transfer.exception(2 * self._timeout_s + 30.0) is not None:
            self._leave()
        self._given_up = ""

    def settle(self) -> None:
        """Wait until all engines have the version before.

        Raises:
            WeightSyncError: If they did not get it.
        """
        transfer, self._transfer = self._transfer, None
        if transfer is None:
            return
        try:
            transfer.result(2 * self._timeout_s + 30.0)  # both parts have deadlines of their own
        except FutureTimeoutError as error:
            raise WeightSyncError(f"engines did not take the weights of the version before within {self._timeout_s:g} s") from error
        except Exception as error:
            raise WeightSyncError(f"the weights of the version before did not reach the engines: {error}") from error

    def close(self) -> None:
        """Leave the group, without waiting for a transfer that is under way. Safe to call twice."""
        with self._lock:
            self._given_up, group = "the learner ended", self._group
        if group is not None and self._transfer is not None and not self._transfer.done():
            group.abandon(self._given_up)
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._leave()

    def _others(self, members: Membership) -> int:
        """Return the number of workers that this rank sends to."""
        if self._kind == "nccl":
            return 0 if self._rank else self._workers * len(members.engines)
        return int(f"engine-{self._rank // self._workers}" in members.engines)

    def _meet(self, members: Membership, others: int) -> dict[str, Any]:
        """Leave the group before, listen, and return where and how engines join, and what they get."""
        self._leave()
        self._members = members
        places: dict[str, tuple[str, int]] = {}
        if others:
            self._listener = socket.create_server((self._host, 0))
            places[str(self._rank)] = (self._host, self._listener.getsockname()[1])
        connect = {"places": places, "bucket_bytes": self._bucket_bytes, "timeout_s": self._timeout_s}
        return {"connect": connect, "update": as_vllm_reads(self._infos)}

    def _moment(self) -> tuple[torch.device, Any]:
        """Return the device, and an event after everything that this thread has asked of it."""
        if not torch.cuda.is_available():
            return torch.device("cpu"), None
        return torch.device("cuda", torch.cuda.current_device()), torch.cuda.current_stream().record_event()

    @torch.no_grad()
    def _run(self, named_tensors: NamedTensors, moment: tuple[torch.device, Any], others: int) -> None:
        device, asked = moment
        if asked is not None:  # a new thread is on device 0 and follows no other thread's stream
            torch.cuda.set_device(device)
            torch.cuda.current_stream().wait_event(asked)
        tensors = iter(named_tensors)
        try:
            if others:
                self._to_engines(tensors, device, others)
        except BaseException:
            self._leave()
            raise
        finally:
            for _ in tensors:  # the other ranks gather them with this one
                pass

    def _to_engines(self, tensors: Iterator[tuple[str, Tensor]], device: torch.device, others: int) -> None:
        group = self._group
        if group is None:
            listener, self._listener = self._listener, None
            if listener is None:
                raise WeightSyncError("the group with the engines was given up")
            group = host(listener, others, self._connect, device, self._timeout_s, lambda: self._given_up)
            with self._lock:
                self._group = group
        # `abandon` found no group to tell while this one was formed.
        if self._given_up:
            group.abandon(self._given_up)
        with group.transfer(self._timeout_s) as channel:
            send_in_buckets(tensors, self._infos, channel, device, self._bucket_bytes)

    def _leave(self) -> None:
        with self._lock:
            group, self._group, listener, self._listener = self._group, None, self._listener, None
            self._members = None
        if listener is not None:
            listener.close()
        if group is not None:
            group.close()


__all__ = ["Channel", "GroupSender"]

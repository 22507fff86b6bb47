"""Weights in groups without GPUs: channels over sockets and shared files in place of NCCL and CUDA IPC; all else is as on GPUs."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from agentrl.core.protocols import WeightUpdate
from agentrl.weights.channels import SharedBuffers
from agentrl.weights.cuda import GroupSender
from agentrl.weights.vllm_groups import GroupInit, GroupMember, GroupUpdate
from tests.shared_files import FileHandles


class SocketChannel:
    """A broadcast over one socket to each member. As with NCCL nothing ends it but `abort`, after which waits end and bytes are garbage."""

    def __init__(self, peers: Sequence[socket.socket], *, first: bool) -> None:
        self._peers, self._first, self._aborted = peers, first, threading.Event()

    def buffer(self, size: int, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def end(self) -> None:
        return

    def begin(self, bucket: Tensor) -> Callable[[], object]:
        return lambda: self._move(memoryview(bucket.numpy()))

    def _move(self, data: memoryview) -> None:
        for peer in self._peers:
            try:
                if self._first:
                    peer.sendall(data)
                    peer.recv(1)  # it has the whole bucket
                else:
                    left = data
                    while left and (count := peer.recv_into(left)):
                        left = left[count:]
                    if left:
                        raise OSError("the first member is gone")
                    peer.sendall(b"x")
            except OSError:
                self._aborted.wait()  # a broadcast of NCCL that lost a member hangs

    def abort(self) -> None:
        self._aborted.set()
        for peer in self._peers:
            try:
                peer.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue


def connect_sockets(store: Any, rank: int, size: int, device: torch.device) -> SocketChannel:
    """Meet over the store, as pynccl does."""
    from vllm.distributed.utils import StatelessProcessGroup

    group = StatelessProcessGroup(rank, size, store)
    if rank:
        address = group.broadcast_obj(None, src=0)
        return SocketChannel([socket.create_connection(address)], first=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        group.broadcast_obj(server.getsockname(), src=0)
        return SocketChannel([server.accept()[0] for _ in range(size - 1)], first=True)


def connect_files(store: Any, rank: int, size: int, device: torch.device) -> SharedBuffers:
    return SharedBuffers(store, rank, device, HANDLES)


HANDLES = FileHandles()


def sender(kind: Any = "nccl", **changes: Any) -> GroupSender:
    """A sender of this process whose channel needs no GPU."""
    made = GroupSender(kind, **{"bucket_bytes": 1000, "timeout_s": 30.0, **changes})
    made._connect = connect_files if kind == "ipc" else connect_sockets
    return made


def member(kind: Any = "nccl") -> GroupMember:
    """A worker of an engine."""
    return GroupMember(connect_files if kind == "ipc" else connect_sockets, torch.device("cpu"), paired=kind == "ipc")


def init_of(update: WeightUpdate, engine: str, *, workers: int = 1) -> GroupInit:
    """What an engine tells its workers."""
    assert update.members is not None
    index = int(engine.rpartition("-")[2])
    position = index if update.transport == "ipc" else update.members.engines.index(engine)
    return GroupInit(**update.payload["connect"], before=position * workers, size=len(update.members.engines) * workers)


class Engine:
    """An engine of one worker, on a thread or in a process: takes each update as `VllmEngine` does, and keeps what it loaded."""

    def __init__(self, name: str, kind: Any = "nccl", slow_s: float = 0.0) -> None:
        self.name, self.member, self.loaded, self.slow_s = name, member(kind), dict[str, Tensor](), slow_s
        self._update: GroupUpdate

    def take(self, update: WeightUpdate) -> str:
        """Load; returns why the transfer was given up, or nothing."""
        if "connect" in update.payload:
            self.member.join(init_of(update, self.name), 0)
            self._update = GroupUpdate(**update.payload["update"])
        if not self.member.reason:
            self.member.receive(self._update, self._load)
        return self.member.reason

    def _load(self, pairs: Sequence[tuple[str, Tensor]]) -> None:
        time.sleep(self.slow_s)
        self.loaded.update({name: tensor.clone() for name, tensor in pairs})

"""Channels between GPUs: broadcasts of NCCL, and buffers on one GPU that another process maps by CUDA IPC.

`CudaHandles` have been run on one H100, by `agentrl doctor`; what is done with NCCL has not been run on a GPU.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from agentrl.core.errors import WeightSyncError

LOOK_S = 0.0005
"""Seconds between two looks at whether the other side of a bucket is done."""


def connect_nccl(store: Any, rank: int, size: int, device: torch.device) -> NcclChannel:
    """Join the NCCL group of all members."""
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    from vllm.distributed.utils import StatelessProcessGroup

    torch.cuda.set_device(device)
    with _unpinned():
        group = PyNcclCommunicator(StatelessProcessGroup(rank, size, store), device=device)
    if group.disabled:  # it would broadcast nothing, without an error, and engines would load what is in memory
        name = os.environ.get("VLLM_NCCL_SO_PATH") or "libnccl.so.2"
        remedy = "install nvidia-nccl, name the library by VLLM_NCCL_SO_PATH, or use --weight-transport disk"
        raise WeightSyncError(f"NCCL cannot be used on {device}: vLLM did not load {name} ({remedy})")
    return NcclChannel(group)


def _unpinned() -> AbstractContextManager[None]:
    """Leave out NCCL's variables that vLLM sets for its own groups, where it sets some: since 0.32."""
    try:
        from vllm.utils.nccl import unpinned_nccl_env
    except ImportError:
        return nullcontext()
    unpinned: AbstractContextManager[None] = unpinned_nccl_env()
    return unpinned


class NcclChannel:
    """Broadcasts buckets on a CUDA stream of its own, behind the work that the caller's stream has when they begin."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def buffer(self, size: int, device: torch.device) -> Tensor:
        """As `Channel.buffer`."""
        return torch.empty(size, dtype=torch.uint8, device=device)

    def begin(self, bucket: Tensor) -> Callable[[], object]:
        """As `Channel.begin`; after `abort` nothing is sent."""
        self._stream.wait_stream(torch.cuda.current_stream())
        self._group.broadcast(bucket, src=0, stream=self._stream)
        sent: Callable[[], object] = self._stream.record_event().synchronize
        return sent

    def end(self) -> None:
        """As `Channel.end`; nothing is kept."""

    def abort(self) -> None:
        """As `Channel.abort`; vLLM's communicator does nothing after it."""
        self._group.destroy()


class Handles(Protocol):
    """Memory of one process that another one on the same machine can map."""

    def allocate(self, size: int, device: torch.device) -> Tensor:
        """Return memory that can be shared # [size] bytes."""
        ...

    def share(self, buffer: Tensor) -> str:
        """Return text by which another process finds a whole buffer."""
        ...

    def open(self, handle: str, device: torch.device) -> Tensor:
        """Return the buffer of another process as bytes # [n]."""
        ...


class CudaHandles:
    """Handles of CUDA IPC, as PyTorch makes them for its own processes; they are numbers and bytes, and nothing is unpickled."""

    def allocate(self, size: int, device: torch.device) -> Tensor:
        """As `Handles.allocate`."""
        return torch.empty(size, dtype=torch.uint8, device=device)

    def share(self, buffer: Tensor) -> str:
        """As `Handles.share`."""
        storage = buffer.untyped_storage()
        _, handle, size, offset, counter, counter_offset, event, sync = storage._share_cuda_()  # type: ignore[no-untyped-call]
        return json.dumps([handle.hex(), size, offset, counter.hex(), counter_offset, event.hex(), sync])

    def open(self, handle: str, device: torch.device) -> Tensor:
        """As `Handles.open`."""
        from torch.multiprocessing.reductions import rebuild_cuda_tensor

        memory, size, offset, counter, counter_offset, event, sync = json.loads(handle)
        ends = {"ref_counter_handle": bytes.fromhex(counter), "ref_counter_offset": counter_offset}
        ends |= {"event_handle": bytes.fromhex(event), "event_sync_required": sync}
        opened: Tensor = rebuild_cuda_tensor(  # type: ignore[no-untyped-call]
            *(Tensor, (size,), (1,), 0, torch.storage.TypedStorage, torch.uint8),
            *(device.index, bytes.fromhex(memory), size, offset, False),
            **ends,
        )
        return opened


class SharedBuffers:
    """Has one reader map the sender's buffers and copy each bucket out of them; nothing else is copied.

    The store says which bytes of which buffer are a bucket, and when the reader has them. The sender has two buffers, so it keeps no
    more than two buckets alive.
    """

    def __init__(self, store: Any, rank: int, device: torch.device, handles: Handles) -> None:
        self._store, self._first, self._device, self._handles = store, rank == 0, device, handles
        self._shared: dict[int, int] = {}  # address of a buffer of the sender, in this transfer -> its number
        self._buffers = 0
        self._opened: dict[int, Tensor] = {}  # number -> the sender's buffer
        self._count = 0
        self._aborted = threading.Event()

    def buffer(self, size: int, device: torch.device) -> Tensor:
        """As `Channel.buffer`."""
        return self._handles.allocate(size, device)

    def begin(self, bucket: Tensor) -> Callable[[], object]:
        """As `Channel.begin`."""
        number, self._count = self._count, self._count + 1
        if self._first:
            self._offer(number, bucket)
            return lambda: self._wait(f"read/{number}")
        return lambda: self._read(number, bucket)

    def end(self) -> None:
        """As `Channel.end`; the next transfer has other buffers, even at the same addresses, and mapped ones are given back."""
        self._shared.clear()
        self._opened.clear()

    def abort(self) -> None:
        """As `Channel.abort`."""
        self._aborted.set()

    def _offer(self, number: int, bucket: Tensor) -> None:
        storage = bucket.untyped_storage()
        buffer = self._shared.get(storage.data_ptr())
        if buffer is None:
            buffer = self._shared[storage.data_ptr()] = self._buffers
            self._buffers += 1
            # The bucket may be a part of its buffer; the reader maps the whole buffer once, and finds each bucket by its offset.
            whole = torch.empty(0, dtype=torch.uint8, device=bucket.device).set_(storage)
            self._store.set(f"buffer/{buffer}", self._handles.share(whole))
        _synchronize(self._device)  # the copies into the buffer
        self._store.set(f"bucket/{number}", f"{buffer} {bucket.storage_offset()} {bucket.numel()}")

    def _read(self, number: int, into: Tensor) -> None:
        if not self._wait(f"bucket/{number}"):
            return
        buffer, start, size = map(int, self._store.get(f"bucket/{number}").decode().split())
        if size != into.numel():
            raise ValueError(f"a bucket of {size} bytes came where {into.numel()} were expected")
        if buffer not in self._opened:
            self._opened[buffer] = self._handles.open(self._store.get(f"buffer/{buffer}").decode(), self._device)
        into.copy_(self._opened[buffer][start : start + size])
        # The sender fills the buffer again as soon as it sees the key, so the copy has to be done by then.
        _synchronize(self._device)
        self._store.set(f"read/{number}", "yes")

    def _wait(self, key: str) -> bool:
        """Wait for a key of the store; false if the channel is aborted first."""
        # Looks again and again, because `abort` could not end a wait of the store's own.
        while not self._aborted.is_set():
            if self._store.check([key]):
                return True
            time.sleep(LOOK_S)
        return False


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

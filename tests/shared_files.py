"""Memory that processes share without a GPU, in place of CUDA IPC."""

from __future__ import annotations

import mmap
import os
import tempfile

import torch
from torch import Tensor


class FileHandles:
    """Memory that is shared by the path of a file, as CUDA IPC shares it by a handle."""

    def __init__(self) -> None:
        self.paths: dict[int, str] = {}

    def allocate(self, size: int, device: torch.device) -> Tensor:
        descriptor, path = tempfile.mkstemp(prefix="agentrl-test-", dir="/dev/shm")
        os.ftruncate(descriptor, size)
        mapped = mmap.mmap(descriptor, size)
        os.close(descriptor)
        buffer = torch.frombuffer(mapped, dtype=torch.uint8)
        self.paths[buffer.data_ptr()] = path
        return buffer

    def share(self, buffer: Tensor) -> str:
        return self.paths[buffer.data_ptr()]

    def open(self, handle: str, device: torch.device) -> Tensor:
        with open(handle, "r+b") as file:
            mapped = torch.frombuffer(mmap.mmap(file.fileno(), os.path.getsize(handle)), dtype=torch.uint8)
        os.unlink(handle)  # the memory lives as long as it is mapped
        return mapped

"""Channels that cannot carry anything say so."""

from __future__ import annotations

import socket

import pytest
import torch

from agentrl.core.errors import WeightSyncError
from agentrl.weights.channels import connect_nccl


@pytest.mark.vllm
def test_nccl_without_its_library_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's communicator then has `disabled` set, and broadcasts nothing without an error."""
    from vllm.distributed.utils import create_tcp_store

    monkeypatch.setenv("VLLM_NCCL_SO_PATH", "/nowhere/libnccl.so.2")
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    listener = socket.create_server(("127.0.0.1", 0))
    store = create_tcp_store(*listener.getsockname()[:2], listen_socket=listener, world_size=2, is_master=True, wait_for_workers=False)
    with pytest.raises(WeightSyncError, match=r"NCCL cannot be used on cuda:0: vLLM did not load /nowhere/libnccl.so.2 \(install"):
        connect_nccl(store, 0, 2, torch.device("cuda", 0))

"""The scheduler's figures, without the rest of vLLM's statistics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.v1.engine.core_client import EngineCoreClient


def with_core_stats(build: Callable[[], Any]) -> Any:
    """Call `build`, which makes an `AsyncLLM` with statistics off, such that its core reports running, waiting and cache usage.

    vLLM's own switch would also time every request and every step in this process, and export all of it to Prometheus.
    """
    factory = EngineCoreClient.make_async_mp_client

    def make(**named: Any) -> Any:
        return factory(**{**named, "log_stats": True})

    EngineCoreClient.make_async_mp_client = staticmethod(make)
    try:
        return build()
    finally:
        EngineCoreClient.make_async_mp_client = factory

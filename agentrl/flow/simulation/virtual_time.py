"""An event loop on which waiting takes no time, so that hours of a run pass in seconds."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import anyio

T = TypeVar("T")


class _Jump(selectors.DefaultSelector):
    """Instead of waiting, moves the loop's clock; a wait for nothing at all is a deadlock."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("deadlock: nothing is scheduled and nobody is ready")
        self.now += max(0.0, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next thing that is due; code that takes the loop's time sees no difference."""

    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._jump.now

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        """Here and now: a thread would take time that the clock does not know of."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future


def run_virtual(main: Callable[[], Awaitable[T]]) -> T:
    """Run `main` on virtual time, to its end.

    Args:
        main: Takes no arguments; what it waits for must be timers and what they set off, no files or threads.

    Returns:
        What `main` returns.

    Raises:
        RuntimeError: If everybody waits and no timer is left, which is a deadlock; or inside a running event loop.
    """
    return anyio.run(main, backend_options={"loop_factory": VirtualLoop})

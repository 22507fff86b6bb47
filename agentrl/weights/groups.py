"""Groups in which weights go to engines: how members meet, what they send on, and an end to every transfer that does not end by itself.

NCCL has no time limit: a member that dies leaves the others in a broadcast for ever. So each member has a store beside the channel that
carries the weights, over TCP at the first member, and a thread that looks at it: when a transfer takes too long, is given up, or the store
is gone, the thread aborts the channel. A group is used for one membership, and never again after a transfer in it was given up.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from agentrl.core.errors import TransferAbandonedError

T = TypeVar("T")

POLL_S = 0.05
POLLS_PER_S = 320
"""Looks at the store in a second by all members together: its host also trains, and thousands of members would keep it busy."""
_ARRIVED, _COMPLETE, _ABANDONED = "arrived", "complete", "abandoned"


class Carrier(Protocol):
    """Carries buckets from the first member of a group to all others, in order."""

    def buffer(self, size: int, device: torch.device) -> Tensor:
        """Return memory to send buckets from # [size] bytes."""
        ...

    def begin(self, bucket: Tensor) -> Callable[[], object]:
        """Start to send bytes, or to receive as many; calling what is returned waits, after which the bytes may be used or replaced."""
        ...


class Channel(Carrier, Protocol):
    """A way to carry buckets, of which a group knows when a transfer has ended or is given up."""

    def end(self) -> None:
        """Forget the buffers of a transfer that has ended."""

    def abort(self) -> None:
        """End what is under way, from any thread: whoever waits goes on, with bytes that mean nothing. Safe to call twice."""


Connect: TypeAlias = Callable[[Any, int, int, torch.device], Channel]
"""Makes the channel of a member: its store, its rank, the number of members, its device."""


class Group:
    """One member's side of a group of `size`."""

    def __init__(self, store: Any, channel: Channel, size: int = 2) -> None:
        self._store, self.channel = store, channel
        self._poll_s = poll_s(size)
        self.reason = ""  # why it was given up

    @contextlib.contextmanager
    def transfer(self, timeout_s: float) -> Iterator[Carrier]:
        """Send or receive within the block; afterwards every byte has arrived.

        Raises:
            TransferAbandonedError: If a member gave the transfer up, or is gone, or it took longer than `timeout_s`.
            Exception: What the block itself raised; the others are told.
        """
        over = threading.Event()
        watch = threading.Thread(target=self._watch, args=(over, timeout_s), name="agentrl-transfer", daemon=True)
        watch.start()
        try:
            self._check()
            yield self
            self._check()
            self.channel.end()
        except Exception as error:
            # Once the group is given up, whatever fails in the block is a consequence of that.
            mine = not self.reason and not isinstance(error, TransferAbandonedError)
            self.abandon(f"{type(error).__name__}: {error}")
            if mine:
                raise
            raise TransferAbandonedError(self.reason) from error
        finally:
            over.set()
            watch.join()

    def buffer(self, size: int, device: torch.device) -> Tensor:
        """As `Carrier.buffer`."""
        return self.channel.buffer(size, device)

    def begin(self, bucket: Tensor) -> Callable[[], object]:
        """As `Carrier.begin`; a wait that ended because the group was given up is an error."""
        wait = self._carried(lambda: self.channel.begin(bucket))
        return lambda: self._carried(wait)

    def _carried(self, call: Callable[[], T]) -> T:
        try:
            result = call()
        except Exception as error:
            raise TransferAbandonedError(f"a member is gone: {type(error).__name__}: {error}") from error
        self._check()
        return result

    def abandon(self, reason: str) -> None:
        """Give the group up, and tell all members; from any thread."""
        self.reason = self.reason or reason
        # The store may be gone with the first member; the channel is aborted in any case.
        with contextlib.suppress(Exception):
            self._store.set(_ABANDONED, self.reason)
        self.channel.abort()

    def close(self) -> None:
        """Leave the group."""
        self.channel.abort()

    def _check(self) -> None:
        if self.reason:
            raise TransferAbandonedError(self.reason)

    def _watch(self, over: threading.Event, timeout_s: float) -> None:
        end_s = time.monotonic() + timeout_s
        while not over.wait(self._poll_s):
            reason = _given_up(self._store)
            if not reason and time.monotonic() > end_s:
                reason = f"it did not end within {timeout_s:g} s"
            if reason:
                self.abandon(reason)
                return


def host(
    listener: socket.socket, others: int, connect: Connect, device: torch.device, timeout_s: float, given_up: Callable[[], str] = str
) -> Group:
    """Form a group as its first member, at a port that is listened on already, once `others` have arrived.

    `given_up` returns why nobody shall wait any longer, once that is so.

    Raises:
        TransferAbandonedError: If they do not arrive in time, or the group was given up.
    """
    from vllm.distributed.utils import create_tcp_store

    address, port = listener.getsockname()[:2]
    size = others + 1
    store = create_tcp_store(address, port, listen_socket=listener, **_settings(size, timeout_s, first=True))

    def found() -> str:
        return given_up() or _given_up(store)

    # Adding 0 reads the counter; `get` would wait for a key that nobody has set yet.
    _wait(lambda: store.add(_ARRIVED, 0) >= others, found, timeout_s, f"{others} workers of engines did not arrive")
    store.set(_COMPLETE, "yes")
    return Group(store, _connected(connect, store, 0, size, device, timeout_s), size)


def join(address: str, port: int, rank: int, size: int, connect: Connect, device: torch.device, timeout_s: float) -> Group:
    """Join a group of `size` members as member number `rank`, which is not 0.

    Raises:
        TransferAbandonedError: If it is not complete in time, was given up, or its first member is gone.
    """
    from vllm.distributed.utils import create_tcp_store

    try:
        store = create_tcp_store(address, port, **_settings(size, timeout_s, first=False))
        store.add(_ARRIVED, 1)
    except Exception as error:
        raise TransferAbandonedError(f"nobody forms a group at {address}:{port}: {error}") from error
    _wait(lambda: store.check([_COMPLETE]), lambda: _given_up(store), timeout_s, "the group was not complete", poll_s(size))
    return Group(store, _connected(connect, store, rank, size, device, timeout_s), size)


def poll_s(size: int) -> float:
    """Return the seconds between two looks of a member of `size` at the store, so that all of them together look no more often."""
    return max(POLL_S, size / POLLS_PER_S)


def _settings(size: int, timeout_s: float, *, first: bool) -> dict[str, Any]:
    timeout = timedelta(seconds=timeout_s)
    # Without libuv, as vLLM's own stores with a listening socket (pytorch/pytorch#150215).
    return {"world_size": size, "is_master": first, "timeout": timeout, "use_libuv": False, "wait_for_workers": False}


def _given_up(store: Any) -> str:
    """Return why the first member, or another one through it, gave the group up; empty if nobody did."""
    try:
        return str(store.get(_ABANDONED).decode()) if store.check([_ABANDONED]) else ""
    except Exception as error:
        return f"the first member of the group is gone: {error}"


def _wait(done: Callable[[], bool], given_up: Callable[[], str], timeout_s: float, problem: str, every_s: float = POLL_S) -> None:
    end_s = time.monotonic() + timeout_s
    while True:
        if reason := given_up():
            raise TransferAbandonedError(reason)
        with contextlib.suppress(RuntimeError):  # the store is gone, which is told above in the next round
            if done():
                return
        if time.monotonic() > end_s:
            raise TransferAbandonedError(f"{problem} within {timeout_s:g} s")
        time.sleep(every_s)


def _connected(connect: Connect, store: Any, rank: int, size: int, device: torch.device, timeout_s: float) -> Channel:
    """Make the channel on a thread that is left behind if it does not end: NCCL cannot be interrupted while members connect."""
    made: list[Channel] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            made.append(connect(store, rank, size, device))
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="agentrl-connect", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if not made:
        problem = f"{type(failed[0]).__name__}: {failed[0]}" if failed else f"did not end within {timeout_s:g} s"
        with contextlib.suppress(Exception):
            store.set(_ABANDONED, f"a member could not connect: {problem}")
        raise TransferAbandonedError(f"connecting the members failed: {problem}")
    return made[0]

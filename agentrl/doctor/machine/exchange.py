"""Bytes on their way between processes, compared by digest: over shared memory or CUDA IPC, and over gloo or NCCL."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from agentrl.core.operating_system import end_with_parent, memory_root
from agentrl.doctor.machine.findings import Finding, Level, judged
from agentrl.weights.channels import CudaHandles, Handles, SharedBuffers
from agentrl.weights.digests import digest

PART = "bytes"
COUNT, SIZE = 4, {"cuda": 2**26, "cpu": 2**22}
"""Buckets that are sent, and bytes of each."""
DEADLINE_S = 40.0
"""Seconds in which processes have to start, meet and send everything."""


def shared(device: torch.device) -> Iterator[Finding]:
    """Have another process read buckets: over CUDA IPC as colocated engines do, on a CPU from files in shared memory."""
    size, way = SIZE[device.type], "CUDA IPC" if device.type == "cuda" else "shared memory"
    send = over_handles if device.type == "cuda" else _over_files
    try:
        sent, got, took = send(device, size)
    # Whatever goes wrong between the two processes is what this trial looks for.
    except Exception as error:
        reason = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        yield Finding(part=PART, name=way, level=Level.WRONG, found=reason, remedy=_REMEDIES[way])
        return
    found = f"{COUNT} x {size / 2**20:.0f} MiB {'equal' if sent == got else 'differ'} by digest, {COUNT * size / took / 1e9:.2f} GB/s"
    yield judged(PART, way, found, wrong=sent != got, remedy=_REMEDIES[way])


_REMEDIES = {
    "shared memory": "Give the container shared memory (docker run --shm-size 16g), or use --weight-transport disk.",
    "CUDA IPC": "Start the container with --ipc host and without MIG, or use --weight-transport shm.",
    "gloo": "Name the network between the processes by GLOO_SOCKET_IFNAME (ip addr lists them), and allow their ports in the firewall.",
    "NCCL": "Run with NCCL_DEBUG=INFO to see where it stops; NCCL_SOCKET_IFNAME names the network, NCCL_P2P_DISABLE=1 leaves out links.",
}


def collective(device: torch.device) -> Iterator[Finding]:
    """Have the first process send buckets to all others, and all sum theirs: one per GPU over NCCL, two on a CPU over gloo."""
    count = torch.cuda.device_count() if device.type == "cuda" else 2
    way = "NCCL" if device.type == "cuda" else "gloo"
    with tempfile.TemporaryDirectory(prefix="agentrl-doctor-") as folder:
        # A forked process cannot use CUDA once its parent has.
        context: Any = torch.multiprocessing.get_context("spawn")
        words = (count, device.type, str(Path(folder, "store")), os.getpid())
        members = [context.Process(target=_member, args=(rank, *words, folder), daemon=True) for rank in range(count)]
        for member in members:
            member.start()
        _join(members)
        answers = [_answer(Path(folder, str(rank))) for rank in range(count)]
    yield exchanged(way, answers, SIZE[device.type])


def exchanged(way: str, answers: list[str], size: int) -> Finding:
    """Return the verdict on the digests that the members of a group have found, and on their seconds."""
    failed = [f"rank {rank}: {answer}" for rank, answer in enumerate(answers) if not answer.startswith("digests")]
    if failed:
        return Finding(part=PART, name=way, level=Level.WRONG, found="; ".join(failed[:2]), remedy=_REMEDIES[way])
    figures = [answer.split()[1:] for answer in answers]
    same = len({tuple(digests) for digests, *_ in ((found[2:], found) for found in figures)}) == 1
    took, summed = max(float(found[0]) for found in figures), {found[1] for found in figures} == {"yes"}
    found = f"{len(answers)} {'processes' if len(answers) > 1 else 'process'}: {COUNT} x {size / 2**20:.0f} MiB "
    found += f"{'equal' if same else 'differ'} by digest, sums {'right' if summed else 'WRONG'}, {COUNT * size / took / 1e9:.2f} GB/s"
    return judged(PART, way, found, wrong=not (same and summed), remedy=_REMEDIES[way])


def _member(rank: int, count: int, kind: str, store: str, parent: int, folder: str) -> None:
    """Take part in a group of this machine, and write what was found."""
    end_with_parent(parent)
    # All members are on this machine, so loopback connects them whatever its name leads to.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    try:
        found = take_part(rank, count, device, f"file://{store}")
    except Exception as error:
        found = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    Path(folder, str(rank)).write_text(found, encoding="utf-8")


def take_part(rank: int, count: int, device: torch.device, meeting: str) -> str:
    """Join a group, receive buckets from its first member, sum a tensor, and return seconds, verdict on the sums and digests."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=DEADLINE_S)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=count, timeout=timeout)
    try:
        dist.all_reduce(torch.ones(1, device=device))  # connects the members
        generator, digests, took = torch.Generator().manual_seed(0), list[int](), 0.0
        for _ in range(COUNT):
            bucket = torch.randint(2**31, (SIZE[device.type] // 4,), generator=generator, dtype=torch.int32).to(device)
            # Every rank draws the same bytes; zeros make sure that only the broadcast brings them back.
            if rank:
                bucket.zero_()
            begin = time.perf_counter()
            dist.broadcast(bucket, src=0)
            digests.append(digest(bucket, torch.int32))  # waits for the device
            took += time.perf_counter() - begin
        # Whole numbers below 2**24 are exact in float32, in whatever order they are summed.
        total = torch.arange(1000, device=device, dtype=torch.float32) * (rank + 1)
        dist.all_reduce(total)
        right = bool(torch.equal(total, torch.arange(1000, device=device, dtype=torch.float32) * (count * (count + 1) // 2)))
    finally:
        dist.destroy_process_group()
    return " ".join(["digests", f"{took:.6f}", "yes" if right else "no", *map(str, digests)])


def _join(members: list[Any]) -> None:
    end = time.monotonic() + DEADLINE_S
    for member in members:
        member.join(max(0.0, end - time.monotonic()))
        if member.is_alive():
            member.kill()
            member.join()


def _answer(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else f"no answer within {DEADLINE_S:g} s"


Sent = tuple[list[int], list[int], float]
"""Digests of what was sent, digests of what arrived, and seconds."""


def _over_files(device: torch.device, size: int) -> Sent:
    with tempfile.TemporaryDirectory(prefix="agentrl-doctor-", dir=memory_root()) as folder:
        begin = time.perf_counter()
        sent = []
        for number in range(COUNT):
            bucket = _bucket(size, device, number)
            sent.append(digest(bucket, torch.int32))
            Path(folder, str(number)).write_bytes(bucket.numpy().tobytes())
        took = time.perf_counter() - begin
        return sent, _elsewhere(_read_files, (folder, COUNT)), took


def _bucket(size: int, device: torch.device, seed: int) -> Tensor:
    return torch.randint(2**31, (size // 4,), generator=torch.Generator().manual_seed(seed), dtype=torch.int32).to(device)


def _elsewhere(
    work: Callable[..., list[int]], words: tuple[Any, ...], send: Callable[[], object] = list, abandon: Callable[[], object] = list
) -> list[int]:
    """Call `work` in a process of its own, `send` meanwhile on a thread of this one, and return the answer; `abandon` ends `send`."""
    context: Any = torch.multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=_call, args=(work, words, theirs, os.getpid()), daemon=True)
    process.start()
    theirs.close()  # so that the end of the process is the end of the pipe
    sending = threading.Thread(target=send, daemon=True)
    sending.start()
    try:
        if not mine.poll(DEADLINE_S):
            raise TimeoutError(f"no answer of the other process within {DEADLINE_S:g} s")
        answer: list[int] | str = mine.recv()
        if isinstance(answer, str):
            raise RuntimeError(answer)
        sending.join(DEADLINE_S)
        return answer
    except EOFError:
        raise RuntimeError("the other process ended without an answer") from None
    finally:
        process.kill()
        process.join()
        abandon()
        sending.join(1.0)


def _call(work: Callable[..., list[int]], words: tuple[Any, ...], pipe: Any, parent: int) -> None:
    end_with_parent(parent)
    try:
        pipe.send(work(*words))
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")


def _read_files(folder: str, count: int) -> list[int]:
    read = (bytearray(Path(folder, str(number)).read_bytes()) for number in range(count))
    return [digest(torch.frombuffer(content, dtype=torch.int32), torch.int32) for content in read]


def over_handles(device: torch.device, size: int, handles: type[Handles] = CudaHandles) -> Sent:
    """Send buckets by the channel of colocated engines: the other process maps them by their handles and copies them."""
    sent, took = list[int](), [0.0]
    with tempfile.TemporaryDirectory(prefix="agentrl-doctor-", ignore_cleanup_errors=True) as folder:
        path = str(Path(folder, "store"))
        store = FileStore(path, 2)
        channel = SharedBuffers(store, 0, device, handles())

        def send() -> None:
            store.wait(["ready"], timedelta(seconds=DEADLINE_S))
            buffer, begin = channel.buffer(size, device), time.perf_counter()
            for number in range(COUNT):
                buffer.copy_(_bucket(size, device, number).view(torch.uint8))
                sent.append(digest(buffer.view(torch.int32), torch.int32))
                channel.begin(buffer)()
            took[0] = time.perf_counter() - begin

        got = _elsewhere(_read_buffers, (path, str(device), size, handles), send, channel.abort)
    return sent, got, took[0]


def _read_buffers(path: str, device: str, size: int, handles: type[Handles]) -> list[int]:
    here, store = torch.device(device), FileStore(path, 2)
    channel, found = SharedBuffers(store, 1, here, handles()), list[int]()
    torch.empty(1, device=here)  # the context of the device comes before the clock starts
    store.set("ready", "yes")
    for _ in range(COUNT):
        bucket = torch.empty(size, dtype=torch.uint8, device=here)
        channel.begin(bucket)()
        found.append(digest(bucket.view(torch.int32), torch.int32))
    return found

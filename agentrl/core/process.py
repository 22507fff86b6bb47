"""The present process: its address, its devices, its garbage collector, and the stacks of its threads and tasks."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import importlib.util
import linecache
import multiprocessing
import os
import re
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from multiprocessing import spawn
from pathlib import Path
from types import FrameType
from typing import Any, Literal, TypeVar, cast

from agentrl.core.errors import ConfigError
from agentrl.core.operating_system import first_outgoing_port, nvidia_devices

T = TypeVar("T")

LOOPBACK = "127.0.0.1"
"""Address of this machine at which no other machine reaches it."""
RARELY = (5_000, 5, 400)
"""Thresholds of a garbage collector that seldom looks at what has lived for long, and never at much else at once."""
MANY_MODULES = 50
"""Modules whose objects are worth sparing."""


def own_address() -> str:
    """Return the address of this machine in its network, at which others reach it; that of loopback if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # an address for documentation: the system chooses a route, and nothing is sent
        except OSError:
            return LOOPBACK
        return str(probe.getsockname()[0])


def cuda_device_count() -> int:
    """Return the number of NVIDIA devices this process may use, without importing anything heavy.

    The driver lists them under ``/proc``, but not on WSL2 and in gVisor; NVML counts them there, and PyTorch if it is loaded already.
    """
    present = nvidia_devices() or _nvml_device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        present = min(present, len([entry for entry in visible.split(",") if entry.strip() not in ("", "-1")]))
    torch = sys.modules.get("torch")
    return present or (int(torch.cuda.device_count()) if torch is not None and hasattr(torch, "cuda") else 0)


@cache
def _nvml_device_count() -> int:
    """Return the number of devices of this machine as the driver's management library has them; 0 without the library or the driver.

    The library opens no CUDA context, so the process can still be forked.
    """
    count = ctypes.c_uint(0)
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2():
            return 0
        failed = nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        nvml.nvmlShutdown()
    except (OSError, AttributeError):
        return 0
    return 0 if failed else int(count.value)


def num_gpus(device: Literal["auto", "cpu", "cuda"]) -> int:
    """Return the number of GPUs of this machine for a run with ``--device``: none with ``cpu``.

    With ``cuda`` PyTorch is imported and asked where `cuda_device_count` finds none.
    """
    if device == "cpu":
        return 0
    count = cuda_device_count()
    if count or device == "auto":
        return count
    import torch

    return torch.cuda.device_count()


def cuda_torch() -> str:
    """Return the version of CUDA that the installed PyTorch is built for, without importing it; empty if it is for CPUs, or missing."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    try:
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return ""
    built = re.search(r"^cuda\b[^=\n]*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return built[1] if built else ""


def resident_mib() -> float:
    """Return the memory that this process has in RAM, MiB."""
    import psutil

    return float(psutil.Process().memory_info().rss) / 2**20


@cache
def collect_rarely() -> None:
    """Spare the garbage collector what was imported, and let it run less often; once per process.

    With thousands of live episodes it otherwise looks through half a million objects of imported libraries again and again,
    which stops everything for a third of a second at a time. Its middle generation is small: it takes 20 ms to look through 30,000 objects.
    """
    # First, because nothing that is frozen is ever collected.
    gc.collect()
    gc.freeze()
    gc.set_threshold(*RARELY)


def spare_imports(known: int) -> int:
    """Spare the garbage collector what was imported since `collect_rarely`; return the number of modules, to call it with next time.

    Nothing is done in a process that does not collect rarely, or while there are few more than `known` modules. Garbage in cycles that is
    there at this moment stays.
    """
    if len(sys.modules) < known + MANY_MODULES or gc.get_threshold() != RARELY:
        return known
    gc.freeze()
    return len(sys.modules)


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Within the block no garbage is collected: a million objects that stay would be looked through again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


async def on_thread(work: Callable[..., T], *arguments: Any) -> T:
    """Call `work` on a daemon thread of its own and return its answer; one that never returns does not keep the process alive."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if answer.done():  # nobody waits any more
            return
        if error is None:
            answer.set_result(cast("T", result))
        else:
            answer.set_exception(error)

    def run() -> None:
        result, failure = None, None
        try:
            result = work(*arguments)
        except BaseException as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop is closed meanwhile
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, name=f"agentrl-{getattr(work, '__name__', 'work')}", daemon=True).start()
    return await answer


@contextlib.contextmanager
def handling_signals(handle: Callable[[int], object]) -> Iterator[None]:
    """Within the block, SIGINT and SIGTERM call `handle` with their number; in the main thread only, the others get no signals."""
    ours = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.signal(number, lambda number, _: handle(number)) for number in ours}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


_FIRST_PORT = 20_000


def free_port(host: str) -> int:
    """Return a TCP port of `host` that is free at this moment.

    It lies below those that Linux gives to outgoing connections, as one of these could take it before it is listened on.
    """
    below = first_outgoing_port()
    ports = [_FIRST_PORT + secrets.randbelow(below - _FIRST_PORT) for _ in range(100)] if below > _FIRST_PORT else []
    for port in ports:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            return port
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def refuse_import() -> None:
    """Refuse to begin where a process that a script started imports the script, because this would start the next such process.

    Raises:
        ConfigError: With the remedy, where a script calls agentrl outside of ``if __name__ == "__main__":``.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # as multiprocessing itself finds it out
        problem = "was called while a process that this script started imports the script"
        remedy = 'Put the calls of agentrl below `if __name__ == "__main__":`; classes and functions stay above it.'
        raise ConfigError("agentrl", Path(sys.argv[0]).name, problem, remedy)


@contextlib.contextmanager
def without_main() -> Iterator[None]:
    """Processes that multiprocessing spawns within the block, from any thread, do not import the program's file again.

    A script whose calls are not below ``if __name__ == "__main__":`` would otherwise make them once more in each of these processes.
    """
    prepare = spawn.get_preparation_data

    def prepared(name: str) -> dict[str, Any]:
        return {key: value for key, value in prepare(name).items() if not key.startswith("init_main")}

    spawn.get_preparation_data = prepared
    try:
        yield
    finally:
        spawn.get_preparation_data = prepare


MAX_FRAMES = 40
MAX_NAMES = 8


def describe_process(loops: Iterable[asyncio.AbstractEventLoop] = ()) -> str:
    """Return the stacks of all threads, and of all unfinished tasks of some event loops; without values of variables.

    Tasks with the same stack are shown once, with their number and a few of their names.
    """
    return "\n".join([f"process {os.getpid()}", _threads(), *(_tasks(loop) for loop in loops if not loop.is_closed())])


def _threads() -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = {names.get(ident, f"thread {ident}"): _frames(inner_last(frame)) for ident, frame in sys._current_frames().items()}
    return "\n".join(f"thread {name}\n{stack}" for name, stack in sorted(stacks.items()))


def _tasks(loop: asyncio.AbstractEventLoop) -> str:
    same: dict[str, list[str]] = {}
    for task in asyncio.all_tasks(loop):
        same.setdefault(_frames(_awaiting(task.get_coro())), []).append(task.get_name())
    blocks = [f"{_listed(sorted(names))}\n{stack}" for stack, names in sorted(same.items(), key=lambda item: (len(item[1]), item[1]))]
    return "\n".join(blocks) or "no unfinished task"


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:MAX_NAMES])
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return f"task {shown}" if len(names) == 1 else f"{len(names)} tasks: {shown}{more}"


def _awaiting(coroutine: Any) -> list[tuple[Any, int]]:
    """Code and line of a suspended coroutine and of what it awaits, outermost first."""
    found: list[tuple[Any, int]] = []
    while coroutine is not None and len(found) < MAX_FRAMES:
        frame = _first(coroutine, "cr_frame", "gi_frame", "ag_frame")
        if isinstance(frame, FrameType):
            found.append((frame.f_code, frame.f_lineno))
        coroutine = _first(coroutine, "cr_await", "gi_yieldfrom", "ag_await") or _wrapped(coroutine)
    return found


def _wrapped(waiter: Any) -> Any:
    """Return the generator behind an ``async for``, whose wrapper has no name for it and only refers to it."""
    if not type(waiter).__name__.startswith("async_generator_"):
        return None
    return next((thing for thing in gc.get_referents(waiter) if hasattr(thing, "ag_frame")), None)


def _first(thing: Any, *names: str) -> Any:
    return next((value for name in names if (value := getattr(thing, name, None)) is not None), None)


def inner_last(frame: FrameType | None) -> list[tuple[Any, int]]:
    """Return code and line of a frame and of its callers, outermost first."""
    found: list[tuple[Any, int]] = []
    while frame is not None and len(found) < MAX_FRAMES:
        found.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return found[::-1]


def _frames(places: list[tuple[Any, int]]) -> str:
    lines = []
    for code, line in places:
        lines.append(f'  File "{code.co_filename}", line {line}, in {code.co_qualname}')
        if text := linecache.getline(code.co_filename, line).strip():
            lines.append(f"    {text}")
    return "\n".join(lines) or "  (no Python frame)"

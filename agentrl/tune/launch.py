"""The ranks of a run: processes of this machine that are started here, or those that torchrun or SLURM started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from agentrl.core.exit_codes import INTERRUPTED
from agentrl.core.operating_system import end_with_parent
from agentrl.core.process import LOOPBACK, free_port, handling_signals
from agentrl.resolve.ranks import LAUNCHER, is_rank, world_size

if TYPE_CHECKING:
    from agentrl.learner.ranks import Ranks

ENDING_S = 20.0
"""Seconds that the other ranks have to end when one has failed."""
TIMEOUT_S = 1800.0
"""Seconds that a rank waits for the others in one collective operation."""


def follow_launcher() -> None:
    """Let this process end with the one that started it as a rank, if `run_ranks` did."""
    if parent := os.environ.get(LAUNCHER):
        end_with_parent(int(parent))


@contextmanager
def joined(device: Literal["cpu", "cuda"], *, deepspeed: bool, **together: int) -> Iterator[Ranks]:
    """Within the block, this process is one of the ranks; a process that is alone needs DeepSpeed only where it is asked for.

    `together` has the numbers of ranks that run each micro-batch together, by their names in `agentrl.learner.deepspeed.ranks.join`.
    """
    os.environ["DS_ACCELERATOR"] = device
    import torch

    cores = torch.get_num_threads()
    if not is_rank() and not deepspeed:
        from agentrl.learner.plain.ranks import join as join_alone

        ranks = join_alone(0, 1, device=device)
        torch.set_num_threads(cores)  # no engine is there that a rank would leave cores to
        yield ranks
        return
    from agentrl.learner.deepspeed.ranks import join

    env = os.environ
    if env.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # torchrun's own store listens already
        import torch.distributed as dist

        dist.init_process_group("nccl" if device == "cuda" else "gloo")
    port = int(env.get("MASTER_PORT", "29500")) if is_rank() else 29500  # one rank opens no port
    rank, size = (int(env.get("RANK", "0")), world_size()) if is_rank() else (0, 1)
    local = int(env.get("LOCAL_RANK", rank)), int(env.get("LOCAL_WORLD_SIZE", size))
    address = env.get("MASTER_ADDR", LOOPBACK)
    ranks = join(rank, size, master_port=port, master_addr=address, device=device, timeout_s=TIMEOUT_S, place=local, **together)
    if size == 1:
        torch.set_num_threads(cores)
    try:
        yield ranks
    finally:
        ranks.leave()
        if size == 1:  # another run of this process is not bound by it
            for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT"):
                env.pop(name, None)


def rank_environment(rank: int, size: int, local: tuple[int, int], meeting: tuple[str, int]) -> dict[str, str]:
    """Return the variables that torchrun sets for a rank: of `size`, with rank and size on its machine, and where rank 0 listens."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return dict(zip(names, map(str, (rank, size, *local, *meeting)), strict=True))


def run_ranks(words: Sequence[str], size: int) -> int:
    """Run a command in `size` processes, each one rank, and return 0 when all have ended, or the code of the first that failed.

    Signals are passed on to all. When one fails the others are ended.
    """
    port = free_port(LOOPBACK)
    processes = []
    for rank in range(size):
        own = rank_environment(rank, size, (rank, size), (LOOPBACK, port)) | {LAUNCHER: str(os.getpid())}
        # All ranks write the same lines.
        output = None if rank == 0 else subprocess.DEVNULL
        # One thread for each rank, as with torchrun, since the ranks share the cores of the machine.
        env = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), **own}
        # Each has a session of its own, so that Ctrl-C does not reach a rank twice.
        processes.append(subprocess.Popen(words, env=env, stdout=output, start_new_session=True))
    return _supervised(processes)


def _supervised(processes: Sequence[subprocess.Popen[bytes]]) -> int:
    """Wait for all processes, pass signals on to them, and return 0, or the code of the first that failed."""
    failed = 0
    with handling_signals(lambda number: _signal_all(processes, number)):
        while any(process.poll() is None for process in processes):
            codes = [code for process in processes if (code := process.poll()) not in (None, 0, INTERRUPTED)]
            if codes and not failed:
                failed, deadline = codes[0] or 0, time.monotonic() + ENDING_S
                _signal_all(processes, signal.SIGTERM)
            if failed and time.monotonic() > deadline:
                _signal_all(processes, signal.SIGKILL)
            time.sleep(0.1)
    return failed or next((code for process in processes if (code := process.returncode)), 0)


def _signal_all(processes: Sequence[subprocess.Popen[bytes]], number: int) -> None:
    for process in processes:
        with contextlib.suppress(OSError):
            process.send_signal(number)

"""The ranks of a run as its processes see them: those that torchrun, SLURM or agentrl started, of which this process may be one."""

from __future__ import annotations

import os

LAUNCHER = "AGENTRL_LAUNCHER"
"""Environment variable with the process id of `agentrl.tune.launch.run_ranks`, with which its ranks end; empty for ranks on a cluster."""
SLURM = {"SLURM_PROCID": "RANK", "SLURM_NTASKS": "WORLD_SIZE", "SLURM_LOCALID": "LOCAL_RANK"}


def world_size() -> int:
    """Return the number of ranks that torchrun, SLURM (with ``MASTER_ADDR`` set) or `run_ranks` started; 1 if none of them did."""
    _adopt_slurm()
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_rank() -> bool:
    """Return True for a process that is one rank of several."""
    return world_size() > 1


def is_first() -> bool:
    """Return True for the rank that writes and reports."""
    return not is_rank() or os.environ.get("RANK", "0") == "0"


def is_started() -> bool:
    """Return True for a process that is a rank, alone or one of several, which something else has started."""
    return is_rank() or LAUNCHER in os.environ


def holds_directory() -> bool:
    """Return True for the process that holds the run's directory: what starts the ranks, if agentrl does, else the first of them."""
    return is_first() and LAUNCHER not in os.environ


def _adopt_slurm() -> None:
    """Take the rank from what ``srun`` says, where a job script has set the address of the first rank."""
    if "MASTER_ADDR" in os.environ and "RANK" not in os.environ and "SLURM_PROCID" in os.environ:
        os.environ.update({ours: os.environ[theirs] for theirs, ours in SLURM.items() if theirs in os.environ})
        # The port that torchrun takes by default.
        os.environ.setdefault("MASTER_PORT", "29500")

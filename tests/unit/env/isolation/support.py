"""A pool over `defects.py`, and a look at what it leaves."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil

from agentrl import StepResult, StepState, Task
from agentrl.core.types import Sampling
from agentrl.env.boundary import EnvLimits
from agentrl.env.isolation.pool import MARK, ProcessPool
from agentrl.env.isolation.system import ProcessLimits
from agentrl.env.session import Session
from agentrl.env.states import make_sampling_params, make_step_state
from agentrl.suites.load import load_agent
from tests.processes import name_of, still_runs

FILE = Path(__file__).with_name("defects.py")
SMALL = ProcessLimits(memory_mib=200, file_mib=1, processes=8, cpu_s=0.3, open_files=64)


@asynccontextmanager
async def pool(name: str = "Defects", *, step_s: float = 0.3, limits: ProcessLimits = SMALL) -> AsyncIterator[ProcessPool]:
    """A pool that leaves no process."""
    spec = load_agent(f"{FILE}:{name}")
    processes = ProcessPool(spec, EnvLimits(reset_timeout_s=10.0, step_timeout_s=step_s, close_timeout_s=0.5, process=limits))
    try:
        await processes.start()
        yield processes
    finally:
        await processes.close()
        left = survivors(processes)
        for process in left:
            process.kill()
        assert left == []


def survivors(processes: ProcessPool, name: str = "") -> list[psutil.Process]:
    """What still runs of what the pool has started; with a name, only processes of that name."""
    return [process for process in marked(processes._mark) if name in ("", name_of(process))]


def marked(mark: str) -> list[psutil.Process]:
    """Processes that run and whose environment holds a pool's mark."""
    return [process for process in psutil.process_iter() if _environment(process).get(MARK) == mark]


def environments(processes: ProcessPool) -> list[dict[str, str]]:
    """The environments of the processes that still run of what the pool has started."""
    found = [_environment(process) for process in psutil.process_iter()]
    return [environment for environment in found if environment.get(MARK) == processes._mark]


def gone(pid: int, within_s: float = 3.0) -> bool:
    """Whether a process ends in time."""
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False


def noted_pids(folder: Path) -> list[int]:
    """The process ids in small files of a folder."""
    return [int(path.read_text()) for path in folder.iterdir() if path.stat().st_size < 100]


def task(**values: Any) -> Task:
    return Task("prompt", **{"label": "label", "id": "t", **values})


async def act(session: Session, *actions: str) -> StepResult:
    """Take steps; the last result."""
    for number, action in enumerate(actions):
        result = await session.step(state(action, turn=number))
    return result


def state(action: str, *, turn: int = 0, task: Task | None = None, observation: str = "") -> StepState:
    """A complete state."""
    return make_step_state(
        task=task or Task("prompt", label="label", id="t"),
        agent="",
        turn=turn,
        turns_left=3,
        observation_text=observation,
        action_text=action,
        finish_reason="stop",
        sampling_params=make_sampling_params(Sampling(temperature=0.5, stop=("x",))),
    )


def _environment(process: psutil.Process) -> dict[str, str]:
    """A process's environment; nothing of one that has ended, which may happen at any moment."""
    try:
        return process.environ() if still_runs(process) else {}
    except (psutil.Error, OSError):
        return {}

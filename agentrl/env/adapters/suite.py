"""What environments have in common that a package makes by name, and that draw from the global random generators."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np

from agentrl.core.types import Task
from agentrl.env.adapters.specs import seeded_tasks
from agentrl.env.agent import AgentInstance

SEEDS = 2**32  # numpy's global generator takes no more
WAIT_S = 50.0

_lock = threading.Lock()


class EpisodeRandom:
    """The global generators of `random` and numpy as one episode sees them.

    gem and TextArena seed them anew in every reset and draw from them in every step, so two episodes in one process would
    change each other's dice. Here they belong to an episode while one of its calls runs, and are put back afterwards.
    Such calls therefore run one at a time, in the whole process. Other code that draws from the global generators in the
    same moment, on another thread, is not kept out.

    Args:
        seed: Where the episode's generators begin.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed % SEEDS
        self._inside: tuple[Any, Any] | None = None

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Lend the global generators to this episode.

        Raises:
            TimeoutError: If another episode keeps them for 50 s.
        """
        if not _lock.acquire(timeout=WAIT_S):
            raise TimeoutError(f"another episode's environment has kept the global random generators for {WAIT_S:g} s")
        try:
            outside = _get()
            self._begin()
            try:
                yield
            finally:
                self._inside = _get()
                _set(outside)
        finally:
            _lock.release()

    def _begin(self) -> None:
        if self._inside is None:
            random.seed(self._seed)
            np.random.seed(self._seed)
        else:
            _set(self._inside)


def _get() -> tuple[Any, Any]:
    return random.getstate(), np.random.get_state()


def _set(state: tuple[Any, Any]) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])


class SuiteEnv(AgentInstance):
    """One episode of an environment of a suite.

    Attributes:
        env_id: Name that the suite knows.
        env_options: Keyword arguments of its `make`.
        num_tasks: Number of tasks, with the seeds 0, 1, ...; `None`: no end of them, with seeds derived from the run's.
    """

    env_id: ClassVar[str] = ""
    env_options: ClassVar[Mapping[str, Any]] = {}
    num_tasks: ClassVar[int | None] = None

    _env: Any = None
    _random: EpisodeRandom

    @classmethod
    def make(cls) -> Any:
        """Make the suite's environment; `reset` does so while the global generators are the episode's."""
        raise NotImplementedError(f"{cls.__name__} needs a classmethod make(cls)")

    @classmethod
    def tasks(cls) -> Iterable[Task]:
        """One task per seed; every member of a group plays the same one."""
        return seeded_tasks(cls.env_id, cls.num_tasks)

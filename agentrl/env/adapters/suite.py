"""What environments have in common that a package makes by name, and that draw from the global random generators."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from agentrl.core.types import Task
from agentrl.env.adapters.random_state import EpisodeRandom
from agentrl.env.adapters.specs import seeded_tasks
from agentrl.env.agent import AgentInstance


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

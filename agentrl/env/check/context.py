"""What the checks share while one environment is checked."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.core.seeding import derive_seed
from agentrl.core.types import Task
from agentrl.env.agent import AgentClass
from agentrl.env.check.findings import Report
from agentrl.env.check.play import Codec, Played, Player
from agentrl.env.check.probe import Watch
from agentrl.env.check.settings import CheckSettings
from agentrl.env.load import AgentSpec


@dataclass(slots=True)
class Context:
    """One check.

    Attributes:
        settings: What was asked for.
        spec: Where the environment is.
        cls: The user's class itself.
        codec: Of the model's tokenizer.
        report: Gets the findings.
        watch: Sees every call.
        started: When the check began, of the monotonic clock.
        recorded: Per task id, the texts of the turns of an episode of a run.
        tasks: Some tasks of the environment.
        originals: Per task id, the task as it was before the first episode, pickled.
        after_import: Digests of the global random states after the file was imported.
        player: Plays it; set before the first episode.
        played: Episodes of the standard policies.
        close_hangs: Whether every further episode would wait for the deadline of `close`.
        searched: Episodes that were played to find rewards and ends.
    """

    settings: CheckSettings
    spec: AgentSpec
    cls: AgentClass
    codec: Codec
    report: Report
    watch: Watch
    started: float
    recorded: Mapping[str, Sequence[str]] = field(default_factory=dict)
    tasks: list[Task] = field(default_factory=list)
    originals: dict[str, bytes] = field(default_factory=dict)
    after_import: dict[str, str] = field(default_factory=dict)
    player: Player | None = None
    played: list[Played] = field(default_factory=list)
    close_hangs: bool = False
    searched: list[Played] = field(default_factory=list)

    @property
    def file(self) -> str:
        """Name of the user's file."""
        return Path(self.spec.source).name

    def where(self, method: str) -> str:
        """File, class and method."""
        return f"{self.file}: {self.spec.name}.{method}"

    def found(self, rule: str, method: str, seen: str) -> None:
        """Report a finding."""
        self.report.add(rule, self.where(method), seen)

    def left(self, share: float = 1.0) -> float:
        """Seconds left until a share of the budget is used up; not below 0."""
        return max(self.started + share * self.settings.budget_s - time.monotonic(), 0.0)

    def table(self) -> Player:
        """The player."""
        if self.player is None:
            raise RuntimeError("the player is not set")
        return self.player

    def seed_of(self, task: Task) -> int:
        """The seed that a run would reset this task with."""
        return task.seed if task.seed is not None else derive_seed(self.settings.seed, task.id, task.epoch)

    def good(self) -> list[Played]:
        """Episodes of the standard policies in which nothing failed."""
        return [played for played in self.played if played.error is None and played.turns]

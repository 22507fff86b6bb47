"""State that the checks of one environment share."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import time
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl.check.findings import CheckSettings, Report
from agentrl.check.play import CheckedEpisode, Player
from agentrl.check.probe import Watch
from agentrl.core.types import Task
from agentrl.env.agent import AgentClass
from agentrl.env.load import AgentSpec
from agentrl.rollout.chat import ChatCodec

MAX_DEPTH = 20
MOMENTS = (datetime.date, datetime.time, datetime.timedelta)


def digest(task: Any) -> str:
    """Equal for tasks that are the same but for their ids."""
    if not isinstance(task, Task):
        return type(task).__name__
    parts = (task.prompt, task.label, task.seed, dict(task.metadata), task.images)
    return hashlib.blake2b(stable(parts).encode(errors="surrogatepass"), digest_size=16).hexdigest()


def stable(value: Any, depth: int = 0) -> str:
    """Text that is equal for equal values; of an object, its type and its attributes."""
    if value is None or isinstance(value, str | bytes | bool | int | float | complex):
        return repr(value)
    if isinstance(value, MOMENTS):
        return str(value)
    if depth > MAX_DEPTH:
        return type(value).__name__
    if isinstance(value, Mapping):
        return "{" + ",".join(sorted(f"{stable(key, depth + 1)}:{stable(item, depth + 1)}" for key, item in value.items())) + "}"
    if isinstance(value, AbstractSet):
        return "<" + ",".join(sorted(stable(item, depth + 1) for item in value)) + ">"
    if isinstance(value, list | tuple):
        return "[" + ",".join(stable(item, depth + 1) for item in value) + "]"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return type(value).__name__ + stable({item.name: getattr(value, item.name) for item in dataclasses.fields(value)}, depth + 1)
    if hasattr(value, "tolist"):
        return stable(value.tolist(), depth + 1)
    attributes = getattr(value, "__dict__", None)
    return type(value).__name__ + (stable(attributes, depth + 1) if isinstance(attributes, dict) else "")


@dataclass(slots=True)
class Context:
    """One check.

    Attributes:
        settings: Settings of the check.
        spec: Where the environment is.
        cls: The user's class itself.
        player: Plays the environment.
        report: Gets the findings.
        watch: Sees every call.
        started: When the check began, of the monotonic clock.
        recorded: Per task id, the texts of the turns of an episode of a run.
        tasks: Some tasks of the environment.
        originals: Per task id, the task as it was before the first episode, pickled.
        after_import: Digests of the global random states after the file was imported.
        played: Episodes of the standard policies.
        close_hangs: Every further episode would wait for the deadline of `close`.
        searched: Episodes that were played to find rewards and ends.
    """

    settings: CheckSettings
    spec: AgentSpec
    cls: AgentClass
    player: Player
    report: Report
    watch: Watch
    started: float
    recorded: Mapping[str, Sequence[str]] = field(default_factory=dict)
    tasks: list[Task] = field(default_factory=list)
    originals: dict[str, bytes] = field(default_factory=dict)
    after_import: dict[str, str] = field(default_factory=dict)
    played: list[CheckedEpisode] = field(default_factory=list)
    close_hangs: bool = False
    searched: list[CheckedEpisode] = field(default_factory=list)

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

    @property
    def codec(self) -> ChatCodec:
        """Codec of the model's tokenizer."""
        return self.player.codec

    def good(self) -> list[CheckedEpisode]:
        """Episodes of the standard policies in which nothing failed."""
        return [played for played in self.played if played.error is None and played.turns]

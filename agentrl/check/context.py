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
from agentrl.check.policies import PLAIN
from agentrl.check.probe import Watch
from agentrl.core.types import Task
from agentrl.env.agent import AgentClass
from agentrl.env.agent_spec import AgentSpec

MAX_DEPTH = 20
MOMENTS = (datetime.date, datetime.time, datetime.timedelta)


def digest(task: Any) -> str:
    """Equal for tasks that are the same but for their ids."""
    if not isinstance(task, Task):
        return type(task).__name__
    parts = (task.prompt, task.label, task.seed, dict(task.metadata), task.images)
    # User text may hold lone surrogates, which plain UTF-8 refuses.
    return hashlib.blake2b(stable(parts).encode(errors="surrogatepass"), digest_size=16).hexdigest()


def stable(value: Any, depth: int = 0) -> str:
    """Text that is equal for equal values; of an object, its type and its attributes."""
    if value is None or isinstance(value, str | bytes | bool | int | float | complex):
        return repr(value)
    # These have no attributes, so that all moments of a type would look the same below.
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
    # The bytes of an array of objects are addresses, which differ between equal arrays.
    if hasattr(value, "tobytes") and not getattr(getattr(value, "dtype", None), "hasobject", False):  # arrays and images
        form = [str(getattr(value, name, "")) for name in ("dtype", "shape", "mode", "size")]
        return f"{type(value).__name__}({' '.join(form)} {hashlib.blake2b(value.tobytes(), digest_size=16).hexdigest()})"
    if hasattr(value, "tolist"):
        return stable(value.tolist(), depth + 1)
    attributes = getattr(value, "__dict__", None)
    return type(value).__name__ + (stable(attributes, depth + 1) if isinstance(attributes, dict) else "")


@dataclass(slots=True)
class Context:
    """State that the checks of one environment share: settings, the environment, its tasks, and the episodes played so far."""

    settings: CheckSettings
    spec: AgentSpec
    cls: AgentClass  # the user's own, without a probe
    player: Player
    report: Report
    watch: Watch
    started: float  # of the monotonic clock
    recorded: Mapping[str, Sequence[str]] = field(default_factory=dict)  # task id -> texts of the turns of an episode of a run
    tasks: list[Task] = field(default_factory=list)
    originals: dict[str, bytes] = field(default_factory=dict)  # task id -> pickled task before its first episode
    form: str = PLAIN  # in which the label earns the most
    class_state: dict[str, bytes] = field(default_factory=dict)  # values in classes and modules before the first episode
    after_import: dict[str, str] = field(default_factory=dict)  # digests of the global random states
    played: list[CheckedEpisode] = field(default_factory=list)  # by the standard policies
    close_hangs: bool = False  # every further episode would wait for the deadline of `close`
    searched: list[CheckedEpisode] = field(default_factory=list)  # to find rewards and ends

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
        return max(self.started + share * self.settings.check.budget_s - time.monotonic(), 0.0)

    def good(self) -> list[CheckedEpisode]:
        """Episodes of the standard policies in which nothing failed."""
        return [played for played in self.played if played.good]

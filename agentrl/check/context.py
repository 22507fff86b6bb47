"""What the checks share while one environment is checked."""

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

from agentrl.check.findings import Report
from agentrl.check.play import Codec, Played, Player
from agentrl.check.probe import Watch
from agentrl.core.seeding import derive_seed
from agentrl.core.types import Task
from agentrl.env.agent import AgentClass
from agentrl.env.load import AgentSpec

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


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckSettings:
    """Settings of one check.

    Attributes:
        env: What ``--agent`` would be.
        prompts: Data set with the tasks; empty: the environment's own.
        prompt_split: Split of a data set from a hub.
        input_key: Column that holds the prompt.
        label_key: Column that holds the label.
        model: Directory or hub name whose tokenizer is used.
        model_given: Whether the user chose it; otherwise it is the bundled one, and says little about the user's own.
        max_model_len: Context length in tokens.
        max_new_tokens: Tokens of a turn.
        max_turns: Turns of an episode.
        concurrency: Episodes that a worker is to run at once.
        env_threads: Threads for plain ``def`` methods.
        turn_s: Seconds that a model is assumed to take for one turn.
        episodes: Episodes per policy.
        recorded: ``trajectories.jsonl``, or the directory of the run that holds it; empty: none.
        timeout_s: Deadline of one call of user code.
        budget_s: Seconds for all of it.
        elsewhere: Whether tasks and episodes are compared with those of a second process.
        seed: Decides tasks, seeds and the answers of the random policies.
    """

    env: str
    prompts: str = ""
    prompt_split: str = "train"
    input_key: str = "prompt"
    label_key: str = "label"
    model: str = ""
    model_given: bool = False
    max_model_len: int = 0
    max_new_tokens: int = 128
    max_turns: int = 8
    concurrency: int = 128
    env_threads: int = 32
    turn_s: float = 1.0
    episodes: int = 8
    recorded: str = ""
    timeout_s: float = 30.0
    budget_s: float = 120.0
    elsewhere: bool = True
    seed: int = 0


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

"""The protocols by which the layers know each other.

`flow` drives rollout workers and a learner through these protocols and never imports them; `rollout` talks to an
`Engine` in the same way. Under Ray the implementations are handles to actors, in process they are the objects.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from agentrl.core.summaries import GroupSummary
from agentrl.core.types import Generation, IntArray, Sampling, Ticket

GroupRef: TypeAlias = Any
"""A `Group`, or the cluster's reference to one; the driver passes it on and never looks inside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One request to an engine: exact token ids in, exact token ids out.

    Attributes:
        request_id: Unique in the run.
        prompt_ids: The whole context. # [P]
        sampling: How to sample.
        session: Requests of one episode share it, for cache affinity.
        images: Images referred to by the prompt.
    """

    request_id: str
    prompt_ids: IntArray
    sampling: Sampling
    session: str = ""
    images: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdate:
    """Transfer of the weights of one version to an engine.

    Attributes:
        version: The version these weights are.
        transport: Name of the weight-transfer backend ("shm", "nccl", "ipc").
        payload: What that backend needs, for example the path of a file in shared memory; small and picklable.
    """

    version: int
    transport: str
    payload: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """Load of an engine at one moment.

    Attributes:
        running: Requests that are decoded.
        waiting: Requests that wait for room in the batch or in the cache.
        kv_usage: Share of the key-value cache that running requests hold, 0 to 1.
    """

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSums:
    """Load of an engine over the time in which episodes were under way; each sum is a value times seconds.

    Attributes:
        seconds: The time.
        kv_usage: Sum of `EngineLoad.kv_usage`.
        waiting: Sum of `EngineLoad.waiting`.
        episodes: Sum of the episodes under way.
    """

    seconds: float = 0.0
    kv_usage: float = 0.0
    waiting: float = 0.0
    episodes: float = 0.0

    def plus(self, load: EngineLoad, episodes: int, seconds: float) -> LoadSums:
        """With another interval of `seconds`."""
        return LoadSums(
            seconds=self.seconds + seconds,
            kv_usage=self.kv_usage + load.kv_usage * seconds,
            waiting=self.waiting + load.waiting * seconds,
            episodes=self.episodes + episodes * seconds,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Cumulative counters of one engine since its start.

    Attributes:
        busy_s: Seconds with at least one request unfinished and not paused.
        clock_s: Seconds since start.
        tokens: Tokens sampled.
        prompt_tokens: Prompt tokens received.
        cached_tokens: Prompt tokens served from the prefix cache.
        paused_s: Seconds paused for publications.
        fault: Why the engine can no longer be used; empty while it can.
        load: What it has to do now.
        sums: Its load so far; filled in by the rollout worker.
    """

    busy_s: float = 0.0
    clock_s: float = 0.0
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    paused_s: float = 0.0
    fault: str = ""
    load: EngineLoad = EngineLoad()
    sums: LoadSums = LoadSums()


class Engine(Protocol):
    """Generates from the weights it holds, and says which those are."""

    @property
    def max_model_len(self) -> int:
        """Context length in tokens; known once started."""
        ...

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a turn; known once started."""
        ...

    async def start(self) -> None:
        """Load the model; returns when ready to generate with version 0."""

    async def generate(self, request: GenerationRequest) -> Generation:
        """Sample one continuation.

        Raises:
            ContextLengthError: If the prompt leaves no room for one token.
            EngineDeadError: If the engine is gone.
            EngineError: If this request failed.
        """
        ...

    async def load_weights(self, update: WeightUpdate) -> int:
        """Pause keeping requests, load, stamp the version, resume; returns the version the engine reports.

        Raises:
            WeightSyncError: If loading failed or the engine reports another version.
        """
        ...

    def stats(self) -> EngineStats:
        """Counters since the start."""
        ...

    async def close(self) -> None:
        """Release processes and memory; safe to call twice."""


class RolloutWorker(Protocol):
    """Owns an engine and the episodes that run against it."""

    async def start(self) -> None:
        """Load user code, tokenizer and engine."""

    async def run_group(self, ticket: Ticket) -> tuple[GroupSummary, GroupRef]:
        """Run every episode of a group; failures of user code and of single requests become statuses, not exceptions.

        Raises:
            EngineDeadError: If the engine failed for good; nothing of the group counts.
        """
        ...

    async def load_weights(self, update: WeightUpdate) -> int:
        """As `Engine.load_weights`."""
        ...

    async def stats(self) -> EngineStats:
        """As `Engine.stats`."""
        ...

    async def close(self) -> None:
        """Cancel episodes, close environments and the engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """Report of one optimizer step.

    Attributes:
        metrics: Scalars, already reduced over micro-batches and ranks.
        seconds: Wall time of the step.
    """

    metrics: Mapping[str, float]
    seconds: float


class Learner(Protocol):
    """Owns the weights being trained; one handle stands for all ranks."""

    async def start(self) -> None:
        """Load model, optimizer and whatever else the algorithm needs."""

    async def train(self, step: int, groups: Sequence[GroupRef]) -> TrainResult:
        """Take one step's groups, oldest first; afterwards the weights are version `step + 1`.

        Raises:
            LearnerError: If the step failed.
        """
        ...

    async def export_weights(self, version: int) -> WeightUpdate:
        """Make the current weights available to engines as `version`."""
        ...

    async def save_model(self, path: str) -> None:
        """Write the current policy as a Hugging Face directory."""

    async def save_checkpoint(self, path: str, step: int) -> None:
        """Write everything that decides the steps after `step` into an existing directory.

        Raises:
            CheckpointError: If it cannot be written.
        """

    async def load_checkpoint(self, path: str) -> int:
        """Continue from what `save_checkpoint` wrote, before any step; returns the steps done by then.

        Raises:
            CheckpointError: If it cannot be read, or does not fit the learner's settings.
        """
        ...

    async def close(self) -> None:
        """Release processes and memory; safe to call twice."""

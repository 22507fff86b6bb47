"""The protocols by which the layers know each other.

`flow` drives rollout workers and a learner through these protocols and never imports them; `rollout` talks to an
`Engine` in the same way. Under Ray the implementations are handles to actors, in process they are the objects.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias, TypeVar, runtime_checkable

from agentrl.core.images import PlacedImage
from agentrl.core.manifest import FileEntry
from agentrl.core.summaries import GroupSummary
from agentrl.core.types import Generation, GroupRequest, IntArray, Sampling

T = TypeVar("T")

TokenListener: TypeAlias = Callable[[Sequence[int]], object]
"""Called with the token ids that were sampled since the last call."""

GroupRef: TypeAlias = Any
"""A `Group`, or the cluster's reference to one; the driver passes it on and never looks inside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """Form that a sampled text is held to by masking all other tokens; exactly one of the two is given.

    The log-probabilities are then those of the constrained distribution, so the tokens are no samples of the policy.
    """

    json_schema: str = ""  # JSON text of a JSON schema: the text is a value of it
    structural_tag: str = ""  # JSON text of a structural tag, as xgrammar defines it: the text matches it


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One request to an engine: exact token ids in, exact token ids out."""

    request_id: str  # unique in the run
    prompt_ids: IntArray  # [P] the whole context
    sampling: Sampling
    session: str = ""  # shared by the requests of one episode, for cache affinity
    images: tuple[Any, ...] = ()  # as user code gave them, for a model that reads text only
    placed: tuple[PlacedImage, ...] = ()  # those in the prompt, which is an expanded one
    structure: Structure | None = None  # form that the text is held to; `None` leaves the policy free
    # Told of tokens as they are sampled, on the event loop of the caller of `generate`, before that returns. What it was told begins the
    # answer; an engine may tell nothing.
    on_tokens: TokenListener | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Membership:
    """Engines that take weights together, in a group that they form with the learner."""

    epoch: int  # grows whenever an engine is lost, replaced, joins or leaves
    engines: tuple[str, ...]  # names, in the order of their ranks in the group


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdate:
    """Transfer of the weights of one version to an engine."""

    version: int
    transport: str  # name of the weight-transfer backend: "shm", "nccl" or "ipc"; "adapter" for a directory with a low-rank adapter
    payload: Mapping[str, Any] = field(default_factory=dict)  # for the backend, as the path of a file in shared memory; small, picklable
    members: Membership | None = None  # engines that take it together; `None`: any engine may, alone, as often as it likes


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """Load of an engine at one moment."""

    running: int = 0  # requests that are decoded
    waiting: int = 0  # requests that wait for room in the batch or in the cache
    kv_usage: float = 0.0  # share of the key-value cache that running requests hold, 0 to 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSums:
    """Load of an engine over the time in which episodes were under way; each sum is a value of `EngineLoad` times seconds."""

    seconds: float = 0.0
    kv_usage: float = 0.0
    waiting: float = 0.0
    episodes: float = 0.0  # sum of the episodes under way

    def plus(self, load: EngineLoad, episodes: float, seconds: float) -> LoadSums:
        """Return the sums with another interval of `seconds`."""
        return LoadSums(
            seconds=self.seconds + seconds,
            kv_usage=self.kv_usage + load.kv_usage * seconds,
            waiting=self.waiting + load.waiting * seconds,
            episodes=self.episodes + episodes * seconds,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Cumulative counters of one engine since its start."""

    busy_s: float = 0.0  # with at least one request unfinished and not paused
    clock_s: float = 0.0  # since start
    tokens: int = 0  # sampled
    prompt_tokens: int = 0  # received
    cached_tokens: int = 0  # prompt tokens served from the prefix cache
    paused_s: float = 0.0  # for publications
    fault: str = ""  # why the engine can no longer be used; empty while it can
    load: EngineLoad = EngineLoad()  # at this moment
    sums: LoadSums = LoadSums()  # so far; filled in by the rollout worker
    tool_parser: str = ""  # of the model's own form of tool calls; filled in by the rollout worker
    rss_mib: float = 0.0  # resident memory of the rollout worker's process; filled in by it
    kv_tokens: int = 0  # that the key-value cache holds; 0 if the engine does not say


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
            StructureError: If the engine cannot hold the text to the structure that is asked for.
            EngineDeadError: If the engine is gone.
            EngineError: If this request failed.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """End a request now: its `generate` returns what was sampled so far, perhaps nothing. Requests that are over are passed over."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """Limits of a started engine, which its episodes and their replay need."""

    max_model_len: int  # context length in tokens
    end_token_ids: tuple[int, ...] = ()  # tokens that end a turn

    @classmethod
    def of(cls, engine: Engine) -> EngineLimits:
        """Return those of an engine."""
        return cls(max_model_len=engine.max_model_len, end_token_ids=engine.end_token_ids)


Memory: TypeAlias = Literal["weights", "kv_cache"]
"""A part of an engine's GPU memory that sleeps and wakes as a whole."""


@runtime_checkable
class SleepingEngine(Engine, Protocol):
    """An engine that can give its GPU memory to a learner on the same GPU and take it back; engines may lack this."""

    async def sleep(self, level: int) -> None:
        """Stop generating and give back the memory; requests stay, new ones wait.

        With level 1 the weights go to CPU memory, with level 2 they are discarded and have to be loaded again.
        """

    async def wake(self, *parts: Memory) -> None:
        """Take back parts of the memory; parts that are awake stay as they are. Generation goes on once all are awake.

        `load_weights` needs the weights awake and nothing else; keys and values are always computed again.
        """


class RolloutWorker(Protocol):
    """Owns an engine and the episodes that run against it."""

    async def start(self) -> None:
        """Load user code, tokenizer and engine."""

    async def run_group(self, group_request: GroupRequest) -> tuple[GroupSummary, GroupRef]:
        """Run every episode of a group; failures of user code and of single requests become statuses, not exceptions.

        Raises:
            EngineDeadError: If the engine failed for good; nothing of the group counts.
        """
        ...

    async def load_weights(self, update: WeightUpdate) -> int:
        """As `Engine.load_weights`."""
        ...

    async def sleep(self, level: int) -> None:
        """As `SleepingEngine.sleep`.

        Raises:
            EngineError: If the engine cannot sleep.
        """

    async def wake(self, *parts: Memory) -> None:
        """As `SleepingEngine.wake`."""

    async def stats(self) -> EngineStats:
        """As `Engine.stats`."""
        ...

    async def close(self) -> None:
        """Cancel episodes, close environments and the engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """Report of one optimizer step."""

    metrics: Mapping[str, float]  # reduced over micro-batches and ranks
    seconds: float  # wall time


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

    async def export_weights(self, version: int, members: Membership | None = None) -> WeightUpdate:
        """Make the current weights available to engines as `version`: to `members`, where engines take them together."""
        ...

    async def abandon_weights(self, reason: str) -> None:
        """Give up the transfer to `members` that is under way, if one is; those that take part are told."""

    async def offload(self, *, keep_weights: bool) -> None:
        """Move what only a training step needs to CPU memory, and the weights too unless they are kept; twice is as once."""

    async def reload(self) -> None:
        """Undo `offload`, before anything else than `export_weights` is asked for."""

    async def save_model(self, path: str) -> None:
        """Write the current policy as a Hugging Face directory."""

    async def save_checkpoint(self, path: str, step: int) -> None:
        """Write everything that decides the steps after `step` into an existing directory.

        Raises:
            CheckpointError: If it cannot be written.
        """

    async def flush_checkpoint(self, path: str) -> Mapping[str, FileEntry]:
        """Flush what the last `save_checkpoint` wrote, and return sizes and hashes by name within `path`; training may go on meanwhile.

        Raises:
            CheckpointError: If a file cannot be flushed or read.
        """
        ...

    async def map_files(self, work: Callable[..., T], files: Mapping[str, FileEntry], *arguments: Any) -> list[T]:
        """Call ``work(some of the files, *arguments)`` beside every rank, so that each file is with one, and return the answers.

        `work` is a function of a module; training may go on meanwhile.
        """
        ...

    async def load_checkpoint(self, path: str) -> int:
        """Continue from what `save_checkpoint` wrote, before any step; returns the steps done by then.

        Raises:
            CheckpointError: If it cannot be read, or does not fit the learner's settings.
        """
        ...

    async def close(self) -> None:
        """Release processes and memory; safe to call twice."""

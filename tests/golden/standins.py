"""Objects in the place of engines, workers, learner ranks and models: they record what they are made with, and compute nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.core.manifest import FileEntry, flush_files
from agentrl.core.protocols import EngineStats, Membership, Memory, TrainResult, WeightUpdate
from agentrl.core.summaries import GroupSummary, MemberSummary
from agentrl.core.types import GroupRequest, Status
from tests.golden.recording import Recording

NO_GROUP = "the tokens of a group"
"""Reference to a group that nobody reads."""
STATE = "rank-0.pt"
"""File of a checkpoint."""
HELD_STEPS = 12
"""Versions of which the record says whether a sender holds them."""


class StandIn:
    """Base of the classes here; each run has a subclass with a recording."""

    recording: Recording


def recording_class(kind: type[StandIn], recording: Recording, name: str = "") -> type[Any]:
    """Return a stand-in whose objects record what they receive, under the name of the class in whose place it is."""
    return type(name or kind.__name__, (kind,), {"recording": recording})


class Engine(StandIn):
    """Engine that generates nothing."""

    max_model_len = 4096
    end_token_ids = (0,)

    def __init__(self, settings: Any) -> None:
        engine, device = settings.engine, settings.device
        core = "thread" if engine.core_on_thread(device) else "process"
        decided = {"core": core, "memory_share_of_80_gib": engine.memory_share(settings.weights, 80 * 2**30)}
        self.recording.add("engine", {"class": type(self).__name__, "settings": settings, "decided": decided})

    async def start(self) -> None:
        """Do nothing."""

    def stats(self) -> EngineStats:
        """Return no figures."""
        return EngineStats()

    async def load_weights(self, update: WeightUpdate) -> int:
        """Load nothing."""
        return update.version

    async def close(self) -> None:
        """Do nothing."""


class EpisodeWorker(StandIn):
    """Rollout worker that plays nothing; it has a partner's engine and a teacher made once, to record them."""

    def __init__(
        self,
        engine: Any,
        agent: Any,
        settings: Any,
        fit_parser: Any = None,
        scorers: Mapping[str, Any] | None = None,
        partner_engine: Callable[[str], Any] | None = None,
        teacher_model: Callable[[str], Any] | None = None,
    ) -> None:
        self._engine = engine
        made = {"engine": type(engine).__name__, "scorers": list(scorers or ()), "fits_parser": fit_parser is not None}
        self.recording.add("worker", {**made, "agent": agent, "settings": settings})
        for part, make in (("worker.partner", partner_engine), ("worker.teacher", teacher_model)):
            if make is not None and not self.recording.has(part):
                self.recording.add(part, "made by the worker")
                with self.recording.of(part):
                    make("MODEL")

    async def start(self) -> None:
        """Start the engine."""
        await self._engine.start()

    async def run_group(self, request: GroupRequest) -> tuple[GroupSummary, str]:
        """Record the request, and answer at once."""
        self.recording.add("request", {name: getattr(request, name) for name in REQUEST})
        return summary_of(request), NO_GROUP

    async def load_weights(self, update: WeightUpdate) -> int:
        """Load nothing."""
        return update.version

    async def sleep(self, level: int) -> None:
        """Record the level."""
        self.recording.add("worker.sleep", level)

    async def wake(self, *parts: Memory) -> None:
        """Do nothing."""

    async def stats(self) -> EngineStats:
        """Return no figures."""
        return EngineStats()

    async def close(self) -> None:
        """Do nothing."""


REQUEST = ("n_samples_per_prompt", "version", "record", "eval_sampling", "greedy", "with_messages")
"""Fields of a group request that settings decide."""


def summary_of(request: GroupRequest) -> GroupSummary:
    """Return the summary of a group whose episodes all ended, with rewards that differ, and records from which rows can be made."""
    names = [f"episode-{request.group_id}-{index}" for index in range(request.n_samples_per_prompt)]
    members = tuple(
        MemberSummary(
            status=Status.FINISHED,
            reward=float(index % 3),
            score=float(index % 2),
            num_tokens=3,
            num_prompt_tokens=2,
            num_turns=1,
            truncated=False,
            episode_id=name,
        )
        for index, name in enumerate(names)
    )
    records = tuple(_record(name, float(index % 3)) for index, name in enumerate(names[: request.record]))
    versions = (request.version, request.version)
    return GroupSummary(group_id=request.group_id, members=members, versions=versions, seconds=0.1, records=records)


def _record(name: str, reward: float) -> dict[str, Any]:
    turn = {"text": f"answer {reward:g}", "prompt_text": "question", "token_ids": [1, 2, 3]}
    said = [{"role": "user", "content": "question"}, {"role": "assistant", "content": f"answer {reward:g}"}]
    facts = {"status": "finished", "frozen": False, "agent": "", "error": None, "reward": reward, "score": None, "reward_parts": {}}
    return {**facts, "episode_id": name, "turns": [turn], "messages": said}


class LearnerRank(StandIn):
    """Learner rank that trains nothing; it writes small files where a rank writes models and checkpoints."""

    def __init__(self, settings: Any, sender: Any) -> None:
        from agentrl.learner.attention import choose_kernel

        decided = {"kernel": choose_kernel(settings.learner, settings.device).name, "dtype": settings.learner.dtype(settings.device)}
        self.recording.add("learner", {"settings": settings, "sender": type(sender).__name__, "decided": decided})
        if (held := getattr(sender, "_held", None)) is not None:
            self.recording.add("sender.held", [version for version in range(HELD_STEPS) if held(version)])

    def start(self, rank: int, world_size: int, port: int, address: str = "", place: tuple[int, int] | None = None) -> None:
        """Record the place among the ranks."""
        self.recording.add("learner.start", {"rank": rank, "world_size": world_size, "address": address, "place": place})

    def train(self, step: int, *groups: Any) -> TrainResult:
        """Train nothing."""
        return TrainResult(metrics={}, seconds=0.1)

    def export_weights(self, version: int, members: Membership | None = None) -> WeightUpdate:
        """Offer nothing."""
        return WeightUpdate(version=version, transport="shm")

    def abandon_weights(self, reason: str) -> None:
        """Do nothing."""

    def offload(self, keep_weights: bool) -> None:
        """Record what is kept."""
        self.recording.add("learner.offload", {"keep_weights": keep_weights})

    def reload(self) -> None:
        """Do nothing."""

    def save_model(self, path: str) -> None:
        """Write a file with settings of a model."""
        Path(path).mkdir(parents=True, exist_ok=True)
        Path(path, "config.json").write_text(json.dumps({"model_type": "llama"}), encoding="utf-8")

    def save_checkpoint(self, path: str, step: int) -> None:
        """Write a file with the step."""
        Path(path, STATE).write_text(str(step), encoding="utf-8")

    def flush_checkpoint(self, path: str) -> dict[str, FileEntry]:
        """Return the entry of that file."""
        return flush_files(Path(path), [STATE])

    def load_checkpoint(self, path: str) -> int:
        """Return the step in that file."""
        return int(Path(path, STATE).read_text(encoding="utf-8"))

    def close(self) -> None:
        """Do nothing."""


class BatchedScorer(StandIn):
    """Queue before a reward model that scores nothing."""

    def __init__(self, model: Any, **options: Any) -> None:
        self.recording.add("scorer", {"settings": model.settings, **options})

    async def start(self) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""


class TeacherModel(StandIn):
    """Teacher beside a rollout worker that scores nothing."""

    def __init__(self, model: str, **options: Any) -> None:
        self.recording.add("model", {"model": model, **options})


class RewardModel:
    """Model in the place of a reward model; it holds its settings."""

    def __init__(self, settings: Any) -> None:
        self.settings = settings


class Nothing:
    """Object that does nothing, whatever it is asked: a watcher of processes or threads that are not there."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments: Sequence[Any] = arguments

    def close(self) -> None:
        """Do nothing."""

    def end(self) -> None:
        """Do nothing."""

    def release(self) -> None:
        """Do nothing."""

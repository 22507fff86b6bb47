"""Built-in callbacks that write metrics and trajectories as JSON lines, those of the user, and the choice of all sinks of a run."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from agentrl.core.callbacks import METHODS, Callback, GroupJudged, MetricsRow, RunEnd, StepEnd
from agentrl.core.errors import CallbackError, ConfigError
from agentrl.core.recording import RecordBudget
from agentrl.core.summaries import GroupSummary
from agentrl.track.callbacks import defines, load_callbacks, place
from agentrl.track.card import ModelCard
from agentrl.track.index import IndexWriter, num_episodes, parsed
from agentrl.track.jsonl import PROMISED, JsonLines, encode
from agentrl.track.plan import RunRecord, TrackConfig, is_service
from agentrl.track.recorders import GroupRecorder, LaunchRecorder, StepRecorder
from agentrl.track.services import ExperimentTracker, TensorBoard

FLAG = "--sink"


def load_sinks(specs: Iterable[str]) -> list[type[Callback]]:
    """Import the classes that ``--sink`` names, each once, and check them; an empty name stands for no class.

    Raises:
        ConfigError: If there is no such file or class, or it cannot be a sink.
    """
    specs = list(dict.fromkeys(filter(None, specs)))
    classes = load_callbacks(specs, FLAG)
    for spec, cls in zip(specs, classes, strict=True):
        if not defines(cls, "on_metrics"):
            remedy = "Define on_metrics(self, event), or give the class to --callback."
            raise ConfigError(FLAG, spec, f"{cls.__name__} does not take metrics", remedy)
        for name in (name for name in METHODS.values() if inspect.iscoroutinefunction(getattr(cls, name, None))):
            remedy = "Write it with def, or give the class to --callback, which takes both."
            raise ConfigError(FLAG, spec, f"{cls.__name__}.{name} is asynchronous", remedy)
    return classes


class OwnSink(Callback):
    """One sink of the user, an object of which is made at the first event; errors are told with its name, its method and the line."""

    def __init__(self, cls: type[Callback]) -> None:
        self._cls = cls
        self._made: Any = None
        for name in METHODS.values():
            if defines(cls, name):
                setattr(self, name, partial(self._tell, name))

    def _tell(self, method: str, event: Any) -> None:
        if self._made is None:
            self._made = self._call("__init__", self._cls)
        self._call(method, partial(getattr(self._made, method), event))

    def _call(self, method: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except (Exception, SystemExit) as error:
            where = f"sink {self._cls.__name__}.{method}"
            raise CallbackError(f"{where} raised {type(error).__name__}: {error}{place(error, call)}") from error


MAX_LINE_BYTES = 1_000_000
GROUPS = "groups.jsonl"
EVAL_TRAJECTORIES = "eval_trajectories.jsonl"
"""The recorded episodes of a training run's evaluations; apart from those that are trained, so that nobody trains on them by mistake."""
ROWS = "rows.jsonl"
"""A few rows of supervised or preference training with the losses of their tokens before and after it."""


class JsonlMetrics(Callback):
    """Writes one JSON object per step with every key in `promised`, flushed at once."""

    def __init__(self, path: Path, promised: Iterable[str] = PROMISED) -> None:
        self._lines, self._promised = JsonLines(path), tuple(promised)

    def on_metrics(self, event: MetricsRow) -> None:
        """Append ``{"step": step, ...}``; a non-finite value, or a promised one that is missing, becomes ``null``."""
        self._lines.write(encode({**dict.fromkeys(self._promised), **event.metrics, "step": event.step}))

    def on_run_end(self, event: RunEnd) -> None:
        """Close the file."""
        self._lines.close()


class TrajectoryRecorder(Callback):
    """Appends the records that come with finished groups, and their lines in the index; texts and lists of too long a record are shortened.

    Logs of requests, where there are any, go whole into the file `requests`, which is made with the first. What is written is told to
    `budget`, which begins with what the files hold already.
    """

    def __init__(
        self,
        path: Path,
        *,
        requests: Path | None = None,
        budget: RecordBudget | None = None,
        max_line_bytes: int = MAX_LINE_BYTES,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._index, self._lines = IndexWriter(path), JsonLines(path)
        self._max, self._clock = max_line_bytes, clock
        self._requests_path, self._budget = requests, budget
        self._requests: JsonLines | None = None
        if budget is not None:
            sizes = [file.stat().st_size for file in (path, requests) if file is not None and file.exists()]
            budget.restore(episodes=num_episodes(path), played=num_played(path.with_name(GROUPS)), size=sum(sizes))

    def on_group_judged(self, event: GroupJudged) -> None:
        """Write every record of the group."""
        size, summary = self.write(event.summary), event.summary
        if self._budget is not None:
            recorded = {record.get("episode_id") for record in summary.records}
            self._budget.settle(event.group_id, episodes=len(recorded), played=len(summary.episodes), size=size)

    def on_step_end(self, event: StepEnd) -> None:
        """Expect no records of the groups that were given up."""
        if self._budget is not None:
            self._budget.forget(event.oversampled)

    def write(self, summary: GroupSummary) -> int:
        """Write every record of one group, with the time at which the group ended and how long it took, and return the bytes."""
        when = {"ended_s": round(self._clock(), 4), "group_s": round(summary.seconds, 4)}
        size = 0
        for record in summary.records:
            line = encode_capped({**record, **when}, self._max)
            self._lines.write(line)
            self._index.add({**record, **when}, len(line))
            size += len(line) + 1
        if summary.requests and self._requests_path is not None:
            self._requests = self._requests or JsonLines(self._requests_path)
            for log in summary.requests:
                line = encode(log)
                self._requests.write(line)
                size += len(line) + 1
        return size

    def on_run_end(self, event: RunEnd) -> None:
        """Close the file."""
        self.close()

    def close(self) -> None:
        """Close the files; safe to call twice."""
        self._lines.close()
        self._index.close()
        if self._requests is not None:
            self._requests.close()


def num_played(groups: Path) -> int:
    """Return how many episodes the lines of ``groups.jsonl`` tell of, in all attempts; 0 without the file."""
    if not groups.exists():
        return 0
    with groups.open("rb") as lines:
        rows = (row for line in lines if (row := parsed(line)) is not None)
        return sum(len(set(row["episodes"])) for row in rows)


def encode_capped(record: Mapping[str, Any], max_bytes: int) -> str:
    """Return `record` as a line of at most `max_bytes` bytes, which are 100 or more, newline excluded.

    In too long a record texts and lists are shortened alike and ``"clipped": true`` is added; if even that does not fit,
    only the size is kept.
    """
    line = encode(record)
    size, keep = len(line), max_bytes
    while len(line) > max_bytes and keep > 0:
        keep //= 2
        line = encode({**clip(record, keep), "clipped": True})
    return line if len(line) <= max_bytes else encode({"clipped": True, "bytes": size})


def clip(value: Any, keep: int) -> Any:
    """Return `value` with every text and list in it cut to its first `keep` characters or items."""
    if isinstance(value, str):
        return value if len(value) <= keep else value[:keep] + "…"
    if isinstance(value, Mapping):
        return {key: clip(item, keep) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [clip(item, keep) for item in value[:keep]]
    return value


def open_metric_sinks(run_dir: Path, track: TrackConfig, promised: Iterable[str] = PROMISED) -> list[Callback]:
    """Open the sinks of metrics that the settings ask for: files in `run_dir`, with the `promised` keys, services, the user's.

    Raises:
        ConfigError: If the package of a service is not installed, or a sink of the user cannot be used; then no file is made.
    """
    own = [OwnSink(cls) for cls in load_sinks([spec for spec in track.sink if not is_service(spec)])]
    services = (spec.partition(":") for spec in track.sink if is_service(spec))
    sinks: list[Callback] = [ExperimentTracker(package, project) for package, _, project in services]
    if track.tensorboard:
        sinks.append(TensorBoard(run_dir / "tensorboard"))
    return [JsonlMetrics(run_dir / "metrics.jsonl", promised), *sinks, *own]


def open_sinks(run_dir: Path, track: TrackConfig, record: RunRecord, budget: RecordBudget | None = None) -> list[Callback]:
    """Open all sinks of a run of reinforcement learning; `budget` is told what is recorded.

    Raises:
        ConfigError: If the package of a service is not installed, or a sink of the user cannot be used; then no file is made.
    """
    metrics, *others = open_metric_sinks(run_dir, track)
    if record != "none":
        others.append(TrajectoryRecorder(run_dir / "trajectories.jsonl", requests=run_dir / "requests.jsonl", budget=budget))
    groups, steps = GroupRecorder(run_dir / GROUPS), StepRecorder(run_dir / "steps.jsonl")
    return [LaunchRecorder(run_dir / "launches.jsonl"), ModelCard(run_dir / "model"), metrics, groups, steps, *others]

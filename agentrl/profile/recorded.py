"""Recorded times of a run as the distributions and speeds that a simulation needs."""

from __future__ import annotations

import math
import random
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from agentrl.core.errors import ConfigError
from agentrl.core.types import Status
from agentrl.flow.sizes import FlowPlan
from agentrl.profile.simulated_engine import DrawGroup, EngineModel, EpisodeShape
from agentrl.profile.simulation import LearnerModel, Plan, samples, simulate
from agentrl.rollout.records import started_s

Row: TypeAlias = Mapping[str, Any]

MIN_STEPS = 3
MIN_GROUPS = 8
MAX_POINTS = 500
MIN_SPREAD = 0.02
"""Values that differ by less, as a share of their mean, are one point and tell no slope."""
MAX_ERROR = 0.15
"""Standard error that the part which grows may have, as a share of the whole, to be taken from the recordings."""
ASSUMED_SHARE = 0.5
"""Share of a decoding step that is taken to grow with its sequences where the run does not tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedEpisode:
    """One recorded episode."""

    group: tuple[int, int]  # its group and attempt
    version: int  # weights that were live when its group was admitted
    shape: EpisodeShape  # requests of the episode
    generate_s: float  # seconds in the engine
    total_s: float  # seconds in all
    started_s: float | None  # when it began, on the clock of the recordings; `None` if that was not recorded


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A run's times."""

    plan: Plan  # the run itself, to be simulated or changed; its groups are drawn like those recorded
    rows: Sequence[Row]  # metrics of the steps that tell of its pace: without the first, which fill the line, and those after an evaluation
    episodes: Sequence[RecordedEpisode]  # recorded episodes that ended well
    notes: Sequence[str] = field(default_factory=tuple)  # what is missing or was assumed, for people
    evaluations: Mapping[str, float] = field(default_factory=dict)  # their `evaluation_times`; empty if there were none

    def mean(self, name: str, default: float = 0.0) -> float:
        """Mean of a metric over the steps that have it."""
        return _mean(self.rows, name, default)

    @property
    def step_s(self) -> float:
        """Seconds per step, measured."""
        return self.mean("time/step_s")

    @property
    def episodes_per_s(self) -> float:
        """Episodes trained on per second, measured."""
        return self.mean("group/count") * self.plan.settings.n_samples_per_prompt / self.step_s


def read_recorded(
    *,
    settings: FlowPlan,
    num_engines: int,
    num_learners: int,
    max_sequences: int,  # sequences that an engine decodes at once
    metrics: Sequence[Row],  # rows of ``metrics.jsonl``
    records: Iterable[Row],  # rows of ``trajectories.jsonl``; may be empty
) -> Recorded:
    """Take times and speeds from a run's files.

    Raises:
        ConfigError: If there are too few steps to say anything.
    """
    notes: list[str] = []
    rows = paced(metrics, settings.max_staleness)
    if len(rows) < MIN_STEPS:
        remedy = "Let the run take more steps: those in which the line fills, and those after an evaluation, are left out."
        raise ConfigError("RUN", f"{len(rows)} steps", f"tells too little: a profile needs at least {MIN_STEPS} steady steps", remedy)
    episodes = read_episodes(records)
    if len({episode.group for episode in episodes}) < MIN_GROUPS:
        notes.append(
            "episodes: fewer than 8 groups are recorded, so every episode is taken to be like the mean of the metrics, and stragglers "
            "are not seen; train with --record all"
        )
        episodes = []
    pauses = [float(row.get("publish/pause_s", 0.0)) for row in rows]
    loads = [max(0.0, float(row.get("publish/seconds", 0.0)) - pause) for row, pause in zip(rows, pauses, strict=True)]
    plan = Plan(
        # Limits that end a real run must not end a simulated one.
        settings=replace(settings, stall_timeout_s=1e9, min_pass_rate=0.0, flow=replace(settings.flow, max_failure_rate=1.0)),
        num_engines=num_engines,
        engine=EngineModel(token_s=1.0, max_sequences=max_sequences, pause_s=samples(pauses), load_s=samples(loads)),
        learner=_learner(rows, num_learners, notes),
        episodes=draw_like(episodes) if episodes else _draw_mean(rows),
        pass_rate=max(1e-3, _mean(rows, "group/pass_rate", 1.0)),
        failure_rate=_failure_rate(rows),
    )
    recorded = Recorded(plan=plan, rows=rows, episodes=episodes, evaluations=evaluation_times(metrics))
    share = _growing_share(recorded, notes)
    return replace(recorded, plan=replace(plan, engine=_calibrated(recorded, share)), notes=tuple(notes))


def read_episodes(records: Iterable[Row]) -> list[RecordedEpisode]:
    """The episodes of training that ended well; the trajectories of an episode of several agents are put together."""
    together: dict[tuple[Any, ...], list[Row]] = {}
    for record in records:
        if record.get("eval_sampling") or record.get("status") not in (Status.FINISHED, Status.TRUNCATED) or not record.get("timings"):
            continue
        key = (record.get("group_id"), record.get("attempt", 0), record.get("episode_id"), record.get("version", 0))
        together.setdefault(key, []).append(record)
    return [played for key, parts in together.items() if (played := _played(key, parts)) is not None]


def draw_like(episodes: Sequence[RecordedEpisode]) -> DrawGroup:
    """Groups like the recorded ones: episodes of one task stay together where a group has several."""
    groups: dict[tuple[int, int], list[EpisodeShape]] = {}
    for episode in episodes:
        groups.setdefault(episode.group, []).append(episode.shape)
    shapes = list(groups.values())

    def draw(rng: random.Random, size: int) -> list[EpisodeShape]:
        chosen = shapes[int(rng.random() * len(shapes))]
        if len(chosen) >= max(2, size // 2):
            return rng.sample(chosen, size) if len(chosen) >= size else rng.choices(chosen, k=size)
        return [rng.choice(shapes[int(rng.random() * len(shapes))]) for _ in range(size)]

    return draw


SHORT_WAIT = 0.05
"""Share of a step that a wait for an evaluation may be of, in a step that tells of the run's pace."""


def paced(metrics: Sequence[Row], max_staleness: int) -> list[Row]:
    """Return the steps whose length tells of the run's pace: not the first, which fill the queue, and none after an evaluation.

    An evaluation beside a step delays its export, and so the step behind it, which is left out too.
    """
    steps = [row for row in metrics if row.get("step") and row.get("time/step_s") is not None]
    first = min(max_staleness + 1, len(steps) // 3)
    if any("eval/engines" in row for row in metrics):  # engines of their own: only a wait makes a step longer
        return [row for row in steps[first:] if row.get("eval/wait_s", 0.0) <= SHORT_WAIT * row["time/step_s"]]
    evaluated = {row["step"] for row in metrics if "eval/tasks" in row}
    evaluated |= {row["step"] for row in metrics if "eval/wait_s" in row}
    return [row for row in steps[first:] if row["step"] - 1 not in evaluated]


def evaluation_times(metrics: Sequence[Row]) -> Mapping[str, float]:
    """Return ``count``, and means, of evaluations between two steps.

    These are ``seconds``, and ``wait_s``, those for which the learner waited. With engines of their own also ``engines``, and ``used``, the
    share of the run's time in which these evaluated.
    """
    last = max((row["step"] for row in metrics), default=0)
    evaluated = [row for row in metrics if "eval/tasks" in row and row["step"]]
    between = [row for row in evaluated if row["step"] < last]
    waited = {row["step"]: float(row["eval/wait_s"]) for row in metrics if "eval/wait_s" in row}
    if not between:
        return {}

    def waits(row: Row) -> float:
        if "eval/engines" not in row:
            return waited.get(row["step"] + 1, float(row.get("eval/seconds") or 0.0))
        return sum(waited.get(step, 0.0) for step in {row["eval/step"] + 1, row["step"] + 1})

    times = {
        "count": float(len(between)),
        "seconds": statistics.fmean(float(row.get("eval/seconds") or 0.0) for row in between),
        "wait_s": statistics.fmean(map(waits, between)),
    }
    if not (apart := [row for row in evaluated if "eval/engines" in row]):
        return times
    busy_s, run_s = sum(float(row["eval/seconds"]) for row in apart), max(float(row.get("time_s") or 0.0) for row in metrics)
    return {**times, "engines": float(apart[-1]["eval/engines"]), "used": busy_s / run_s if run_s else 0.0}


def _played(key: tuple[Any, ...], parts: Sequence[Row]) -> RecordedEpisode | None:
    timings, turns = parts[0]["timings"], [turn for part in parts for turn in part.get("turns", ())]
    turns.sort(key=lambda turn: turn.get("number", 0))
    if not turns or parts[0].get("clipped"):
        return None
    generate_s, total_s = float(timings.get("generate_s", 0.0)), float(timings.get("total_s", 0.0))
    outside_s = max(0.0, total_s - generate_s) / (len(turns) + 1)  # spread evenly: only sums are recorded
    return RecordedEpisode(
        group=(int(key[0]), int(key[1])),
        version=int(key[3]),
        shape=EpisodeShape(outside_s, tuple((float(max(1, len(turn["token_ids"]))), outside_s) for turn in turns)),
        generate_s=generate_s,
        total_s=total_s,
        started_s=started_s(parts[0]),
    )


def _draw_mean(rows: Sequence[Row]) -> DrawGroup:
    turns = max(1, round(_mean(rows, "episode/turns_mean", 1.0)))
    outside_s = max(0.0, _mean(rows, "episode/total_s", 0.0) - _mean(rows, "episode/generate_s", 0.0)) / (turns + 1)
    tokens = max(1.0, _mean(rows, "episode/tokens_mean", 1.0) / turns)
    shape = EpisodeShape(outside_s, ((tokens, outside_s),) * turns)
    return lambda rng, size: [shape] * size


def _learner(rows: Sequence[Row], ranks: int, notes: list[str]) -> LearnerModel:
    """Time per step against its tokens."""
    tokens = [float(row["tokens"]) for row in rows]
    seconds = [float(row["time/train_s"]) for row in rows]
    slope = _slope(tokens, seconds)
    level = statistics.fmean(seconds)
    # A slope outside of this range makes a part of the time negative, so it is noise.
    if slope is None or not 0.0 < slope * statistics.fmean(tokens) < level:
        slope = level / statistics.fmean(tokens)
        notes.append("training: steps are too alike to tell what does not grow with their tokens; all of their time is taken to")
    fixed = level - slope * statistics.fmean(tokens)
    factors = [value / (fixed + slope * count) for value, count in zip(seconds, tokens, strict=True)]
    if not any("time/learner_s" in row for row in rows):
        notes.append("training: the run did not record how long the driver waited for the learner; handing groups over is left out")
    overhead_s = max(0.0, _mean(rows, "time/learner_s", level) - level)
    exports = samples([float(row.get("publish/export_s", 0.0)) for row in rows])
    return LearnerModel(step_s=fixed, token_s=slope * ranks, ranks=ranks, noise=samples(factors), overhead_s=overhead_s, export_s=exports)


def _failure_rate(rows: Sequence[Row]) -> float:
    failed = sum(float(row.get(f"failures/{status}", 0.0)) for row in rows for status in Status if status.failed)
    fine = sum(float(row.get("episode/count", 0.0)) for row in rows)
    return failed / (failed + fine) if failed else 0.0


def _growing_share(recorded: Recorded, notes: list[str]) -> tuple[float, float]:
    """Share of a decoding step that grows with its sequences, and the sequences at which it is that."""
    points = sequences_and_pace(recorded)
    if points:
        sequences, pace = zip(*points, strict=True)
        slope, level = _slope(sequences, pace), statistics.fmean(pace)
        if slope is not None and level > 0.0:
            return min(1.0, max(0.0, slope * statistics.fmean(sequences) / level)), statistics.fmean(sequences)
    notes.append(
        "engines: the run does not tell how much slower a sequence gets when there are more of them; half of a decoding step is "
        "taken to grow with them. Predictions for other numbers of engines depend on it; --record all may tell"
    )
    generating = recorded.mean("episode/generate_s") * recorded.mean("episode/count") / max(1e-9, recorded.step_s)
    return ASSUMED_SHARE, max(1.0, generating / recorded.plan.num_engines)


def sequences_and_pace(recorded: Recorded) -> list[tuple[float, float]]:
    """For each recorded episode the sequences beside it on average, itself included, and its seconds per token.

    Who was there when follows from when groups began; episodes that were not recorded are taken to be like the recorded ones of
    their group, and to be spread evenly over the engines.
    """
    plan, episodes = recorded.plan, recorded.episodes
    if not episodes or (plan.settings.max_staleness and any(episode.started_s is None for episode in episodes)):
        return []
    sizes = Counter(episode.group for episode in episodes)
    timeline: dict[float, list[tuple[float, float, float]]] = {}
    for episode in episodes:
        base, start = _beginning(episode)
        weight = plan.settings.n_samples_per_prompt / sizes[episode.group] / plan.num_engines
        density = weight * episode.generate_s / episode.total_s if episode.total_s > 0.0 else 0.0
        timeline.setdefault(base, []).append((start, start + episode.total_s, density))
    points: list[tuple[float, float]] = []
    # Each point is compared with all episodes, so only some of them become points.
    for episode in episodes[:: max(1, len(episodes) // MAX_POINTS)]:
        if episode.total_s > 0.0 and episode.shape.num_tokens and episode.generate_s > 0.0:
            base, start = _beginning(episode)
            points.append((_beside(timeline[base], start, start + episode.total_s), episode.generate_s / episode.shape.num_tokens))
    return points


def _beginning(episode: RecordedEpisode) -> tuple[float, float]:
    """The timeline of an episode and its beginning there; without times, the groups of a synchronous step are taken to begin together."""
    return (float(episode.version), 0.0) if episode.started_s is None else (0.0, episode.started_s)


def _beside(timeline: Sequence[tuple[float, float, float]], start: float, end: float) -> float:
    total = sum(max(0.0, min(end, other_end) - max(start, other_start)) * density for other_start, other_end, density in timeline)
    return max(1.0, total / (end - start))


def _calibrated(recorded: Recorded, share: tuple[float, float]) -> EngineModel:
    """The engine with which the simulated run has the recorded seconds per token."""
    growing, sequences = share
    plan = recorded.plan
    # A decoding step takes 1 at the recorded number of sequences; the scale makes seconds of it.
    engine = replace(plan.engine, token_s=1.0 - growing, token_s_per_sequence=growing / sequences)
    tokens = max(1e-9, recorded.mean("episode/tokens_mean"))
    wanted = recorded.mean("episode/generate_s") / tokens
    if wanted <= 0.0:
        raise ConfigError("RUN", "episode/generate_s", "is missing in metrics.jsonl", "Profile a run of this version of agentrl.")
    scale = wanted / engine.step_s(max(1, round(sequences)))
    steps = max(8, min(24, 1500 // plan.settings.flow.groups_per_step))

    def scaled() -> EngineModel:
        return replace(engine, token_s=engine.token_s * scale, token_s_per_sequence=engine.token_s_per_sequence * scale)

    # The pace decides how many sequences run side by side, which decides the pace, so this is repeated.
    for _ in range(3):
        simulated = simulate(
            replace(plan, engine=scaled(), settings=replace(plan.settings, training=replace(plan.settings.training, num_steps=steps)))
        )
        scale *= wanted / (simulated.mean("episode/generate_s") / simulated.mean("episode/tokens_mean"))
    return scaled()


def _slope(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Return the slope of the line through points; `None` if the points are too few or its error is too large."""
    if len(x) < MIN_GROUPS or statistics.pstdev(x) < MIN_SPREAD * abs(statistics.fmean(x)):
        return None
    slope, intercept = statistics.linear_regression(x, y)
    left = sum((value - intercept - slope * at) ** 2 for at, value in zip(x, y, strict=True)) / (len(x) - 2)
    error = math.sqrt(left / (statistics.pvariance(x) * len(x)))
    return slope if error * abs(statistics.fmean(x)) <= MAX_ERROR * abs(statistics.fmean(y)) else None


def _mean(rows: Sequence[Row], name: str, default: float) -> float:
    values = [float(row[name]) for row in rows if row.get(name) is not None]
    return statistics.fmean(values) if values else default


def time_shares(recorded: Recorded) -> Mapping[str, Mapping[str, float]]:
    """Parts of a step's time, by who spends it; what a run did not record is left out.

    Returns:
        ``learner``, seconds per step: training, handing groups over, exporting, and waiting, which is the rest. ``evaluation``: see
        `evaluation_times`; these seconds are in no other part. ``publication``, seconds per step. ``engine``, shares of the time:
        decoding, paused, idle. ``episode``, mean seconds: in the engine, in the environment, and elsewhere. ``group``, mean seconds: being
        played, and waiting in the queue for its step.
    """
    step_s = recorded.step_s
    train_s = recorded.mean("time/train_s")
    handing_s = max(0.0, recorded.mean("time/learner_s", train_s) - train_s)
    export_s, publish_s = recorded.mean("publish/export_s"), recorded.mean("publish/seconds")
    idle, paused = recorded.mean("idle/generator"), min(1.0, recorded.mean("publish/pause_s") / step_s)
    total_s, generate_s, env_s = (recorded.mean(f"episode/{name}") for name in ("total_s", "generate_s", "env_s"))
    return {
        "learner": {
            "train_s": train_s,
            "handing_over_s": handing_s,
            "export_s": export_s,
            "waiting_s": max(0.0, step_s - train_s - handing_s - export_s),
        },
        "evaluation": recorded.evaluations,
        "publication": {"seconds": publish_s, "pause_s": recorded.mean("publish/pause_s")},
        "engine": {"decoding": 1.0 - idle, "paused": min(paused, idle), "idle": max(0.0, idle - paused)},
        "episode": {"engine_s": generate_s, "env_s": env_s, "elsewhere_s": max(0.0, total_s - generate_s - env_s)},
        "group": {"played_s": recorded.mean("group/seconds_mean"), "queued_s": recorded.mean("queue/wait_s")},
    }

"""One dictionary of numbers per step, assembled when the step's weights are live."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from agentrl.algo.flat import by_agent
from agentrl.core.metrics import average
from agentrl.core.protocols import EngineStats, TrainResult, WeightUpdate
from agentrl.core.summaries import GroupSummary, MemberSummary
from agentrl.core.types import Status
from agentrl.flow.ledger import LedgerCounts
from agentrl.flow.queue import Accepted

FAILURES = tuple(status for status in Status if status.failed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """One optimizer step whose weights are to be published."""

    version: int  # steps done, which is the version of the new weights
    groups: Sequence[Accepted]  # what was trained on, oldest first
    oversampled: Sequence[int]  # ids of the groups that were started for the step and given up
    rejected: Sequence[int] = ()  # ids of the groups of the step that the filter rejected, in whose place no other was played
    result: TrainResult  # the learner's report
    update: WeightUpdate  # how engines get the weights
    interval_s: float  # time from the end of the previous step to the end of this one
    learner_s: float  # time from handing the groups to the learner until it answered
    export_s: float  # time to make the weights available
    queue_depth: int  # accepted groups left behind when these were taken
    taken_s: float  # clock reading when they were taken
    exported_s: float = 0.0  # clock reading when the weights were available

    @property
    def times(self) -> dict[str, float]:
        """Clock readings: the end of the step before, and when groups were taken, the learner answered and weights were available."""
        trained_s = self.taken_s + self.learner_s
        return {
            "begin_s": trained_s - self.interval_s,
            "taken_s": self.taken_s,
            "trained_s": trained_s,
            "exporting_s": self.exported_s - self.export_s,
            "exported_s": self.exported_s,
        }


@dataclass(slots=True)
class _Window:
    """Counts of what finished since the previous step."""

    attempts: int = 0
    failed: int = 0
    retried: int = 0
    episodes: int = 0
    stragglers_cancelled: int = 0
    accepted: int = 0
    filtered: int = 0
    statuses: Counter[Status] = field(default_factory=Counter)
    rewards: list[float] = field(default_factory=list)


class Meter:
    """Collects the events between steps and turns them into metrics; the run starts when it is made.

    Args:
        clock: Gives the time, seconds.
        flat: Says of which groups, with the members of one agent, nothing is learned.
    """

    def __init__(self, clock: Callable[[], float], flat: Callable[[GroupSummary], bool]) -> None:
        self._clock, self._flat = clock, flat
        self.start_s = clock()
        self._window = _Window()
        self._stats: Mapping[str, EngineStats] = {}
        self._stats_s = self.start_s

    def start(self, stats: Mapping[str, EngineStats]) -> None:
        """Set the counters that the first step's differences are taken from."""
        self._stats, self._stats_s = stats, self._clock()

    def attempt(self, summary: GroupSummary, *, failed: bool, retried: bool) -> None:
        """Count a finished attempt at a group."""
        window = self._window
        window.attempts += 1
        window.failed += failed
        window.retried += retried
        window.episodes += len(summary.episodes)
        if len(summary.trainable) < len(summary.members):
            statuses = [episode[0].status for episode in summary.episodes]
            window.stragglers_cancelled += statuses.count(Status.CANCELLED_STRAGGLER)
            window.statuses.update(status for status in statuses if status.failed)

    def verdict(self, summary: GroupSummary, *, accepted: bool) -> None:
        """Count a group that did not fail, as accepted or filtered."""
        window = self._window
        window.accepted += accepted
        window.filtered += not accepted
        window.rewards += [m.reward or 0.0 for m in summary.trainable]

    def step(
        self, trained: Trained, *, publish_s: float, stats: Mapping[str, EngineStats], counts: LedgerCounts, running: int
    ) -> dict[str, float]:
        """Return the metrics of one step; a new window begins. Publication took `publish_s`; counters and counts are those of now.

        A learner's value replaces one of the same name, because the learner sees tokens.
        """
        now = self._clock()
        metrics = {
            "step": float(trained.version),
            "time_s": now - self.start_s,
            **_rewards(trained.groups, self._flat),
            **_tasks(trained.groups),
            **_episodes(trained.groups),
            **_staleness(trained),
            **_window_metrics(self._window),
            **_engines(self._stats, stats, now - self._stats_s),
            **_learner_time(trained),
            "queue/depth": float(trained.queue_depth),
            "queue/wait_s": statistics.fmean(trained.taken_s - group.accepted_s for group in trained.groups),
            "queue/running": float(running),
            "publish/seconds": publish_s,
            "publish/export_s": trained.export_s,
            **trained.result.metrics,
            **counts.metrics(),
        }
        self._window, self._stats, self._stats_s = _Window(), stats, now
        return metrics


def _rewards(groups: Sequence[Accepted], flat: Callable[[GroupSummary], bool]) -> dict[str, float]:
    """Over trajectories; those of different agents are told apart, because only an agent's own are compared."""
    trained = [m for group in groups for m in group.summary.trainable]
    scores = [m.score for m in trained if m.score is not None]
    rewards = [float(m.reward or 0.0) for m in trained]
    compared = [part for group in groups for part in by_agent(group.summary)]
    named = [m for group in groups for m in group.summary.members if m.agent]  # also agents that are not trained
    metrics = {
        "reward/mean": statistics.fmean(rewards),
        "reward/std": _deviation(rewards),
        **{f"reward/{agent}": statistics.fmean(values) for agent, values in _by_agent(named).items()},
        "group/zero_variance": statistics.fmean(map(flat, compared)),
        "group/count": float(len(groups)),
    }
    greedy = [m.reward or 0.0 for group in groups for m in group.summary.greedy if not m.frozen]
    metrics |= {"reward/greedy": statistics.fmean(greedy)} if greedy else {}
    return {**metrics, "score/mean": statistics.fmean(scores)} if scores else metrics


def _deviation(values: Sequence[float]) -> float:
    """Standard deviation of the values, over their number; as `statistics.pstdev`, which takes 20 times as long."""
    mean = min(max(values), max(min(values), statistics.fmean(values)))  # equal values deviate by nothing
    return math.sqrt(math.fsum([(value - mean) ** 2 for value in values]) / len(values))


def _by_agent(members: Sequence[MemberSummary]) -> dict[str, list[float]]:
    """Rewards of the members that did not fail, by the agent's name."""
    rewards: dict[str, list[float]] = {}
    for member in members:
        if member.reward is not None:
            rewards.setdefault(member.agent, []).append(member.reward)
    return rewards


def _tasks(groups: Sequence[Accepted]) -> dict[str, float]:
    """Over groups: the latest pass over the tasks, and by data set, if there are several, mean reward and share of the groups."""
    metrics = {"tasks/epoch": float(max(group.group_request.task.epoch for group in groups))}
    by_source: dict[str, list[Accepted]] = {}
    for group in groups:
        source = group.group_request.task.metadata.get("source")
        if source and group.group_request.task.id.startswith(f"{source}/"):  # the name that the run gave to the data set
            by_source.setdefault(source, []).append(group)
    for source, part in by_source.items():
        metrics[f"source/{source}/reward"] = statistics.fmean(m.reward or 0.0 for group in part for m in group.summary.trainable)
        metrics[f"source/{source}/share"] = len(part) / len(groups)
    return metrics


_Episodes = Sequence[Sequence[MemberSummary]]


def _episodes(groups: Sequence[Accepted]) -> dict[str, float]:
    """Over episodes; the trajectories of one are added up."""
    episodes = [episode for group in groups for episode in group.summary.trained_episodes]
    tokens = _totals(episodes, "num_tokens")
    return {
        "episode/count": float(len(episodes)),
        "episode/tokens_mean": statistics.fmean(tokens),
        "episode/tokens_max": float(max(tokens)),
        "episode/prompt_tokens_mean": statistics.fmean(_totals(episodes, "num_prompt_tokens")),
        "episode/turns_mean": statistics.fmean(_totals(episodes, "num_turns")),
        "episode/truncated": _share(episodes, "cut_short"),
        "episode/overflowed": _share(episodes, "overflowed"),
        **({"episode/forked": forked} if (forked := _share(episodes, "forked_turns")) else {}),
        "tokens": float(sum(tokens)),
        **_logged([episode[0].metrics for episode in episodes]),
        **_named_means("episode/", [episode[0].timings for episode in episodes]),
        "group/seconds_mean": statistics.fmean(group.summary.seconds for group in groups),
    }


def _totals(episodes: _Episodes, name: str) -> list[int]:
    """Sum of an attribute over the trajectories of each episode."""
    value = attrgetter(name)
    return [value(episode[0]) if len(episode) == 1 else sum(map(value, episode)) for episode in episodes]


def _share(episodes: _Episodes, name: str) -> float:
    """Share of the episodes of which a trajectory has the attribute."""
    return sum(map(bool, _totals(episodes, name))) / len(episodes)


def _logged(values: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Mean of what episodes logged, under ``env/``; what the endpoint counted and reward models scored has its full name."""
    return {name if name.startswith(("endpoint/", "reward_model/")) else f"env/{name}": mean for name, mean in average(values).items()}


def _named_means(prefix: str, values: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {prefix + name: mean for name, mean in average(values).items()}


def _staleness(trained: Trained) -> dict[str, float]:
    """Lag in steps behind the weights being trained: of the oldest token, and of the weights live at admission.

    ``staleness/admission_share_<k>`` is the share of groups admitted k versions earlier.
    """
    step = trained.version - 1
    oldest = [step - group.summary.versions[0] for group in trained.groups if group.summary.versions]
    admission = Counter(step - group.group_request.version for group in trained.groups)
    return {
        "staleness/mean": statistics.fmean(oldest),
        "staleness/max": float(max(oldest)),
        "staleness/admission_mean": sum(lag * count for lag, count in admission.items()) / len(trained.groups),
        **{f"staleness/admission_share_{lag}": count / len(trained.groups) for lag, count in sorted(admission.items())},
    }


def _window_metrics(window: _Window) -> dict[str, float]:
    judged = window.accepted + window.filtered
    metrics = {
        "failures/groups": float(window.failed),
        "failures/retries": float(window.retried),
        "failures/rate": window.failed / window.attempts if window.attempts else 0.0,
        **{f"failures/{status}": float(window.statuses[status]) for status in FAILURES},
        "group/withheld": float(window.stragglers_cancelled),
        "group/withheld_share": window.stragglers_cancelled / window.episodes if window.episodes else 0.0,
    }
    if judged:
        metrics["group/pass_rate"] = window.accepted / judged
        metrics["reward/unfiltered_mean"] = statistics.fmean(window.rewards)  # exact, whatever the order
    return metrics


def _learner_time(trained: Trained) -> dict[str, float]:
    busy = trained.result.seconds / trained.interval_s if trained.interval_s > 0 else 1.0
    return {
        "idle/learner": min(1.0, max(0.0, 1.0 - busy)),
        "time/train_s": trained.result.seconds,
        "time/learner_s": trained.learner_s,
        "time/step_s": trained.interval_s,
    }


def _engines(before: Mapping[str, EngineStats], after: Mapping[str, EngineStats], seconds: float) -> dict[str, float]:
    """Differences of the engines' counters since the previous step; an engine that is new, or new in its place, counts from its start."""
    pairs = [(_before(before.get(name), stats), stats) for name, stats in after.items()]
    busy = [(new.busy_s - old.busy_s) / (new.clock_s - old.clock_s) for old, new in pairs if new.clock_s > old.clock_s]
    tokens = sum(new.tokens - old.tokens for old, new in pairs)
    prompt = sum(new.prompt_tokens - old.prompt_tokens for old, new in pairs)
    cached = sum(new.cached_tokens - old.cached_tokens for old, new in pairs)
    return {
        "idle/generator": min(1.0, max(0.0, 1.0 - statistics.fmean(busy))) if busy else 0.0,
        "tokens_per_s": tokens / seconds if seconds > 0 else 0.0,
        "engine/cached_prompt_share": cached / prompt if prompt else 0.0,
        **_load(pairs),
        **{f"worker/rss_mib/{name}": stats.rss_mib for name, stats in after.items() if stats.rss_mib},
        **_cache(after.values()),
        "publish/pause_s": max((new.paused_s - old.paused_s for old, new in pairs), default=0.0),
    }


def _load(pairs: Sequence[tuple[EngineStats, EngineStats]]) -> dict[str, float]:
    """Means over engines and over the time in which their workers had episodes under way."""
    seconds = sum(new.sums.seconds - old.sums.seconds for old, new in pairs)
    if seconds <= 0:
        return {}
    return {
        "engine/kv_usage": sum(new.sums.kv_usage - old.sums.kv_usage for old, new in pairs) / seconds,
        "engine/waiting": sum(new.sums.waiting - old.sums.waiting for old, new in pairs) / seconds,
        "engine/concurrency": sum(new.sums.episodes - old.sums.episodes for old, new in pairs) / seconds,
    }


def _cache(engines: Iterable[EngineStats]) -> dict[str, float]:
    """Mean over the engines that say what their caches hold."""
    sizes = [stats.kv_tokens for stats in engines if stats.kv_tokens]
    return {"engine/kv_tokens": statistics.fmean(sizes)} if sizes else {}


def _before(old: EngineStats | None, new: EngineStats) -> EngineStats:
    # A clock that went back is that of a replacement under the same name.
    return old if old is not None and old.clock_s <= new.clock_s else EngineStats()

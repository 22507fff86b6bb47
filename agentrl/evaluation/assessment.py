"""Figures of a model from the episodes of an evaluation, alone and compared with another model.

Every figure is a mean over tasks of a mean over a task's episodes. An episode that failed has no reward: it is counted,
and left out; a task all of whose episodes failed is left out whole. In pass@k an episode that failed is a try that did
not solve its task, so that the figure never rises because episodes failed, and each k is shown over the same tasks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import TypeVar

from agentrl.evaluation.statistics import Estimate, bootstrap_mean, pass_at_k, useful_k

T = TypeVar("T")

REWARD, SCORE, PASS = "reward", "score", "pass@"
EQUAL_WITHIN = 1e-9
MAX_CAUSES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeOutcome:
    """An episode that ended properly."""

    reward: float
    score: float | None  # success in 0..1; `None` if the environment gave none
    tokens: int  # sampled
    turns: int  # of the model
    truncated: bool  # whether a budget ended it


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOutcome:
    """The episodes of one task."""

    task_id: str  # the same task has the same name in every evaluation
    kind: str = ""  # "" if not known
    episodes: tuple[EpisodeOutcome, ...] = ()  # those that ended properly
    failures: tuple[str, ...] = ()  # error of each of the others
    agents: Mapping[str, tuple[EpisodeOutcome, ...]] = field(default_factory=dict)  # of several agents, each one's own; else empty

    @property
    def scores(self) -> list[float]:
        """Scores of the episodes that ended and have one."""
        return [episode.score for episode in self.episodes if episode.score is not None]

    @property
    def tries(self) -> int:
        """Tries at the task: episodes with a score, and those that failed."""
        return len(self.scores) + len(self.failures)

    @property
    def has_score(self) -> bool:
        """True if tries at the task can be told to have solved it: some have a score, or all failed."""
        return bool(self.scores or (self.failures and not self.episodes))

    def values(self, solved_at: float, ks: Sequence[int]) -> dict[str, float]:
        """Reward, score and pass@k for each of `ks`, as far as its episodes allow; solved are those with a score from `solved_at` on."""
        values, scores = dict[str, float](), self.scores
        if self.episodes:
            values[REWARD] = fmean(episode.reward for episode in self.episodes)
        if scores:
            values[SCORE] = fmean(scores)
        if self.has_score:
            # Within a margin, because a score that is computed from parts may miss the bound by its rounding.
            solved = sum(score >= solved_at - EQUAL_WITHIN for score in scores)
            values |= {f"{PASS}{k}": pass_at_k(self.tries, solved, k) for k in ks}
        return values


def common_ks(outcomes: Sequence[TaskOutcome]) -> list[int]:
    """Return the k of pass@k that every task with a score has the tries for; none if no episode has a score."""
    if not any(outcome.scores for outcome in outcomes):
        return []
    return useful_k(min(outcome.tries for outcome in outcomes if outcome.has_score))


@dataclass(frozen=True, slots=True, kw_only=True)
class Assessment:
    """One model on a set of tasks.

    Attributes:
        tasks: Tasks with at least one episode that ended properly.
        episodes: Episodes that ended properly.
        failed_tasks: Names of the tasks of which no episode did; they are in no mean.
        failed_episodes: Episodes that failed, in all tasks.
        causes: The most frequent causes and how often each was seen.
        overall: ``reward``, ``score``, ``pass@1``, ... over all tasks.
        by_kind: The same for each kind of task; empty if there is one kind only.
        by_agent: The same for each agent, if there are several.
        tokens: Sampled tokens per episode.
        turns: Turns per episode.
        truncated: Share of episodes that a budget ended.
    """

    tasks: int
    episodes: int
    failed_tasks: tuple[str, ...]
    failed_episodes: int
    causes: Mapping[str, int]
    overall: Mapping[str, Estimate]
    by_kind: Mapping[str, Mapping[str, Estimate]]
    by_agent: Mapping[str, Mapping[str, Estimate]]
    tokens: float
    turns: float
    truncated: float

    def metrics(self) -> dict[str, float]:
        """Every figure under a flat name, such as ``reward``, ``reward_low``, ``reward/hard``; what is not known is left out."""
        values = {"tasks": float(self.tasks), "episodes": float(self.episodes)}
        values |= {"failed_tasks": float(len(self.failed_tasks)), "failed_episodes": float(self.failed_episodes)}
        for name, estimate in self.overall.items():
            values[name] = estimate.value
            if estimate.low is not None and estimate.high is not None:
                values |= {f"{name}_low": estimate.low, f"{name}_high": estimate.high}
        values |= {f"{name}/{kind}": e.value for kind, estimates in self.by_kind.items() for name, e in estimates.items()}
        values |= {f"{name}/agent/{agent}": e.value for agent, estimates in self.by_agent.items() for name, e in estimates.items()}
        if self.episodes:
            values |= {"tokens_mean": self.tokens, "turns_mean": self.turns, "truncated": self.truncated}
        return values


def assess(outcomes: Sequence[TaskOutcome], *, solved_at: float = 1.0, seed: int = 0) -> Assessment:
    """Sum up an evaluation; `solved_at` is the score from which an episode counts as solved, `seed` that of the intervals."""
    usable = [outcome for outcome in outcomes if outcome.episodes]
    episodes = [episode for outcome in usable for episode in outcome.episodes]
    parts = _by_kind(outcomes, lambda outcome: outcome.kind)
    failures = Counter(message for outcome in outcomes for message in outcome.failures)
    return Assessment(
        tasks=len(usable),
        episodes=len(episodes),
        failed_tasks=tuple(outcome.task_id for outcome in outcomes if not outcome.episodes),
        failed_episodes=failures.total(),
        causes=dict(failures.most_common(MAX_CAUSES)),
        overall=_estimates(outcomes, solved_at, seed),
        by_kind={kind: _estimates(part, solved_at, seed) for kind, part in parts.items()},
        by_agent={agent: _estimates(_of_agent(outcomes, agent), solved_at, seed) for agent in _agents(usable)},
        tokens=_mean([episode.tokens for episode in episodes]),
        turns=_mean([episode.turns for episode in episodes]),
        truncated=_mean([episode.truncated for episode in episodes]),
    )


def _by_kind(items: Sequence[T], kind_of: Callable[[T], str]) -> dict[str, list[T]]:
    """Return the items of each kind; empty if there is one kind only."""
    kinds = sorted({kind_of(item) for item in items})
    return {kind or "other": [item for item in items if kind_of(item) == kind] for kind in kinds} if len(kinds) > 1 else {}


def _agents(outcomes: Sequence[TaskOutcome]) -> list[str]:
    """Names of all agents, where there are several."""
    return sorted({agent for outcome in outcomes for agent in outcome.agents})


def _of_agent(outcomes: Sequence[TaskOutcome], agent: str) -> list[TaskOutcome]:
    # An episode that failed has failed for all of its agents.
    return [replace(outcome, episodes=outcome.agents.get(agent, ()), agents={}) for outcome in outcomes]


def _estimates(outcomes: Sequence[TaskOutcome], solved_at: float, seed: int) -> dict[str, Estimate]:
    ks = common_ks(outcomes)
    values = [outcome.values(solved_at, ks) for outcome in outcomes]
    names = sorted({name for row in values for name in row}, key=_order)
    return {name: bootstrap_mean([row[name] for row in values if name in row], seed=seed) for name in names}


def _order(name: str) -> tuple[int, int]:
    if name.startswith(PASS):
        return 2, int(name.removeprefix(PASS))
    return (REWARD, SCORE).index(name), 0


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Difference between two models in one figure, over the tasks that both played."""

    baseline: float  # mean of the other model
    model: float  # mean of the model
    difference: Estimate  # mean of the tasks' differences, with its interval
    better: float  # share of tasks in which the model does better
    worse: float  # share in which it does worse

    @property
    def clear(self) -> bool:
        """True if the interval excludes 0."""
        low, high = self.difference.low, self.difference.high
        return low is not None and high is not None and (low > 0 or high < 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two models on the same tasks."""

    tasks: int  # tasks that both have
    unpaired: int  # tasks that only one of them has, because all episodes of the other failed
    overall: Mapping[str, Difference]  # difference by figure
    by_kind: Mapping[str, Mapping[str, Difference]]  # the same for each kind of task; empty if there is one kind only
    by_agent: Mapping[str, Mapping[str, Difference]]  # the same for each agent, if there are several


def compare(model: Sequence[TaskOutcome], baseline: Sequence[TaskOutcome], *, solved_at: float = 1.0, seed: int = 0) -> Comparison:
    """Set two evaluations on the same tasks against each other, task by task; the other arguments are those of `assess`.

    The differences between tasks cancel out, so the interval is narrower than two separate ones suggest.
    """
    others = {outcome.task_id: outcome for outcome in baseline}
    pairs = [(outcome, others[outcome.task_id]) for outcome in model if outcome.task_id in others]
    parts = _by_kind(pairs, lambda pair: pair[0].kind)
    usable = sum(bool(outcome.episodes) for outcome in (*model, *baseline))
    both = sum(bool(one.episodes and other.episodes) for one, other in pairs)
    return Comparison(
        tasks=both,
        unpaired=usable - 2 * both,
        overall=_differences(pairs, solved_at, seed),
        by_kind={kind: _differences(part, solved_at, seed) for kind, part in parts.items()},
        by_agent={agent: _differences(_pairs_of(pairs, agent), solved_at, seed) for agent in _agents([one for one, _ in pairs])},
    )


def _pairs_of(pairs: Sequence[tuple[TaskOutcome, TaskOutcome]], agent: str) -> list[tuple[TaskOutcome, TaskOutcome]]:
    model, baseline = (_of_agent(side, agent) for side in zip(*pairs, strict=True))
    return list(zip(model, baseline, strict=True))


def _differences(pairs: Sequence[tuple[TaskOutcome, TaskOutcome]], solved_at: float, seed: int) -> dict[str, Difference]:
    ks = common_ks([outcome for pair in pairs for outcome in pair])
    values = [(outcome.values(solved_at, ks), other.values(solved_at, ks)) for outcome, other in pairs]
    names = sorted({name for mine, other in values for name in mine.keys() & other.keys()}, key=_order)
    return {
        name: _difference([(mine[name], other[name]) for mine, other in values if name in mine and name in other], seed) for name in names
    }


def _difference(pairs: Sequence[tuple[float, float]], seed: int) -> Difference:
    gains = [mine - other for mine, other in pairs]
    return Difference(
        baseline=fmean(other for _, other in pairs),
        model=fmean(mine for mine, _ in pairs),
        difference=bootstrap_mean(gains, seed=seed),
        better=fmean(gain > EQUAL_WITHIN for gain in gains),
        worse=fmean(gain < -EQUAL_WITHIN for gain in gains),
    )

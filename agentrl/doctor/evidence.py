"""Records of a run as the hypotheses look at them: episodes with their texts and labels, groups with their rewards, and metrics."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from agentrl.algo.estimators import estimator_facts
from agentrl.algo.statistics import SAME
from agentrl.check.play import plain
from agentrl.check.results import spread
from agentrl.core.types import FinishReason, Status, Task
from agentrl.inspect.listing import warnings_of
from agentrl.inspect.reader import RunReader
from agentrl.inspect.store import RECORDS
from agentrl.rollout.records import recorded_group_request
from agentrl.track.index import TRAINING
from agentrl.track.tracker import FAILURES

MAX_EPISODES = 600
"""Records that are read of a long run, from all over it; their texts would fill the memory."""
MAX_GROUPS = 2000
_SPACE = re.compile(r"\s+")


def normal(text: str) -> str:
    """Return a text for comparison: lower case, single spaces."""
    return _SPACE.sub(" ", text).strip().lower()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedEpisode:
    """One recorded trajectory that may be trained on.

    Attributes:
        name: Name of the episode.
        version: Weights that began it.
        task: Its task, with the label as it was.
        prompt: Text of the task's prompt, or of what `reset` gave if the task has none.
        texts: Answers, one per turn.
        tokens: Sampled tokens.
        reward: Its reward.
        cut: True if the budget of tokens cut an answer.
        stopped: True if the environment did not end it.
        parts: Named parts of the reward.
        record: The record itself.
    """

    name: str
    group: int
    version: int
    task: Task
    prompt: str
    texts: tuple[str, ...]
    tokens: int
    reward: float
    cut: bool
    stopped: bool
    parts: Mapping[str, float]
    record: Mapping[str, Any]

    @property
    def answer(self) -> str:
        """Text of the last turn, without spaces at its ends."""
        return self.texts[-1].strip() if self.texts else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedGroup:
    """One group of the training as it was judged.

    Attributes:
        number: Its number.
        version: Weights that began it.
        rewards: Rewards of its members that did not fail.
        failures: Members that failed.
        errors: First lines of their errors.
        status: Most frequent status of the members that failed; empty if none did.
    """

    number: int
    version: int
    rewards: tuple[float, ...]
    failures: int
    errors: tuple[str, ...]
    status: str

    @property
    def mean(self) -> float:
        """Mean reward."""
        return sum(self.rewards) / len(self.rewards)

    @property
    def flat(self) -> bool:
        """True if there are two members at least, and all earned the same."""
        # Rounding errors grow with the reward, so the tolerance does too.
        return len(self.rewards) > 1 and max(self.rewards) - min(self.rewards) <= SAME * max(1.0, abs(self.rewards[0]))


class Evidence:
    """Everything that the hypotheses look at; parts are read when they are first asked for.

    Args:
        run: The run, which may still grow; it is read as it is now.
    """

    def __init__(self, run: RunReader) -> None:
        self.run, self.config = run, run.config
        run.metrics.advance()
        run.store.complete((*RECORDS, "groups"))

    @cached_property
    def episodes(self) -> list[PlayedEpisode]:
        """Recorded episodes of the training that may be trained on, in order, at most `MAX_EPISODES` from all over the run."""
        trainable = tuple(str(status) for status in Status if status.trainable)
        sql = (
            f"SELECT start, bytes FROM episodes WHERE source = ? AND status IN ({', '.join('?' * len(trainable))}) "
            "AND reward IS NOT NULL ORDER BY id"
        )
        places = self.run.store.query(sql, (TRAINING, *trainable))
        return self._read(spread(places, MAX_EPISODES))

    @cached_property
    def evaluated(self) -> list[PlayedEpisode]:
        """One recorded episode of each task of the evaluations."""
        return self._read(spread(self._first_of_tasks("source != ?"), MAX_EPISODES))

    @cached_property
    def trained_tasks(self) -> list[PlayedEpisode]:
        """One recorded episode of each task of the training."""
        return self._read(spread(self._first_of_tasks("source = ?"), MAX_EPISODES))

    def _first_of_tasks(self, condition: str) -> Sequence[tuple[int, int]]:
        sql = f"SELECT start, bytes FROM episodes WHERE {condition} AND reward IS NOT NULL GROUP BY task ORDER BY min(id)"
        return self.run.store.query(sql, (TRAINING,))

    def _read(self, places: Iterable[tuple[int, int]]) -> list[PlayedEpisode]:
        played = (_played(record, self._without_end) for record in self.run.store.lines("episodes", places))
        return [episode for episode in played if episode is not None]

    def _without_end(self, record: Mapping[str, Any], turn: Mapping[str, Any]) -> str:
        """Text of a turn as `step` got it, without the token that ended it; with it, where the run's tokenizer is not found."""
        text, last = str(turn["text"]), turn["token_ids"][-1:]
        if not last or last[0] not in (record.get("engine") or {}).get("end_token_ids", ()):
            return text
        return text.removesuffix("".join(self.run.texts.pieces(last) or ()))

    @cached_property
    def groups(self) -> list[JudgedGroup]:
        """Attempts at groups of the training, in order; without their file those that the recorded episodes make up."""
        places = self.run.store.query("SELECT start, bytes FROM groups ORDER BY id")
        lines = self.run.store.lines("groups", spread(places, MAX_GROUPS))
        return [_judged(line) for line in lines] or self._recorded_groups()

    def _recorded_groups(self) -> list[JudgedGroup]:
        sql = 'SELECT "group", step - 1, reward, status, error FROM episodes WHERE source = ? ORDER BY "group", id'
        rows = self.run.store.query(sql, (TRAINING,))
        return [_of_rows(number, list(members)) for number, members in itertools.groupby(rows, lambda row: int(row[0]))]

    @cached_property
    def scored(self) -> list[JudgedGroup]:
        """Groups of which a member has a reward."""
        return [group for group in self.groups if group.rewards]

    @cached_property
    def lowest(self) -> float:
        """Lowest reward of a recorded episode."""
        return min((episode.reward for episode in self.episodes), default=0.0)

    @cached_property
    def highest(self) -> float:
        """Highest reward of a recorded episode."""
        return max((episode.reward for episode in self.episodes), default=0.0)

    @property
    def varied(self) -> bool:
        """True if two recorded episodes earned different rewards."""
        return self.highest - self.lowest > SAME * max(1.0, abs(self.highest))

    def unpaid(self, episode: PlayedEpisode) -> bool:
        """Return True if an episode earned the least, and that is no success: nothing, or less than others."""
        return episode.reward <= self.lowest + SAME and (self.varied or self.lowest <= 0.0)

    @cached_property
    def warnings(self) -> Mapping[str, str]:
        """Remedies of the warnings that the run itself gave, by their names."""
        return {str(warning["id"]): str(warning["remedy"]) for warning in warnings_of(self.run)}

    @property
    def late(self) -> list[PlayedEpisode]:
        """Second half of the recorded episodes."""
        return self.episodes[len(self.episodes) // 2 :]

    @cached_property
    def steps(self) -> list[dict[str, float]]:
        """Metrics of each step that has a reward, in order."""
        rows = map(self.run.metrics.row, self.run.metrics.steps)
        return [row for row in rows if "reward/mean" in row]

    def column(self, name: str) -> list[tuple[int, float]]:
        """Return step and value of a metric, where it is known."""
        return [(int(row["step"]), row[name]) for row in self.steps if name in row]

    @property
    def compares_groups(self) -> bool:
        """True if the advantage estimator compares the members of a group; so do those of files that cannot be loaded."""
        return self.config is None or estimator_facts(self.config.algo.advantage_estimator).compares_group


def _played(record: Mapping[str, Any], text_of: Callable[[Mapping[str, Any], Mapping[str, Any]], str]) -> PlayedEpisode | None:
    """The episode of a record, with texts by `text_of`; `None` if it was cut, lacks something, or is of an agent that is not trained."""
    if record.get("clipped") or record.get("frozen") or not record.get("turns"):
        return None
    try:
        turns, task = record["turns"], recorded_group_request(record).task
        return PlayedEpisode(
            name=str(record["episode_id"]),
            group=int(record["group_id"]),
            version=int(record["version"]),
            task=task,
            prompt=plain(task.prompt) or str(turns[0]["prompt_text"]),
            texts=tuple(text_of(record, turn) for turn in turns),
            tokens=sum(len(turn["token_ids"]) for turn in turns),
            reward=float(record["reward"]),
            cut=any(turn["finish_reason"] == FinishReason.LENGTH for turn in turns),
            stopped=record["status"] == Status.TRUNCATED,
            parts=record.get("reward_parts") or {},
            record=record,
        )
    except (KeyError, TypeError, ValueError, SyntaxError):
        return None


def _judged(line: Mapping[str, Any]) -> JudgedGroup:
    rewards = [reward for reward in line.get("rewards", ()) if reward is not None]
    failed = [status for status in line.get("statuses", ()) if status in FAILURES]
    return JudgedGroup(
        number=int(line.get("group_id", -1)),
        version=int(line.get("version") or 0),
        rewards=tuple(map(float, rewards)),
        failures=len(failed),
        errors=tuple(line.get("errors") or ()),
        status=max(failed, key=failed.count, default=""),
    )


def _of_rows(number: int, rows: Sequence[tuple[Any, ...]]) -> JudgedGroup:
    failed = [row[3] for row in rows if row[3] in FAILURES]
    return JudgedGroup(
        number=number,
        version=int(rows[0][1]),
        rewards=tuple(float(row[2]) for row in rows if row[2] is not None),
        failures=len(failed),
        errors=tuple(dict.fromkeys(row[4] for row in rows if row[4])),
        status=max(failed, key=failed.count, default=""),
    )

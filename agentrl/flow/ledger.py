"""The accounting of groups: submitted = trained + filtered + dropped + in flight, each group counted once."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from agentrl.core.errors import LedgerError, NothingToTrainError, TooManyFailuresError
from agentrl.core.summaries import GroupSummary
from agentrl.flow.sizes import FlowPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerCounts:
    """A reading of the ledger."""

    submitted: int  # groups admitted since the start
    trained: int  # groups that an optimizer step has used
    filtered: Mapping[str, int]  # reason -> groups rejected by the filter
    dropped: Mapping[str, int]  # reason -> groups given up
    in_flight: int  # groups admitted and not yet in one of the other states
    forked: int = 0  # episodes of trained groups that began at a turn of another one

    def metrics(self) -> dict[str, float]:
        """The counts under their metric names, with one entry per reason."""
        return {
            "ledger/submitted": self.submitted,
            "ledger/trained": self.trained,
            "ledger/filtered": sum(self.filtered.values()),
            "ledger/dropped": sum(self.dropped.values()),
            "ledger/in_flight": self.in_flight,
            **({"ledger/forked": self.forked} if self.forked else {}),
            **{f"filtered/{reason}": count for reason, count in self.filtered.items()},
            **{f"dropped/{reason}": count for reason, count in self.dropped.items()},
        }


class Ledger:
    """Follows every group from admission to its end; the retries of a group are the same group."""

    def __init__(self) -> None:
        self._submitted = self._trained = self._forked = 0
        self._last_id = -1
        self._in_flight: set[int] = set()
        self._filtered: Counter[str] = Counter()
        self._dropped: Counter[str] = Counter()

    def restore(self, *, trained: int, filtered: Mapping[str, int], dropped: Mapping[str, int], forked: int = 0) -> None:
        """Begin with the closed accounts of an earlier part of the run."""
        self._forked = forked
        self._trained, self._filtered, self._dropped = trained, Counter(filtered), Counter(dropped)
        # Groups that were open are not counted here: they are submitted again, under their old ids.
        self._submitted = trained + self._filtered.total() + self._dropped.total()

    @property
    def in_flight(self) -> set[int]:
        """Ids of the groups admitted and not yet trained, filtered or dropped."""
        return set(self._in_flight)

    def submit(self, group_id: int) -> None:
        """Open the account of a new group; ids only grow.

        Raises:
            LedgerError: If the id was used before.
        """
        if group_id <= self._last_id:
            raise LedgerError(f"group {group_id} is submitted after group {self._last_id}; ids only grow")
        self._last_id = group_id
        self._submitted += 1
        self._in_flight.add(group_id)

    def train(self, group_ids: Iterable[int], forked: int = 0) -> None:
        """Close the accounts of the groups that one optimizer step has used, `forked` of whose episodes began at a turn of another one."""
        for group_id in group_ids:
            self._close(group_id, "trained")
            self._trained += 1
        self._forked += forked

    def filter(self, group_id: int, reason: str) -> None:
        """Close the account of a group that the filter rejected."""
        self._close(group_id, "filtered")
        self._filtered[reason] += 1

    def drop(self, group_id: int, reason: str) -> None:
        """Close the account of a group that is given up."""
        self._close(group_id, "dropped")
        self._dropped[reason] += 1

    def check(self) -> LedgerCounts:
        """Verify conservation and return the counts.

        Raises:
            LedgerError: If a group was lost or counted twice.
        """
        filtered, dropped, in_flight = dict(self._filtered), dict(self._dropped), len(self._in_flight)
        counts = LedgerCounts(
            submitted=self._submitted, trained=self._trained, filtered=filtered, dropped=dropped, in_flight=in_flight, forked=self._forked
        )
        parts = counts.trained + sum(counts.filtered.values()) + sum(counts.dropped.values()) + counts.in_flight
        if counts.submitted != parts:
            raise LedgerError(f"{counts.submitted} groups submitted and {parts} accounted for: {counts}")
        return counts

    def _close(self, group_id: int, state: str) -> None:
        if group_id not in self._in_flight:
            raise LedgerError(f"group {group_id} becomes {state} but is not in flight")
        self._in_flight.remove(group_id)


FAILURE_WINDOW, MIN_FAILURE_WINDOW = 64, 8
"""Finished attempts over which failures are counted, and how many there must be before the failure rate is looked at."""

MAX_CAUSES = 3
MAX_CAUSE_CHARS = 300


def failure_reason(summary: GroupSummary) -> str:
    """Return why a group has too few trainable episodes: the most frequent status of a failure, else of another end, else ``no_tokens``."""
    ended = [episode[0].status for episode in summary.played if not episode[0].status.trainable]
    statuses = Counter(str(status) for status in [status for status in ended if status.failed] or ended)
    return statuses.most_common(1)[0][0] if statuses else "no_tokens"


class Health:
    """Judges the latest finished groups."""

    def __init__(self, settings: FlowPlan) -> None:
        self._settings = settings
        self._attempts: deque[tuple[str, ...]] = deque(maxlen=FAILURE_WINDOW)  # causes; empty: the attempt was fine
        self._verdicts: deque[str | None] = deque(maxlen=settings.pass_window)  # why it was filtered; None: kept

    @property
    def failure_rate(self) -> float:
        """Share of the attempts in the window that failed."""
        return sum(map(bool, self._attempts)) / len(self._attempts) if self._attempts else 0.0

    def attempt(self, summary: GroupSummary, failed: bool) -> None:
        """Note how one attempt at a group ended.

        Raises:
            TooManyFailuresError: If too large a share of the latest attempts failed, or every one of a full window, whatever is allowed.
        """
        self._attempts.append(_causes(summary) if failed else ())
        limit = self._settings.flow.max_failure_rate
        judged = len(self._attempts) >= MIN_FAILURE_WINDOW and self.failure_rate > limit
        hopeless = len(self._attempts) == FAILURE_WINDOW and all(self._attempts)
        if judged or hopeless:
            allowed = f"more than --max-failure-rate {limit} allows" if judged else "so there is nothing to train on"
            raise TooManyFailuresError(
                f"{sum(map(bool, self._attempts))} of the last {len(self._attempts)} attempts at groups failed, {allowed}. "
                f"Most frequent causes:\n{self.causes()}"
            )

    def verdict(self, reason: str | None) -> None:
        """Note what the filter said of a group that did not fail.

        Raises:
            NothingToTrainError: If next to none of the latest groups passed.
        """
        self._verdicts.append(reason)
        # A group that passed never lowers the number of those that passed in the window, so only the others are judged.
        if reason is None or len(self._verdicts) < self._settings.pass_window:
            return
        passed = sum(verdict is None for verdict in self._verdicts)
        if passed < self._settings.min_pass_rate * self._settings.pass_window:
            raise NothingToTrainError(
                f"only {passed} of the last {len(self._verdicts)} groups passed the filter ({self.filter_reasons()}). The tasks are "
                "too easy or too hard for this model, or the reward never differs within a group: widen "
                "--score-range, raise --n-samples-per-prompt, change the tasks, or use --flat-groups train"
            )

    def causes(self) -> str:
        """The most frequent error texts of the failed attempts in the window, one a line."""
        texts = Counter(text for causes in self._attempts for text in causes)
        return "\n".join(f"  {count} x {text}" for text, count in texts.most_common(MAX_CAUSES)) or "  none"

    def filter_reasons(self) -> str:
        """Return the reasons for which groups in the window were filtered, with counts."""
        reasons = Counter(verdict for verdict in self._verdicts if verdict is not None)
        return ", ".join(f"{reason}: {count}" for reason, count in reasons.most_common(MAX_CAUSES)) or "none filtered"


def _causes(summary: GroupSummary) -> tuple[str, ...]:
    failed = [episode[0] for episode in summary.played if not any(m.trainable for m in episode)]
    return tuple((m.error or f"{m.status}: nothing was sampled")[:MAX_CAUSE_CHARS] for m in failed) or ("the group has no members",)

"""The accounting of groups: submitted = trained + filtered + dropped + in flight, each group counted once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from agentrl.core.errors import LedgerError


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerCounts:
    """A reading of the ledger.

    Attributes:
        submitted: Groups admitted since the start.
        trained: Groups that an optimizer step has used.
        filtered: Reason -> groups rejected by the filter.
        dropped: Reason -> groups given up.
        in_flight: Groups admitted and not yet in one of the other states.
    """

    submitted: int
    trained: int
    filtered: Mapping[str, int]
    dropped: Mapping[str, int]
    in_flight: int

    @property
    def pass_rate(self) -> float | None:
        """Share of the groups that were judged by the filter and trained on; `None` before the first."""
        judged = self.trained + sum(self.filtered.values())
        return self.trained / judged if judged else None

    def metrics(self) -> dict[str, float]:
        """The counts under their metric names, with one entry per reason."""
        return {
            "ledger/submitted": self.submitted,
            "ledger/trained": self.trained,
            "ledger/filtered": sum(self.filtered.values()),
            "ledger/dropped": sum(self.dropped.values()),
            "ledger/in_flight": self.in_flight,
            **{f"filtered/{reason}": count for reason, count in self.filtered.items()},
            **{f"dropped/{reason}": count for reason, count in self.dropped.items()},
        }


class Ledger:
    """Follows every group from admission to its end; the retries of a group are the same group."""

    def __init__(self) -> None:
        self._submitted = 0
        self._last_id = -1
        self._in_flight: set[int] = set()
        self._trained = 0
        self._filtered: Counter[str] = Counter()
        self._dropped: Counter[str] = Counter()

    def restore(self, *, trained: int, filtered: Mapping[str, int], dropped: Mapping[str, int]) -> None:
        """Begin with the closed accounts of an earlier part of the run."""
        self._trained, self._filtered, self._dropped = trained, Counter(filtered), Counter(dropped)
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

    def train(self, group_ids: Iterable[int]) -> None:
        """Close the accounts of the groups that one optimizer step has used."""
        for group_id in group_ids:
            self._close(group_id, "trained")
            self._trained += 1

    def filter(self, group_id: int, reason: str) -> None:
        """Close the account of a group that the filter rejected."""
        self._close(group_id, "filtered")
        self._filtered[reason] += 1

    def drop(self, group_id: int, reason: str) -> None:
        """Close the account of a group that is given up."""
        self._close(group_id, "dropped")
        self._dropped[reason] += 1

    def counts(self) -> LedgerCounts:
        """The counts as they are now."""
        return LedgerCounts(
            submitted=self._submitted,
            trained=self._trained,
            filtered=dict(self._filtered),
            dropped=dict(self._dropped),
            in_flight=len(self._in_flight),
        )

    def check(self) -> LedgerCounts:
        """Verify conservation and return the counts.

        Raises:
            LedgerError: If a group was lost or counted twice.
        """
        counts = self.counts()
        parts = counts.trained + sum(counts.filtered.values()) + sum(counts.dropped.values()) + counts.in_flight
        if counts.submitted != parts:
            raise LedgerError(f"{counts.submitted} groups submitted and {parts} accounted for: {counts}")
        return counts

    def _close(self, group_id: int, state: str) -> None:
        if group_id not in self._in_flight:
            raise LedgerError(f"group {group_id} becomes {state} but is not in flight")
        self._in_flight.remove(group_id)

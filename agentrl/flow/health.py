"""Stops a run that cannot succeed: too many failures, or next to nothing that passes the filter."""

from __future__ import annotations

from collections import Counter, deque

from agentrl.core.errors import NothingToTrainError, TooManyFailuresError
from agentrl.core.summaries import GroupSummary
from agentrl.flow.settings import FlowSettings

MAX_CAUSES = 3
MAX_CAUSE_CHARS = 300


def failure_reason(summary: GroupSummary) -> str:
    """Why a group has too few trainable episodes: the most frequent failed status, else ``no_tokens``."""
    statuses = Counter(str(episode[0].status) for episode in summary.episodes if not episode[0].status.trainable)
    return statuses.most_common(1)[0][0] if statuses else "no_tokens"


class Health:
    """Judges the latest finished groups.

    Args:
        settings: Windows and thresholds.
    """

    def __init__(self, settings: FlowSettings) -> None:
        self._settings = settings
        self._attempts: deque[tuple[str, ...]] = deque(maxlen=settings.failure_window)  # causes; empty: the attempt was fine
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
        limit = self._settings.max_failure_rate
        judged = len(self._attempts) >= self._settings.min_failure_window and self.failure_rate > limit
        hopeless = len(self._attempts) == self._settings.failure_window and all(self._attempts)
        if judged or hopeless:
            allowed = f"more than --max-failure-rate {limit} allows" if judged else "so there is nothing to train on"
            raise TooManyFailuresError(
                f"{sum(map(bool, self._attempts))} of the last {len(self._attempts)} groups failed, {allowed}. "
                f"Most frequent causes:\n{self.causes()}"
            )

    def verdict(self, reason: str | None) -> None:
        """Note what the filter said of a group that did not fail.

        Raises:
            NothingToTrainError: If next to none of the latest groups passed.
        """
        self._verdicts.append(reason)
        if reason is None or len(self._verdicts) < self._settings.pass_window:
            return
        passed = sum(verdict is None for verdict in self._verdicts)
        if passed < self._settings.min_pass_rate * self._settings.pass_window:
            raise NothingToTrainError(
                f"only {passed} of the last {len(self._verdicts)} groups passed the filter ({self.filter_reasons()}). The tasks are "
                "too easy or too hard for this model, or the reward never differs within a group: widen "
                "--dynamic-filtering-range, raise --n-samples-per-prompt, change the tasks, or switch --dynamic-filtering off"
            )

    def causes(self) -> str:
        """The most frequent error texts of the failed attempts in the window, one a line."""
        texts = Counter(text for causes in self._attempts for text in causes)
        return "\n".join(f"  {count} x {text}" for text, count in texts.most_common(MAX_CAUSES)) or "  none"

    def filter_reasons(self) -> str:
        """Why groups in the window were filtered, with counts."""
        reasons = Counter(verdict for verdict in self._verdicts if verdict is not None)
        return ", ".join(f"{reason}: {count}" for reason, count in reasons.most_common(MAX_CAUSES)) or "none filtered"


def _causes(summary: GroupSummary) -> tuple[str, ...]:
    failed = [episode[0] for episode in summary.episodes if not any(m.trainable for m in episode)]
    return tuple((m.error or f"{m.status}: nothing was sampled")[:MAX_CAUSE_CHARS] for m in failed) or ("the group has no members",)

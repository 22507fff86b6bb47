"""Signs that a run cannot learn, read from the metrics of its steps; each is said once, with what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

from agentrl.core.callbacks import Callback, MetricsRow

FLAT_STEPS = 5
"""Steps in a row in which every group is flat before that is said."""
ZERO_GRADIENT_STEPS = 3
TRUNCATED_STEPS = 3
FAILED_SHARE = 0.25
MIN_EPISODES = 32
"""Episodes before a share of failures is looked at."""
FAILURES = ("env_error", "timeout", "engine_error")


@dataclass(frozen=True, slots=True)
class Sign:
    """A sign that a run cannot learn.

    Attributes:
        id: Its name, for scripts.
        text: One sentence for people.
        remedy: One sentence that says what to do.
    """

    id: str
    text: str
    remedy: str


class Diagnosis(Callback):
    """Watches the metrics of a run, and says each sign once.

    Args:
        compares_groups: Whether the advantage estimator compares the episodes of a group, so that a flat group teaches nothing.
        max_new_tokens: Tokens of a turn at most, for remedies.
        max_turns: Turns of an episode at most, for remedies.
        say: Called with each new sign.

    Attributes:
        signs: What was found so far, in order.
    """

    def __init__(
        self, *, compares_groups: bool, max_new_tokens: int, max_turns: int, say: Callable[[Sign], None] = lambda sign: None
    ) -> None:
        self._say = say
        self._compares_groups, self._max_new_tokens, self._max_turns = compares_groups, max_new_tokens, max_turns
        self._row: dict[str, int] = {}
        self._episodes = 0.0
        self._failed = dict.fromkeys(FAILURES, 0.0)
        self.signs: list[Sign] = []

    def on_metrics(self, event: MetricsRow) -> None:
        """Take in the metrics of a step."""
        if not event.step:
            return
        metrics = event.metrics
        flat = metrics.get("group/zero_variance", 0.0) >= 1.0
        if self._in_a_row("flat-groups", flat and self._compares_groups, FLAT_STEPS):
            self.add(_flat(metrics["reward/mean"]))
        elif self._in_a_row("zero-gradient", metrics.get("grad_norm") == 0.0, ZERO_GRADIENT_STEPS) and not flat:
            self.add(_zero_gradient(metrics))
        if self._in_a_row("all-truncated", metrics.get("episode/truncated", 0.0) >= 1.0, TRUNCATED_STEPS):
            self.add(self._truncated(metrics))
        self._count_failures(metrics)

    def _in_a_row(self, name: str, holds: bool, steps: int) -> bool:
        self._row[name] = self._row.get(name, 0) + 1 if holds else 0
        return self._row[name] == steps

    def add(self, sign: Sign) -> None:
        """Say a sign, unless it was said before."""
        if sign.id not in {known.id for known in self.signs}:
            self.signs.append(sign)
            self._say(sign)

    def as_json(self) -> list[dict[str, str]]:
        """Return the signs for ``summary.json``."""
        return [asdict(sign) for sign in self.signs]

    def _truncated(self, metrics: Mapping[str, float]) -> Sign:
        full_turns = metrics.get("episode/turns_mean", 0.0) >= self._max_turns > 1
        text = f"every episode of {TRUNCATED_STEPS} steps in a row was cut before the environment ended it"
        if full_turns:
            return Sign("all-truncated", text, f"Raise --max-turns (now {self._max_turns}), or have step return terminated=True earlier.")
        remedy = f"Raise --max-new-tokens (now {self._max_new_tokens}) or --max-episode-tokens, or ask for shorter answers."
        return Sign("all-truncated", text, remedy)

    def _count_failures(self, metrics: Mapping[str, float]) -> None:
        self._episodes += metrics.get("episode/count", 0.0)
        for name in FAILURES:
            self._failed[name] += metrics.get(f"failures/{name}", 0.0)
        failed = sum(self._failed.values())
        if self._episodes + failed >= MIN_EPISODES and failed >= FAILED_SHARE * (self._episodes + failed):
            most = max(FAILURES, key=lambda name: self._failed[name])
            share = failed / (self._episodes + failed)
            text = f"{share:.0%} of the episodes failed, most with {most}; failed episodes are not trained on"
            self.add(
                Sign("many-failures", text, f"`agentrl inspect RUN --status {most}` shows their errors; `agentrl check` finds causes.")
            )


def _flat(reward: float) -> Sign:
    text = f"the episodes of every group earned the same for {FLAT_STEPS} steps (mean reward {reward:.3g}), so nothing is learned"
    if reward <= 0.0:
        remedy = "Either no answer is ever right (are the labels there? `agentrl inspect RUN` shows answers), or the task is too hard: \
reward partial success, or begin with easier tasks."
    else:
        remedy = "The reward may be at its highest for all of them: take harder tasks, or a reward that tells good from better; \
--dynamic-filtering leaves such groups out."
    return Sign("flat-groups", text, remedy)


def _zero_gradient(metrics: Mapping[str, float]) -> Sign:
    text = f"the gradient was zero for {ZERO_GRADIENT_STEPS} steps in a row, so the policy does not change"
    if metrics.get("off_policy/masked", 0.0) >= 1.0:
        return Sign("zero-gradient", text, "The off-policy correction masks every token: widen --off-policy-range.")
    if metrics.get("learning_rate") == 0.0:
        return Sign("zero-gradient", text, "The learning rate is 0: set --learning-rate.")
    return Sign("zero-gradient", text, "Every advantage is zero or every ratio is clipped: look at advantage/abs and policy/clip_fraction.")

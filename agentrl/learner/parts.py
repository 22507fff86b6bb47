"""A step whose groups come in parts: the gradient of the first is computed before the last are there.

The loss of a step is the mean of its parts' losses, weighted by their tokens or episodes. The sum of these weights is known
only with the last part, so the gradient of the weighted sum is accumulated, and divided by it when it is applied. Nothing else
may depend on the whole batch: ``--learner-parts`` is refused with whitened advantages, a critic, several updates of a batch,
and thresholds over all tokens.
"""

from __future__ import annotations

from agentrl.core.metrics import MetricSums
from agentrl.learner.batch import Batch
from agentrl.learner.clock import Clock
from agentrl.learner.generators import generator_states
from agentrl.learner.layout import Layout
from agentrl.learner.ranks import Ranks
from agentrl.learner.report import describe_batch
from agentrl.learner.settings import LearnerSettings
from agentrl.learner.step import Models, TrainingStep


class StepInParts:
    """One step, begun before its whole batch is there.

    Args:
        step: Number of the step.
        models: What to run and train.
        settings: The learner's settings.
        ranks: The data-parallel ranks.
        kl_coefficient: Weight of the KL penalty in this step.

    Attributes:
        generators: States of the random generators before the step.
    """

    def __init__(self, step: int, models: Models, settings: LearnerSettings, ranks: Ranks, kl_coefficient: float) -> None:
        self.step, self.generators = step, generator_states()
        self._models, self._settings, self._ranks, self._kl_coefficient = models, settings, ranks, kl_coefficient
        self._clock = Clock(ranks.device)
        self._parts: list[TrainingStep] = []
        self._weight = 0.0

    @property
    def num_episodes(self) -> int:
        """Episodes so far."""
        return sum(part.host.num_episodes for part in self._parts)

    def add(self, batch: Batch, *, last: bool) -> None:
        """Add the gradient of a part.

        Args:
            batch: On the CPU.
            last: Whether it is the last one.
        """
        with self._clock.running():
            part = TrainingStep(batch, self.step, self._models, self._settings, self._ranks, self._kl_coefficient, self._clock)
            self._weight += part.accumulate(last=last)
        self._parts.append(part)

    def add_nothing(self) -> None:
        """Say that the part before was the last one, which was not known when it was added."""
        policy, nothing = self._models.policy, Layout(self._parts[-1].host).micro_batch((), packed=False)
        with self._clock.running():
            policy.accumulate(policy(nothing.to(self._ranks.device))[0].sum(), last=True)

    def finish(self) -> MetricSums:
        """Apply the gradient.

        Returns:
            Statistics over all parts, micro-batches and ranks; those of the whole batch at once, but for how it was laid out.

        Raises:
            NonFiniteError: If too many updates in a row had a gradient that is not finite.
        """
        with self._clock.running():
            self._parts[-1].apply(self._weight)
        stats = MetricSums()
        for part in self._parts:
            stats.merge(part.stats)
        if self._ranks.first:
            stats.merge(describe_batch([part.batch for part in self._parts], self.step))
        self._clock.record(stats)
        return self._ranks.merge(stats)

"""One training step: rows in, updated weights and statistics out; an objective says what is learned of the rows."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from agentrl.algo.statistics import record_means
from agentrl.core.metrics import MetricSums
from agentrl.learner.attention import KERNELS, Kernel
from agentrl.learner.engine import Clock, TrainEngine, learning_rate
from agentrl.learner.layout import Layout, MicroBatch, describe_layout
from agentrl.learner.models import balance_share, experts_per_token
from agentrl.learner.ranks import Ranks
from agentrl.learner.rows import Rows
from agentrl.learner.settings import LearnerSettings
from agentrl.learner.sharding import plan_updates
from agentrl.learner.targets import Update
from agentrl.learner.trees import one_row_bundles, share_prefixes

ModelScores: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""Results of the policy for a micro-batch: see `agentrl.learner.models.PolicyModel.forward`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """The models of one rank."""

    policy: TrainEngine  # what is trained
    hidden_size: int  # width of the models
    reference: Any = None  # frozen policy that the KL penalty refers to, called like the policy; `None` without KL
    teacher: Any = None  # frozen model to learn from, called like the policy; `None` without distillation
    critic: TrainEngine | None = None  # value model with an optimizer of its own; only for estimators that need values
    kernel: Kernel = KERNELS["sdpa"]  # attention of the models, which decides how rows are laid out
    share_prompts: bool = False  # True if rows that begin with the same tokens may go through the models as one sequence


class Objective(Protocol):
    """The losses of a step's rows, and what must be known of them before the first update.

    Attributes:
        host: The rows, on the CPU.
        warmup: Steps at the beginning of the run in which the policy is not trained.
        chosen: Counts of how often each expert was chosen in each update, for a load-balancing loss; else `None`. # [updates, experts]
    """

    host: Rows
    warmup: int = 0
    chosen: Tensor | None = None

    @abstractmethod
    def sizes(self, rows: Sequence[int]) -> Any:
        """Return the denominators of an update on some rows, over all ranks."""

    @abstractmethod
    def prepare(self, updates: Sequence[Update]) -> None:
        """Find out what the losses need to know of all rows, the same on every rank."""

    def begin_update(self, update: Update) -> None:
        """Do what comes before an update of the policy."""
        return

    @abstractmethod
    def asked(self, micro: MicroBatch) -> MicroBatch:
        """Return what the policy is to be run on for a micro-batch."""

    @abstractmethod
    def losses(self, micro: MicroBatch, scores: ModelScores, update: Update, done: float) -> dict[str, Tensor]:
        """Return the shares of a micro-batch in the parts of the loss, by name; `done` is the share of the step's updates before it."""

    def skipped(self, update: Update) -> None:
        """Note that an update had a gradient that is not finite."""
        return

    def finish(self) -> None:
        """Record the metrics of the whole step."""
        return


class TrainingStep:
    """One step; its number is the version of the weights it starts from. See `train` for the order of things."""

    def __init__(self, step: int, models: Models, settings: LearnerSettings, ranks: Ranks) -> None:
        self.step, self.models, self.settings, self.ranks = step, models, settings, ranks
        self.stats, self.clock = MetricSums(), Clock(ranks.device)

    def train(self, objective: Objective) -> MetricSums:
        """Prepare what the losses need, then update the policy, epoch by epoch, mini-batch by mini-batch.

        The statistics are those over all micro-batches and ranks.
        """
        epochs = self.settings.algo.ppo_epochs
        with self.clock.phase("layout"):
            updates = self.lay_out(objective.host, objective.sizes, record=True)
        objective.prepare(updates)
        for epoch in range(epochs):
            for update in updates:
                objective.begin_update(update)
                if self.step >= objective.warmup:
                    self._update_policy(objective, update, (epoch * len(updates) + update.number) / (epochs * len(updates)))
        objective.finish()
        self.clock.record(self.stats)
        # Ranks that run the same micro-batches measured the same; counted from each, it would count several times.
        return self.ranks.merge(self.stats if self.ranks.leads else MetricSums())

    @torch.no_grad()
    def evaluate(self, objective: Objective) -> MetricSums:
        """Compute the losses and metrics of rows without training on them."""
        updates = self.lay_out(objective.host, objective.sizes)
        objective.prepare(updates)
        for update in updates:
            for micro in self.on_device(update):
                parts = objective.losses(micro, self.models.policy(objective.asked(micro)), update, 0.0)
                self.stats.mean("loss", float(torch.stack(list(parts.values())).sum()) * update.sizes, 0.0)
            self.stats.mean("loss", 0.0, update.sizes / self.ranks.data_size)
        return self.ranks.merge(self.stats if self.ranks.leads else MetricSums())

    def lay_out(self, host: Rows, sizes: Callable[[Sequence[int]], Any], *, record: bool = False) -> tuple[Update, ...]:
        """Divide rows over updates, ranks and micro-batches.

        Args:
            host: The rows, on the CPU.
            sizes: Returns the denominators of an update on some of them.
            record: Report how they were laid out.
        """
        kernel, budget, algo = self.models.kernel, self.settings.learner.micro_batch_tokens, self.settings.algo
        width, ranks = self.models.hidden_size, self.ranks.data_size
        parts = ranks * algo.mini_batches if ranks > 1 else 1
        bundles = one_row_bundles(host)
        if self.models.share_prompts:
            bundles = share_prefixes(host, budget=budget, hidden_size=width, parts=parts, costs=kernel.costs)
        plans = plan_updates(
            [bundle.length for bundle in bundles],
            [bundle.group for bundle in bundles],
            updates=algo.mini_batches,
            ranks=ranks,
            budget=budget,
            packed=kernel.packed,
            hidden_size=width,
            whole_groups=host.paired,
        )
        layout = Layout(host)
        updates = []
        for number, plan in enumerate(plans):
            mine = ([bundles[place] for place in places] for places in plan.micros[self.ranks.data_rank])
            micros = tuple(layout.micro_batch(chosen, packed=kernel.packed) for chosen in mine)
            if record:
                self.stats.merge(describe_layout(micros))
            rows = [row for place in plan.rows for row in bundles[place].rows]
            updates.append(Update(number=number, micros=micros, sizes=sizes(rows)))
        return tuple(updates)

    @torch.no_grad()
    def over_batch(self, score: Callable[[MicroBatch], Tensor], updates: Sequence[Update], shape: tuple[int, ...]) -> Tensor:
        """Return scores of every action token, each rank contributing its rows. # shape, which is [A] or [A, ...]."""
        scores = torch.zeros(shape, device=self.ranks.device)
        for update in updates:
            for micro in self.on_device(update):
                found = score(micro)
                if self.ranks.leads:
                    scores[micro.actions] = found
        return self.ranks.sum(scores)

    def on_device(self, update: Update) -> Iterator[MicroBatch]:
        """Yield the micro-batches of an update, moved to the device one at a time."""
        return (micro.to(self.ranks.device) for micro in update.micros)

    def _update_policy(self, objective: Objective, update: Update, done: float) -> None:
        rate = self.learning_rate(self.settings.learner.learning_rate, objective.warmup)
        with self.clock.phase("forward_backward"):
            for number, micro in enumerate(self.on_device(update), 1):
                scores = self.models.policy(objective.asked(micro))
                parts = objective.losses(micro, scores, update, done)
                if objective.chosen is not None:
                    experts = experts_per_token(self.models.policy.module.model)
                    share = balance_share(scores[2][1], objective.chosen[update.number], experts)
                    parts["loss/balance"] = self.settings.algo.aux_loss_coef * share
                loss = torch.stack(list(parts.values())).sum()
                self.record_shares({**parts, "loss": loss}, update)
                self.models.policy.accumulate(loss, last=number == len(update.micros))
        with self.clock.phase("optimizer"):
            norm = self.models.policy.update(rate)
        if norm is None:
            objective.skipped(update)
        self.record_update("", rate, norm)

    def learning_rate(self, peak: float, start: int) -> float:
        """Return the learning rate of this step for what is trained from step `start` on."""
        config = self.settings.learner
        return learning_rate(
            self.step - start,
            peak=peak,
            schedule=config.lr_schedule,
            warmup_steps=config.lr_warmup_steps,
            num_steps=self.settings.num_steps - start,
            min_ratio=config.min_lr_ratio,
        )

    def record_shares(self, parts: Mapping[str, Tensor], update: Update) -> None:
        """Record shares of losses such that they add up to the loss, and average over updates."""
        weight = 1.0 / (len(update.micros) * self.ranks.data_size)
        for name, value in zip(parts, torch.stack(list(parts.values())).tolist(), strict=True):
            self.stats.mean(name, value, weight)

    def record_mean(self, name: str, per_token: Tensor) -> None:
        """Add values to the mean of a metric. # [any]."""
        record_means(self.stats, {name: (per_token.sum(), per_token.new_tensor(float(len(per_token))))})

    def record_update(self, prefix: str, rate: float, norm: float | None) -> None:
        """Record the metrics of an update that are equal on all ranks; only rank 0 records them."""
        if not self.ranks.first:
            return
        self.stats.mean(f"{prefix}learning_rate", rate, 1.0)
        self.stats.total(f"{prefix}skipped_updates", float(norm is None))
        if norm is not None:
            self.stats.mean(f"{prefix}grad_norm", norm, 1.0)

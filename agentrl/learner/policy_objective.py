"""The objective of reinforcement learning: advantages, off-policy weights and the parts of the loss of a batch of episodes.

What depends on the algorithm is looked up by name in `agentrl.algo`; nothing here knows which names there are. Flat
quantities of action tokens ``# [A]`` are known for the whole batch on every rank, so that advantages, corrections and
their statistics are the same however rows are spread; only the model passes are divided.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from agentrl.algo.compute import compute_advantages, compute_correction, compute_policy_loss, select_tokens
from agentrl.algo.corrections import needs_whole_batch
from agentrl.algo.facts import facts_of
from agentrl.algo.kl import approximate_kl
from agentrl.algo.off_policy import CorrectionInputs, interpolate_old
from agentrl.algo.plan import bootstraps
from agentrl.algo.selection import high_entropy
from agentrl.algo.teacher_specs import SELF
from agentrl.algo.token_losses import Denominators, LossInputs, aggregate, shares, value_loss
from agentrl.core.types import derive_seed
from agentrl.learner.annotations import Annotator
from agentrl.learner.audit import Audit, begin_audit
from agentrl.learner.batch import Batch, advantage_inputs, describe_batch
from agentrl.learner.bootstrap import apart, with_cuts
from agentrl.learner.demonstrations import Imitation
from agentrl.learner.engine import TrainEngine
from agentrl.learner.layout import MicroBatch
from agentrl.learner.models import vocabulary_of
from agentrl.learner.parameters import on_device
from agentrl.learner.replay import describe_replay
from agentrl.learner.rows import Rows
from agentrl.learner.step import ModelScores, Objective, TrainingStep
from agentrl.learner.targets import Algorithm, CriticTargets, OldScores, Update, UpdateTargets, denominators
from agentrl.learner.teaching import check_taught, divergence_from_teacher, with_hints, with_scores, with_teachers_tokens


class PolicyObjective(Objective):
    """The objective of one step of reinforcement learning, see `agentrl.learner.step.Objective`.

    Args:
        run: The step.
        batch: Its batch, on the CPU.
        algorithm: Estimator, loss and correction.
        kl_coefficient: Weight of the divergence from the reference.
        entropy_coefficient: Weight of the entropy.
        recorded: Trajectories whose figures are appended to the run.
        demonstrations: Rows that are imitated beside the batch; `None` for none.
    """

    host: Batch
    signals: UpdateTargets  # once it is prepared

    def __init__(
        self,
        run: TrainingStep,
        batch: Batch,
        algorithm: Algorithm,
        kl_coefficient: float,
        entropy_coefficient: float,
        recorded: frozenset[str] = frozenset(),
        demonstrations: Rows | None = None,
    ) -> None:
        self.run, self.host, self.batch, self.shape = run, batch, batch.to(run.ranks.device), (batch.num_actions,)
        self.step, self.models, self.settings, self.ranks = run.step, run.models, run.settings, run.ranks
        self.stats, self.clock = run.stats, run.clock
        self.algorithm, self.algo = algorithm, run.settings.algo
        self.kl_coefficient, self.entropy_coefficient = kl_coefficient, entropy_coefficient
        self.loss_seed = derive_seed(run.settings.seed, "loss", run.step)
        self.episode_length, self.same_version = self.batch.episode_length().to(torch.float32), self.batch.versions == run.step
        self.warmup = run.settings.learner.critic_warmup_steps if run.models.critic is not None else 0
        self.frozen = run.step < self.warmup
        # A teacher that is served has scored the batch before.
        self.sampled_teacher = bool(self.algo.teacher) and self.algo.teacher_loss == "sampled"
        check_taught(batch, self.algo)
        self.audit: Audit | None = None
        self.imitation = None if demonstrations is None else Imitation(run, demonstrations, self.algo.sft_coef)
        path = run.settings.annotations
        self.annotator = None if path is None else Annotator(self.batch, recorded, run.ranks, path)

    def sizes(self, rows: Sequence[int]) -> Denominators:
        """Return the denominators of an update on some rows."""
        return denominators(self.host, rows, self.settings.max_new_tokens)

    def prepare(self, updates: Sequence[Update]) -> None:
        """Run the models that must be run before the first update, derive what follows from them, and begin an audit."""
        self.signals, self.num_updates = self._targets(updates), len(updates)
        self.chosen = self.signals.chosen
        self._begin_audit(updates, self.signals)

    def begin_update(self, update: Update) -> None:
        """Update the critic, if there is one, and begin the policy's gradient with that of demonstrations."""
        if self.models.critic is not None and self.signals.critic is not None:
            self._update_critic(self.models.critic, update, self.signals.critic)
        if self.imitation is not None and not self.frozen:
            self.imitation.accumulate(update, self.num_updates)

    def asked(self, micro: MicroBatch) -> MicroBatch:
        """Return a micro-batch that asks the policy for the tokens of a teacher too, if their whole distribution is learned."""
        return micro if self.sampled_teacher else with_teachers_tokens(micro, self.batch)

    def skipped(self, update: Update) -> None:
        """Note that an update had a gradient that is not finite."""
        if self.annotator is not None:
            self.annotator.skip(update.micros)

    def finish(self) -> None:
        """Record the metrics of the batch, annotate it, and end the audit."""
        self._describe(self.signals)
        if self.annotator is not None:
            with self.clock.phase("annotate"):
                self.annotator.write(self.step + 1, self.signals, behaviour_is_old=self.algo.old_logprobs == "behaviour")
        if self.audit is not None:
            self.stats.merge(self.audit.stats)
        if self.algo.router_replay:
            self.stats.merge(describe_replay(self.batch, self.models.policy.module, first=self.ranks.first))

    def _targets(self, updates: Sequence[Update]) -> UpdateTargets:
        """Run the models that must be run before the first update, and derive what follows from them."""
        self._ask_teacher(updates)
        batch, algo = self.batch, self.algo
        scored = self._old_scores(updates)
        old = scored.old
        reference = values = at_cut = kl = None
        if self.models.reference is not None:
            score = self.models.reference
            with self.clock.phase("reference"), on_device(score, self.ranks.device):
                # The reference is another model, whose distribution is that of its own experts.
                reference = self.run.over_batch(lambda micro: score(replace(micro, experts=None))[0], updates, self.shape)
        if self.models.critic is not None:
            with self.clock.phase("values"):
                values, at_cut = self._values(self.models.critic, updates)
        if reference is not None and old is not None:
            penalty = approximate_kl(old, reference, algo.kl_estimator)
            kl = None if algo.use_kl_loss else self.kl_coefficient * penalty
            if self.ranks.first:
                self.run.record_mean("kl/reference", penalty)
        inputs = advantage_inputs(batch, values, kl, at_cut)
        found = compute_advantages(self.algorithm.estimator, inputs, self.algorithm.estimator_options)
        if old is not None and batch.teacher is not None and self.sampled_teacher:
            gap = approximate_kl(old, batch.teacher, "k1")
            found = replace(found, advantages=found.advantages - algo.teacher_coef * gap)
            if self.ranks.first:
                self.run.record_mean("distill/kl", gap)
        everything = torch.arange(batch.num_actions, device=batch.row.device)
        weights = None if old is None else self._weigh(old, everything, found.advantages, record=self.ranks.first)
        targets = None if values is None or found.returns is None else CriticTargets(values=values, returns=found.returns)
        selected = None if old is None else self._select(old, found.advantages)
        share, trained = algo.top_entropy_share, None
        if scored.entropies is not None and share < 1.0:
            trained = high_entropy(scored.entropies, share)
        return UpdateTargets(
            advantages=found.advantages,
            old=old,
            weights=weights,
            reference=reference,
            critic=targets,
            chosen=scored.chosen,
            selected=selected,
            trained=trained,
        )

    def _ask_teacher(self, updates: Sequence[Update]) -> None:
        """Score the batch as a served teacher has done before: with a model on this rank, or with the policy, which then reads hints."""
        own = self.algo.teacher == SELF
        model: Any = self.models.policy if own else self.models.teacher
        if model is None:
            return
        top_k = 0 if self.sampled_teacher else self.algo.teacher_top_k
        shape = (*self.shape, 1 + 2 * top_k) if top_k else self.shape
        laid_out = self.run.lay_out(with_hints(self.host), self.sizes) if own else updates
        with self.clock.phase("teacher"), on_device(model, self.ranks.device):
            found = self.run.over_batch(lambda micro: model(replace(micro, top_k=top_k))[0], laid_out, shape)
        self.batch = with_scores(self.batch, found, vocabulary_of(self.models.policy.module.model))

    def _select(self, old: Tensor, advantages: Tensor) -> Tensor | None:
        inputs = LossInputs(new=old, old=old, advantages=advantages, sequence=self.batch.row, seed=self.loss_seed)
        return select_tokens(self.algorithm.loss, inputs, self.algorithm.loss_options)

    def _old_scores(self, updates: Sequence[Update]) -> OldScores:
        """Score the batch with the policy, if anything must be known of it before the update.

        With a single update nothing else may need that: its own forward pass then starts from the same weights.
        """
        algo = self.algo
        old = self.batch.logprobs if algo.old_logprobs == "behaviour" else None
        only_scores = algo.aux_loss_coef == 0 and algo.top_entropy_share == 1.0
        if only_scores and (old is not None or not self._old_scores_are_needed(updates)):
            return OldScores(old=old)
        loads: list[Tensor] = []
        entropies = torch.zeros(self.batch.num_actions, device=self.batch.row.device)

        def score(micro: MicroBatch) -> Tensor:
            new: Tensor
            new, entropy, load = self.models.policy(micro)
            loads.append(load[0] * self.ranks.leads)
            if self.ranks.leads:
                entropies[micro.actions] = entropy
            return new

        with self.clock.phase("old_logprobs"):
            computed = self.run.over_batch(score, updates, self.shape)
        chosen = None
        if algo.aux_loss_coef:
            parts = torch.split(torch.stack(loads), [len(update.micros) for update in updates])
            chosen = self.ranks.sum(torch.stack([part.sum(0) for part in parts]))
        measured = None if algo.top_entropy_share == 1.0 else self.ranks.sum(entropies)
        return OldScores(old=computed if old is None else old, chosen=chosen, entropies=measured)

    def _values(self, critic: TrainEngine, updates: Sequence[Update]) -> tuple[Tensor, Tensor | None]:
        """Values of every action token # [A], and, if they count, of the states in which episodes were cut short # [E]."""
        if not (self.host.cuts and bootstraps(self.algo)):
            return self.run.over_batch(critic, updates, self.shape), None
        longer = with_cuts(self.host)
        laid_out = self.run.lay_out(longer, self.sizes)
        values, at_cut = apart(self.run.over_batch(critic, laid_out, (longer.num_actions,)), self.host)
        if self.ranks.first:
            self.stats.mean("value/at_cut", float(at_cut.sum()), float(len(self.host.cuts)))
        return values, at_cut

    def _old_scores_are_needed(self, updates: Sequence[Update]) -> bool:
        several = len(updates) * self.algo.ppo_epochs > 1 and self.algo.old_logprobs != "interpolated"
        in_reward = self.sampled_teacher or (self.models.reference is not None and not self.algo.use_kl_loss)
        chosen = self.algorithm
        whole = needs_whole_batch(chosen.correction, chosen.correction_options) or facts_of(chosen.loss).selects is not None
        return several or in_reward or self.frozen or whole

    def _weigh(self, old: Tensor, actions: Tensor, advantages: Tensor, *, record: bool) -> Tensor:
        """Off-policy weights of some action tokens, which must be whole rows. # [a]."""
        batch = self.batch
        inputs = CorrectionInputs(
            old=old,
            behaviour=batch.logprobs[actions],
            sequence=batch.row[actions],
            same_version=self.same_version[actions],
            advantages=advantages,
        )
        correction = compute_correction(self.algorithm.correction, inputs, self.algorithm.correction_options)
        if record:
            self.stats.merge(correction.stats)
        return correction.weights

    def _corrected(self, new: Tensor, at: Tensor, advantages: Tensor, signals: UpdateTargets, done: float) -> tuple[Tensor, Tensor]:
        """Return `old` and the off-policy weights of a micro-batch's tokens; `done` is the share of the step's updates. # [a], [a]."""
        if signals.old is not None and signals.weights is not None:
            return signals.old[at], signals.weights[at]
        old = new
        if done:
            behaviour, versions = self.batch.logprobs[at], self.batch.versions[at]
            old = interpolate_old(new, behaviour, versions, proximal=self.step, current=self.step + done)
        return old, self._weigh(old, at, advantages, record=done < 1.0 / self.algo.ppo_epochs)

    def losses(self, micro: MicroBatch, scores: ModelScores, update: Update, done: float) -> dict[str, Tensor]:
        """Return the shares of this micro-batch in the parts of the loss that are made of action tokens, by name."""
        algo, at, signals = self.algo, micro.actions, self.signals
        new, entropy, _ = scores
        new, divergence = divergence_from_teacher(new, at, self.batch, algo.teacher_loss)
        advantages = signals.advantages[at]
        old, weights = self._corrected(new.detach(), at, advantages, signals, done)
        selected = None if signals.selected is None else signals.selected[at]
        inputs = LossInputs(new=new, old=old, advantages=advantages, sequence=self.batch.row[at], selected=selected, seed=self.loss_seed)
        result = compute_policy_loss(self.algorithm.loss, inputs, self.algorithm.loss_options)
        self.stats.merge(result.stats)
        self.run.record_mean("entropy", entropy)
        if self.audit is not None and not done:
            self.audit.take(micro, new)
        per_token = result.per_token * weights
        if signals.trained is not None:
            per_token = per_token.where(signals.trained[at], 0.0)
            self.run.record_mean("policy/high_entropy", signals.trained[at].to(torch.float32))
        each = shares(per_token, episode_length=self.episode_length[at], mode=algo.loss_aggregation, denominators=update.sizes)
        if self.annotator is not None and result.ratio is not None:
            figures = (weights, result.ratio, each.detach())
            first = done < 1.0 / algo.ppo_epochs
            self.annotator.take(micro, first=first, entropy=entropy, new=new, figures=figures, clipped=result.clipped)
        parts = {"loss/policy": each.sum()}
        if self.entropy_coefficient:
            parts["loss/entropy"] = -self.entropy_coefficient * self._share(entropy, at, update.sizes)
        if divergence is not None:
            parts["loss/teacher"] = algo.teacher_coef * self._share(divergence, at, update.sizes)
            if not done:
                self.run.record_mean("distill/kl", divergence)
        if signals.reference is not None and algo.use_kl_loss:
            kl = approximate_kl(new, signals.reference[at], algo.kl_estimator)
            weighted = kl * weights * (inputs.ratio() if algo.kl_bias_correction else 1.0)
            parts["loss/kl"] = self.kl_coefficient * self._share(weighted, at, update.sizes)
            if signals.old is None and done < 1.0 / algo.ppo_epochs:
                self.run.record_mean("kl/reference", kl)
        return parts

    def _update_critic(self, critic: TrainEngine, update: Update, targets: CriticTargets) -> None:
        rate = self.run.learning_rate(self.settings.learner.critic_learning_rate, 0)
        with self.clock.phase("critic"):
            for number, micro in enumerate(self.run.on_device(update), 1):
                at = micro.actions
                result = value_loss(critic(micro), targets.values[at], targets.returns[at], self.settings.learner.value_clip)
                loss = self._share(result.per_token, at, update.sizes)
                self.run.record_shares({"loss/value": loss}, update)
                critic.accumulate(loss, last=number == len(update.micros))
                self.stats.merge(result.stats)
            norm = critic.update(rate)
        self.run.record_update("critic/", rate, norm)

    def _share(self, per_token: Tensor, at: Tensor, sizes: Denominators) -> Tensor:
        return aggregate(per_token, episode_length=self.episode_length[at], mode=self.algo.loss_aggregation, denominators=sizes)

    def _describe(self, signals: UpdateTargets) -> None:
        """Record the metrics of the whole batch; only rank 0 records them."""
        if not self.ranks.first:
            return
        self.stats.merge(describe_batch(self.batch, self.step))
        low, high = self.algorithm.estimator_options.bounds
        self.run.record_mean("reward/clipped", ((self.batch.rewards < low) | (self.batch.rewards > high)).to(torch.float32))
        self.run.record_mean("advantage/mean", signals.advantages)
        self.run.record_mean("advantage/abs", signals.advantages.abs())
        if self.models.reference is not None:
            self.stats.mean("kl/coefficient", self.kl_coefficient, 1.0)
        if self.algo.entropy_target is not None:
            self.stats.mean("entropy/coefficient", self.entropy_coefficient, 1.0)

    def _begin_audit(self, updates: Sequence[Update], signals: UpdateTargets) -> None:
        every = self.settings.audit_every
        if self.frozen or not every or self.step % every:
            return
        policy: Any = self.models.policy.module
        with self.clock.phase("audit"):
            self.audit = begin_audit(self.host, updates[0].micros, signals.advantages, policy, self.step, self.settings, self.ranks)

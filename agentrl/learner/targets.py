"""Parts of a training step: an update as a rank sees it, and what is known before the first one."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from agentrl.algo.losses import Denominators
from agentrl.algo.off_policy import OffPolicyOptions, off_policy_options
from agentrl.learner.layout import MicroBatch
from agentrl.learner.settings import LearnerSettings


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Update:
    """One optimizer update as this rank sees it."""

    number: int  # place among the updates of an epoch
    micros: tuple[MicroBatch, ...]  # this rank's micro-batches, on the CPU
    sizes: Denominators  # denominators over all ranks


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CriticTargets:
    """Targets of the critic."""

    values: Tensor  # [A]: its values when the batch was taken
    returns: Tensor  # [A]: what they should have been


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UpdateTargets:
    """Values from before the first update that the losses use, for the whole batch."""

    advantages: Tensor  # [A]
    old: Tensor | None = None  # [A]: log-probabilities under the weights at that time; `None`: those of the update's own forward pass
    weights: Tensor | None = None  # [A]: off-policy weights; `None` together with `old`
    reference: Tensor | None = None  # [A]: log-probabilities under the reference policy
    critic: CriticTargets | None = None  # present for estimators that use a critic
    chosen: Tensor | None = None  # [updates, experts]: how often each expert was chosen in each update, for a load-balancing loss
    selected: Tensor | None = None  # [A] bool: tokens that the loss treats in another way
    trained: Tensor | None = None  # [A] bool: tokens of high entropy, the only ones that the policy is trained on; `None`: all


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OldScores:
    """Scores of the policy from before the first update, as far as they are needed."""

    old: Tensor | None = None  # as in `UpdateTargets`
    chosen: Tensor | None = None  # as in `UpdateTargets`
    entropies: Tensor | None = None  # [A]: entropies of the policy


def correction_options(settings: LearnerSettings) -> OffPolicyOptions:
    """The off-policy preset with what was set explicitly in its place."""
    algo = settings.algo
    return off_policy_options(
        algo.off_policy,
        level=algo.off_policy_level,
        mode=algo.off_policy_mode,
        bounds=algo.off_policy_range,
        opsm_delta=algo.opsm_delta,
        m2po_tau=algo.m2po_tau,
    )

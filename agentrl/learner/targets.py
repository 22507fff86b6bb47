"""Parts of a training step: its algorithm, an update as a rank sees it, and what is known before the first one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from agentrl.algo.advantages import AdvantageOptions, Estimator
from agentrl.algo.corrections import find_correction
from agentrl.algo.estimators import find_estimator
from agentrl.algo.facts import facts_of
from agentrl.algo.losses import find_loss
from agentrl.algo.objectives import find_objective
from agentrl.algo.off_policy import OffPolicyCorrection
from agentrl.algo.options import option_names
from agentrl.algo.plan import AlgoConfig, options_of
from agentrl.algo.row_losses import ObjectiveFunction
from agentrl.algo.token_losses import Denominators, PolicyLoss
from agentrl.learner.batch import Batch
from agentrl.learner.layout import MicroBatch
from agentrl.learner.settings import ObjectiveSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """The functions that make a loss of rewards, each with its options."""

    estimator: Estimator  # advantage estimator
    estimator_options: AdvantageOptions
    loss: PolicyLoss  # policy loss
    loss_options: Any
    correction: OffPolicyCorrection  # off-policy correction
    correction_options: Any


def load_algorithm(algo: AlgoConfig) -> Algorithm:
    """Import the algorithm, once, so that a user's file may change while the run goes on.

    Raises:
        ConfigError: If a user's estimator, loss or correction cannot be used.
    """
    estimator, loss, correction = find_estimator(algo.advantage_estimator), find_loss(algo.policy_loss), find_correction(algo.off_policy)
    return Algorithm(
        estimator=estimator,
        estimator_options=options_of(algo, estimator),
        loss=loss,
        loss_options=options_of(algo, loss),
        correction=correction,
        correction_options=options_of(algo, correction),
    )


def load_objective(settings: ObjectiveSettings) -> tuple[ObjectiveFunction, Any]:
    """Import the objective of given rows, once; return it with its options.

    Raises:
        ConfigError: If a user's own cannot be used.
    """
    function, options = find_objective(settings.name), settings.options
    if isinstance(options, Mapping):
        kind = facts_of(function).options
        options = kind(**{name: options[name] for name in option_names(kind)})
    return function, options


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Update:
    """One optimizer update as this rank sees it."""

    number: int  # place among the updates of an epoch
    micros: tuple[MicroBatch, ...]  # this rank's micro-batches, on the CPU
    sizes: Any  # denominators over all ranks, as the objective has them


def denominators(batch: Batch, rows: Sequence[int], max_new_tokens: int) -> Denominators:
    """Return the denominators of an update on some rows of a batch; `max_new_tokens` is the longest answer that is allowed."""
    episodes, tokens = torch.unique(batch.row_episode[rows]), batch.row_actions[rows].sum()
    return Denominators(tokens=float(tokens), episodes=float(len(episodes)), constant=float(max_new_tokens))


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

"""The methods: what each one is called, takes, trains and reports. Everything that differs between them by a name stands in this table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from agentrl.config import tune as settings
from agentrl.config.tune import TuneConfig

REWARDS = ("margin", "reward/chosen", "reward/rejected")
LOGPROBS = ("logprob/chosen", "logprob/rejected")
COMMON = ("loss", "grad_norm", "learning_rate")
"""Metrics of every method; those of an evaluation follow ``eval/``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One way to train.

    Attributes:
        command: Name of the command.
        title: What it does, for the list of commands.
        config: Its settings.
        form: Form of its rows, a key of `agentrl.tune.forms.PARSERS`.
        metrics: Metrics of its own, which an evaluation has too.
        shown: Metrics of the display, beside the loss.
        learning_rates: Default for models below 5e7, below 5e8 and above 5e8 parameters.
        task: Task of the adapter, as peft names it.
        reference: Paper or source of the method.
    """

    command: str
    title: str
    config: type[TuneConfig]
    form: str
    metrics: tuple[str, ...]
    shown: tuple[str, ...]
    learning_rates: tuple[float, float, float]
    task: str = "CAUSAL_LM"
    reference: str = ""


METHODS: Mapping[str, Method] = MappingProxyType(
    {
        method.command: method
        for method in (
            Method(
                command="sft",
                title="train a model on chats, prompts with completions, or texts",
                config=settings.SftConfig,
                form="dialogue",
                metrics=("token_accuracy", "entropy"),
                shown=("token_accuracy",),
                learning_rates=(1e-3, 5e-5, 1e-5),
                reference="Ouyang et al., arXiv:2203.02155",
            ),
            Method(
                command="reward-model",
                title="train a reward model on pairs of answers",
                config=settings.RewardModelConfig,
                form="pairs",
                metrics=("accuracy", "margin", "reward/mean"),
                shown=("accuracy", "margin"),
                learning_rates=(5e-4, 2e-5, 1e-5),
                task="SEQ_CLS",
                reference="Bradley and Terry, Biometrika 39, 1952; margin: arXiv:2307.09288; centring: arXiv:2312.09244",
            ),
            Method(
                command="process-reward-model",
                title="train a process reward model on answers whose steps are labelled",
                config=settings.ProcessRewardModelConfig,
                form="steps",
                metrics=("accuracy", "label/mean"),
                shown=("accuracy",),
                learning_rates=(5e-4, 2e-5, 1e-5),
                task="TOKEN_CLS",
                reference="Lightman et al., arXiv:2305.20050; Uesato et al., arXiv:2211.14275",
            ),
            Method(
                command="dpo",
                title="train a model on pairs of answers, against a reference model",
                config=settings.DpoConfig,
                form="pairs",
                metrics=("accuracy", *REWARDS, *LOGPROBS),
                shown=("accuracy", "margin"),
                learning_rates=(3e-4, 2e-6, 5e-7),
                reference="Rafailov et al., arXiv:2305.18290",
            ),
            Method(
                command="kto",
                title="train a model on answers that are desirable or not",
                config=settings.KtoConfig,
                form="labelled",
                metrics=(*REWARDS, *LOGPROBS, "kl"),
                shown=("margin", "kl"),
                learning_rates=(3e-4, 2e-6, 5e-7),
                reference="Ethayarajh et al., arXiv:2402.01306",
            ),
            Method(
                command="orpo",
                title="train a model on pairs of answers, without a reference model",
                config=settings.OrpoConfig,
                form="pairs",
                metrics=("accuracy", *REWARDS, "nll", "log_odds"),
                shown=("accuracy", "margin"),
                learning_rates=(5e-4, 2e-5, 8e-6),
                reference="Hong et al., arXiv:2403.07691",
            ),
            Method(
                command="distill",
                title="train a model to predict as a teacher does, on given data",
                config=settings.DistillConfig,
                form="dialogue",
                metrics=("kl", "agreement"),
                shown=("kl", "agreement"),
                learning_rates=(1e-3, 5e-5, 1e-5),
                reference="Agarwal et al., arXiv:2306.13649",
            ),
        )
    }
)

LOWER_IS_BETTER = frozenset({"loss", "kl", "nll", "entropy"})
"""Metrics that fall as a model gets better; the others rise."""

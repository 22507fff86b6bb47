"""Settings of the algorithm; see `agentrl.config.schema`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

from agentrl.core.errors import ConfigError
from agentrl.core.settings import Alias, Count, CountOrZero, Fraction, NonNegative, Positive, UserFile


@dataclass(frozen=True, kw_only=True)
class AlgoConfig:
    """The algorithm."""

    advantage_estimator: Annotated[str, UserFile] = "group_norm"
    """Advantage estimator: ``group_norm`` (or ``grpo``), ``dr_grpo``, ``rloo``, ``reinforce``, ``reinforce_baseline``, ``gae``, ``opo``,
    ``remax``, ``batch_std``, ``pass_at_k``, ``gdpo``, ``turn_norm``, ``turn_gae``, ``distillation``, or ``file.py:name``."""
    gamma: Fraction = 1.0
    """Discount per action token, or per turn for ``turn_gae`` and ``turn_norm``; estimators without a discount take 1."""
    gae_lambda: Fraction = 1.0
    """Lambda of ``gae``: 1 has no bias from the critic, lower has less variance."""
    advantage_std_norm: bool = True
    """Divide by the standard deviation where the estimator whitens or normalises."""
    pass_at_k: Annotated[int, Ge(2)] | None = None
    """Attempts of which the best one counts, for the estimator of that name. Default: all of the group."""
    gdpo_weights: tuple[str, ...] = ()
    """Components of the reward that ``gdpo`` adds up, with their weights: ``correct=1 format=0.5``. Default: all, with weight 1."""
    teacher: str = ""
    """Hugging Face directory or hub name of a model with the same tokenizer, which scores the sampled tokens: its log-probability less
    that of the policy is added to the advantage of each token (on-policy distillation)."""
    teacher_coef: Positive = 1.0
    """Weight of what ``--teacher`` adds to the advantages."""
    mask_truncated: bool = False
    """Train nothing on episodes that a budget or the environment cut short (DAPO's overlong filtering)."""
    truncated_in_baseline: bool = True
    """With ``--mask-truncated``: their rewards still count in the baseline of their group; off: they are left out of it."""
    reward_clip_range: tuple[float, float] = (-10.0, 10.0)
    """Rewards are clipped to this range before any baseline."""
    policy_loss: Annotated[str, UserFile] = "ppo"
    """Policy objective: ``ppo``, ``gspo``, ``cispo``, ``reinforce``, ``dppo_tv``, ``dppo_kl``, ``ipo``, ``sapo``, ``gmpo``, ``clip_cov``,
    ``kl_cov``, or a function of your own, ``file.py:name``."""
    eps_clip_low: Annotated[Positive | None, Alias("--epsilon", "--eps-clip")] = None
    """The ratio is clipped below at 1 - this; for other losses than ``ppo``, their lower bound. Default: the loss's, 0.2 for ``ppo``."""
    eps_clip_high: Annotated[Positive | None, Alias("--epsilon", "--epsilon-high", "--eps-clip")] = None
    """The ratio is clipped above at 1 + this; larger than ``--eps-clip-low`` is clip-higher (DAPO). Default: the loss's, as above."""
    dual_clip: Annotated[float, Gt(1)] | None = None
    """For a negative advantage A, the objective of ``ppo`` is at least this times A; typically 3."""
    ipo_kl_coef: NonNegative = 0.0
    """Weight of the squared log ratio in ``ipo``; prime-rl used 1e-3 in earlier versions."""
    sapo_tau_positive: Positive = 1.0
    """Speed at which the gradient of ``sapo`` fades as the ratio leaves 1, for a positive advantage."""
    sapo_tau_negative: Positive = 1.05
    """The same for a negative advantage."""
    cov_share: Annotated[float, Gt(0), Le(1)] = 2e-4
    """Share of the tokens that ``clip_cov`` and ``kl_cov`` hold back, at least one token."""
    clip_cov_range: tuple[float, float] = (1.0, 5.0)
    """Covariances of log-probability and advantage between which ``clip_cov`` draws its tokens."""
    kl_cov_coef: NonNegative = 1.0
    """Weight of the absolute log ratio of the tokens that ``kl_cov`` holds back."""
    top_entropy_share: Annotated[float, Gt(0), Le(1)] = 1.0
    """Share of the tokens, those with the highest entropy, that the policy is trained on; 0.2 is usual, 1 trains on all."""
    ppo_epochs: Annotated[Count, Alias("--num-iterations", "--max-epochs")] = 1
    """Passes over each step's batch."""
    mini_batches: Count = 1
    """Optimizer updates per pass; groups are spread over them evenly by tokens."""
    entropy_coef: Annotated[NonNegative, Alias("--entropy-loss-coef")] = 0.0
    """Weight of the entropy bonus; with ``--entropy-target`` the one to begin with."""
    entropy_target: Positive | None = None
    """Entropy per token, in nats, below which the policy should not fall, by adapting the bonus; unset keeps the weight fixed."""
    entropy_coef_step: Positive = 0.005
    """With ``--entropy-target``: how much the weight of the bonus changes from a step to the next."""
    aux_loss_coef: NonNegative = 0.0
    """Weight of the load-balancing loss of a mixture-of-experts model."""
    router_replay: bool = False
    """Train a mixture-of-experts model on the experts that the engine chose for each token (R3), where the learner's rounding or its newer
    weights might choose others."""
    loss_aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant"] = "token-mean"
    """Aggregation of token losses into one number; denominators are global over micro-batches and ranks."""
    init_kl_coef: Annotated[NonNegative, Alias("--beta")] = 0.0
    """Weight of the KL penalty against the initial policy; 0 loads no reference model."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """Estimator of the KL divergence."""
    use_kl_loss: bool = False
    """Put the KL penalty into the loss instead of the reward."""
    kl_bias_correction: bool = False
    """Multiply each token's KL penalty in the loss by the ratio of the policy loss, so that its gradient is unbiased off-policy too."""
    kl_target: Positive | None = None
    """KL divergence per token to hold by adapting the coefficient; unset keeps the coefficient fixed."""
    kl_horizon: Positive = 10_000.0
    """Episodes over which an error of 20 % or more changes an adaptive KL coefficient by 20 %."""
    ref_reset_every: CountOrZero = 0
    """Steps after which the reference model becomes the current policy, again and again; 0: never."""
    off_policy: Annotated[
        Literal["tis", "seq-tis", "icepop", "seq-mask-tis", "decoupled", "opsm", "m2po", "none"], Alias("--vllm-is-correction-type")
    ] = "tis"
    """Correction for tokens sampled by older weights; a preset that the flags below may change."""
    off_policy_level: Literal["token", "seq", "geo"] | None = None
    """Unit of an importance ratio: a token, or a sequence by product or geometric mean. Default: the preset's."""
    off_policy_mode: Literal["none", "truncate", "clip", "mask"] | None = None
    """Treatment of ratios outside ``--off-policy-range``. Default: the preset's."""
    off_policy_range: tuple[float, float] | None = None
    """Bounds of the importance ratio. Default: the preset's."""
    opsm_delta: NonNegative | None = None
    """Drop a sequence with a negative advantage whose log-probability fell by more than this on average. Default: the preset's."""
    m2po_tau: Positive | None = None
    """Drop the most extreme tokens until the mean squared log ratio is below this. Default: the preset's."""
    reuse_behaviour_logprobs: bool = False
    """Take the recorded log-probabilities as those of the weights before the update, instead of computing them again."""
    interpolate_old_logprobs: bool = False
    """With several updates per batch: estimate the log-probabilities of the weights before the first from the recorded and the present
    ones, by version, instead of a forward pass of their own (AReaL)."""
    allow_uncorrected: bool = False
    """Allow ``--off-policy none`` in an asynchronous run."""


def has_ratios(algo: AlgoConfig) -> bool:
    """Return True if recorded log-probabilities enter the loss, as those of the distribution that the learner computes."""
    return algo.off_policy != "none" or algo.reuse_behaviour_logprobs


def named_weights(given: Sequence[str]) -> dict[str, float]:
    """Return the weights of ``--gdpo-weights`` by name.

    Raises:
        ConfigError: If one is not of the form ``name=number``, or a name stands twice.
    """
    weights: dict[str, float] = {}
    for text in given:
        name, _, number = text.rpartition("=")
        try:
            weight = float(number)
        except ValueError:
            weight = math.nan
        if not name or name in weights or not math.isfinite(weight):
            raise ConfigError("--gdpo-weights", text, "is not a name of its own with a number", "Write for example correct=1 format=0.5.")
        weights[name] = weight
    return weights

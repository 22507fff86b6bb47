"""Settings of the algorithm, and the options of its estimator, its loss and its correction."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Annotated, Any, Literal

from agentrl.algo import facts
from agentrl.algo.corrections import CORRECTIONS
from agentrl.algo.estimators import ESTIMATORS
from agentrl.algo.facts import Kind, facts_of
from agentrl.algo.flat import never_flat
from agentrl.algo.losses import POLICY_LOSSES
from agentrl.algo.options import option_names
from agentrl.core.errors import ConfigError
from agentrl.core.settings import Alias, Count, CountOrZero, NonNegative, Positive, ResumeMayChange, Share, UserFile, flag
from agentrl.core.summaries import GroupSummary


@dataclass(frozen=True, kw_only=True)
class AlgoSettings:
    """The algorithm."""

    advantage_estimator: Annotated[str, UserFile] = "group_norm"
    """Advantage estimator. One of ``group_norm`` (or ``grpo``), ``dr_grpo``, ``rloo``, ``reinforce``, ``reinforce_baseline``, ``gae``,
    ``opo``, ``remax``, ``batch_std``, ``pass_at_k``, ``gdpo``, ``turn_norm``, ``gigpo``, ``turn_gae``, ``distillation``, or
    ``file.py:name``."""
    teacher: Annotated[str, ResumeMayChange] = ""
    """A model with the same tokenizer, which scores the sampled tokens (on-policy distillation). A directory or hub name: it runs on each
    learner rank. ``engine:MODEL``: beside each rollout worker. ``http://HOST:PORT/v1#model=NAME``: a server of vLLM. Several of the last
    two by task: ``NAME=FORM,NAME=FORM``. ``self``: the policy itself, which reads the prompt as ``--teacher-template`` puts it."""
    teacher_template: Annotated[str, ResumeMayChange] = ""
    """File with the prompt that ``--teacher self`` reads: a text with the places ``{prompt}``, ``{label}`` and ``{KEY}`` for entries of a
    task's metadata, as a reference solution."""
    teacher_coef: Positive = 1.0
    """Weight of what ``--teacher`` adds to the advantages, or to the loss."""
    teacher_loss: Literal["sampled", "forward", "reverse"] = "sampled"
    """``sampled``: the teacher's log-probability of each sampled token less that of the policy is added to its advantage. ``forward`` and
    ``reverse``: that KL divergence over the ``--teacher-top-k`` tokens and the rest is added to the loss."""
    teacher_top_k: Count = 20
    """Most likely tokens of the teacher that ``--teacher-loss forward`` and ``reverse`` compare; servers of vLLM give 20 by default."""
    teacher_by: str = ""
    """Key of a task's metadata that names its teacher, if there are several. Empty: ``teacher``, else ``kind``, else ``source``."""
    sft_data: str = ""
    """Demonstrations that are imitated in each step beside its episodes: what ``agentrl sft --data`` takes, and behind ``#`` settings of
    ``agentrl sft`` for its rows, and ``batch_size``, the demonstrations of a step: ``chats.jsonl#batch_size=16&train_on=last``."""
    sft_coef: Annotated[NonNegative, Alias("--ptx-coef")] = 0.05
    """Weight in the loss of the mean negative log-likelihood of the trained tokens of ``--sft-data``; 0 only reports it."""
    mask_truncated: Annotated[bool, Alias("--mask-truncated-completions")] = False
    """Train nothing on episodes that a budget or the environment cut short (DAPO's overlong filtering)."""
    truncated_in_baseline: bool = True
    """With ``--mask-truncated``: their rewards still count in the baseline of their group; off: they are left out of it."""
    policy_loss: Annotated[str, UserFile] = "ppo"
    """Policy objective: ``ppo``, ``gspo``, ``cispo``, ``reinforce``, ``dppo_tv``, ``dppo_kl``, ``ipo``, ``sapo``, ``gmpo``, ``clip_cov``,
    ``kl_cov``, or a function of your own, ``file.py:name``."""
    top_entropy_share: Share = 1.0
    """Share of the tokens, those with the highest entropy, that the policy is trained on; 0.2 is usual, 1 trains on all."""
    ppo_epochs: Annotated[Count, Alias("--num-iterations", "--max-epochs")] = 1
    """Passes over each step's batch."""
    mini_batches: Count = 1
    """Optimizer updates per pass; groups are spread over them evenly by tokens."""
    entropy_coef: Annotated[NonNegative, Alias("--entropy-loss-coef")] = 0.0
    """Weight of the entropy bonus; with ``--entropy-target`` the one to begin with."""
    entropy_target: Positive | None = None
    """Entropy per token, in nats, below which the policy should not fall, by adapting the bonus; unset keeps the weight fixed."""
    aux_loss_coef: NonNegative = 0.0
    """Weight of the load-balancing loss of a mixture-of-experts model."""
    router_replay: bool = False
    """Train a mixture-of-experts model on the experts that the engine chose for each token (R3), where the learner's rounding or its newer
    weights might choose others."""
    loss_aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant"] = "token-mean"
    """Aggregation of token losses into one number; denominators are global over micro-batches and ranks."""
    init_kl_coef: Annotated[NonNegative, Alias("--beta", sets={"use_kl_loss": "true", "kl_estimator": "k3"})] = 0.0
    """Weight of the KL penalty against the initial policy; 0 loads no reference model."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """Estimator of the KL divergence."""
    use_kl_loss: bool = False
    """Put the KL penalty into the loss instead of the reward."""
    kl_bias_correction: bool = False
    """Multiply each token's KL penalty in the loss by the ratio of the policy loss, so that its gradient is unbiased off-policy too."""
    kl_target: Positive | None = None
    """KL divergence per token to hold by adapting the coefficient; unset keeps the coefficient fixed."""
    ref_reset_every: CountOrZero = 0
    """Steps after which the reference model becomes the current policy, again and again; 0: never."""
    off_policy: Annotated[str, Alias("--vllm-is-correction-type", sets={"off_policy_range": "0.5 5"}), UserFile] = "tis"
    """Correction for tokens sampled by older weights: ``tis``, ``seq-tis``, ``icepop``, ``seq-mask-tis``, ``decoupled``, ``opsm``,
    ``m2po``, ``none``, each a preset that its options may change, or a function of your own, ``file.py:name``."""
    old_logprobs: Literal["recomputed", "behaviour", "interpolated"] = "recomputed"
    """Log-probabilities of the weights before the first update of a batch: ``recomputed`` by a forward pass; ``behaviour``, as the engine
    recorded them; or, with several updates per batch, ``interpolated`` between the recorded and the present ones, by version (AReaL)."""
    allow_uncorrected: bool = False
    """Allow ``--off-policy none`` in an asynchronous run."""


@dataclass(frozen=True, kw_only=True)
class AlgoConfig(AlgoSettings):
    """The algorithm, with the options of its estimator, its loss and its correction.

    Attributes:
        options: Options by name, checked when they were loaded; one that is not there has its default.
    """

    options: Mapping[str, Any] = field(default_factory=dict)

    def with_options(self, **values: Any) -> AlgoConfig:
        """Return the algorithm with options in the place of its own, unchecked.

        Raises:
            TypeError: If no built-in algorithm and none of those that are chosen has an option of that name.
        """
        chosen = (name for function in chosen_functions(vars(self)).values() for name in option_names(facts_of(function).options))
        if unknown := values.keys() - set(chosen) - built_in_options().keys():
            raise TypeError(f"no algorithm has an option named {', '.join(sorted(unknown))}")
        return replace(self, options={**self.options, **values})


@dataclass(frozen=True, slots=True)
class AlgorithmKind:
    """One of the parts of an algorithm that has options: its section, and the setting that chooses it."""

    section: str
    setting: str
    kind: Kind
    built_in: Mapping[str, Callable[..., Any]]


KINDS = (
    AlgorithmKind("estimator", "advantage_estimator", facts.ESTIMATOR, ESTIMATORS),
    AlgorithmKind("loss", "policy_loss", facts.LOSS, POLICY_LOSSES),
    AlgorithmKind("correction", "off_policy", facts.CORRECTION, CORRECTIONS),
)


def chosen_functions(given: Mapping[str, Any]) -> dict[str, Callable[..., Any]]:
    """Return the estimator, the loss and the correction that settings choose, by section.

    Args:
        given: Values of settings by name; one that is not there has its default.

    Raises:
        ConfigError: If there is none of that name, or a user's own cannot be used.
    """
    return {
        part.section: facts.find(part.kind, str(given.get(part.setting, getattr(AlgoSettings, part.setting))), part.built_in)
        for part in KINDS
    }


def options_of(algo: AlgoConfig, function: Callable[..., Any]) -> Any:
    """Return the options of an estimator, a loss or a correction: its defaults, and in their place those that were given."""
    kind = facts_of(function).options
    return kind(**{name: algo.options[name] for name in option_names(kind) if name in algo.options})


def flatness(algo: AlgoConfig) -> Callable[[GroupSummary], bool]:
    """Return the function that says of which groups, with the members of one agent, estimator and teacher learn nothing.

    The penalty for the divergence from the reference and the entropy bonus, which know nothing of rewards, do not count.
    """
    estimator = facts.find(facts.ESTIMATOR, algo.advantage_estimator, ESTIMATORS)
    options, flat = options_of(algo, estimator), never_flat if algo.teacher else facts_of(estimator).is_flat

    def checked(group: GroupSummary) -> bool:
        with facts.calls(facts.ESTIMATOR, flat):
            return bool(flat(group, options))

    return checked


def bootstraps(algo: AlgoConfig) -> bool:
    """Return True if a value of the critic stands for what episodes that were cut short did not come to earn."""
    estimator = facts.find(facts.ESTIMATOR, algo.advantage_estimator, ESTIMATORS)
    return facts_of(estimator).bootstraps and bool(options_of(algo, estimator).bootstrap_truncated)


def is_default(name: str, value: Any) -> bool:
    """Return True for an option of a built-in algorithm at a default, or unset, also as JSON has it."""
    part, others = built_in_options().get(name, (None, ()))
    value = tuple(value) if isinstance(value, list) else value
    return part is not None and (value is None or any(value == getattr(facts_of(part.built_in[other]).options(), name) for other in others))


@cache
def built_in_options() -> Mapping[str, tuple[AlgorithmKind, tuple[str, ...]]]:
    """Return the options of the built-in algorithms by name: the kind of the algorithm, and the names of those that have it."""
    found: dict[str, tuple[AlgorithmKind, tuple[str, ...]]] = {}
    for part in KINDS:
        for name, function in part.built_in.items():
            for option in option_names(facts_of(function).options):
                found[option] = (part, (*found.get(option, (part, ()))[1], name))
    return found


def foreign_option(name: str, value: Any, given: Mapping[str, Any]) -> ConfigError:
    """Return the error for an option of a built-in algorithm that is not chosen.

    Args:
        name: The option, which none of the chosen algorithms has.
        value: Its value, also as JSON has it.
        given: Values of the settings that choose the algorithms.

    Raises:
        KeyError: If no built-in algorithm has it.
    """
    part, others = built_in_options()[name]
    chosen = given.get(part.setting, getattr(AlgoSettings, part.setting))
    remedy = f"Leave it out, or use {part.kind.flag} {' or '.join(others if len(others) < 3 else others[:1])}."
    return ConfigError(flag(name), value, f"has no effect on {part.kind.flag} {chosen}", remedy)


def has_ratios(algo: AlgoSettings) -> bool:
    """Return True if recorded log-probabilities enter the loss, as those of the distribution that the learner computes."""
    return algo.off_policy != "none" or algo.old_logprobs == "behaviour"

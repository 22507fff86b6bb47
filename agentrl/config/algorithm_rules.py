"""Rules about the algorithm: its parts fit together, to each other and to the groups that are sampled.

The facts of estimators, losses, corrections and filters stand beside their functions; a user's own file is imported here, before anything
heavy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from agentrl.algo.corrections import correction_facts, find_correction, needs_whole_batch
from agentrl.algo.estimators import estimator_facts, find_estimator
from agentrl.algo.filters import filter_facts
from agentrl.algo.flat import never_flat
from agentrl.algo.group_rewards import group_reward_facts
from agentrl.algo.losses import loss_facts
from agentrl.algo.plan import AlgoConfig, has_ratios, options_of
from agentrl.algo.teacher_specs import SELF, served_teachers
from agentrl.config.engine_rules import may_have_gpus
from agentrl.config.schema import TrainConfig
from agentrl.core.errors import ConfigError
from agentrl.core.model_shape import read_shape
from agentrl.core.settings import flag as flag_of
from agentrl.core.settings import refuse_set
from agentrl.flow.plan import TASK_RULES, FlowConfig, is_task_rule
from agentrl.rollout.plan import PenaltyConfig
from agentrl.rollout.template_files import check_hint_template


def _groups_can_be_compared(config: TrainConfig) -> None:
    n, flow, estimator = config.sampling.n_samples_per_prompt, config.flow, config.algo.advantage_estimator
    if n >= 2:
        return
    if estimator_facts(estimator).compares_group:
        problem = f"the estimator {estimator!r} compares the members of a group and needs at least 2"
        raise ConfigError("--n-samples-per-prompt", n, problem, "Raise it, or choose --advantage-estimator reinforce.")
    if flow.group_filter and filter_facts(flow.group_filter).compares_group:
        problem = "compares the members of a group and needs at least 2"
        raise ConfigError("--group-filter", flow.group_filter, problem, "Use --n-samples-per-prompt 2 or more.")
    if flow.group_reward and group_reward_facts(flow.group_reward).compares_group:
        problem = "compares the episodes of a group and needs at least 2"
        raise ConfigError("--group-reward", flow.group_reward, problem, "Use --n-samples-per-prompt 2 or more.")


def _estimator_fits_the_rewards(config: TrainConfig) -> None:
    algo, n = config.algo, config.sampling.n_samples_per_prompt
    options = options_of(algo, find_estimator(algo.advantage_estimator))
    if (k := getattr(options, "pass_at_k", None)) is not None and k > n:
        raise ConfigError("--pass-at-k", k, f"exceeds --n-samples-per-prompt {n}", f"Use at most {n}.")
    if hasattr(options, "gdpo_weights"):
        problem = f"changes the reward, and --advantage-estimator {algo.advantage_estimator} reads its components"
        penalties = ("overlong_buffer", "stop_properly_penalty")
        refuse_set(config.penalty, penalties, problem, "Leave it out, or return the penalty as a component.")


def _the_greedy_episode_is_played(config: TrainConfig) -> None:
    name, limit, n = config.algo.advantage_estimator, config.rollout.max_concurrent_episodes, config.sampling.n_samples_per_prompt
    if not estimator_facts(name).greedy_baseline:
        return
    if config.flow.group_quorum < 1.0:
        problem = f"may leave out the greedy episode that --advantage-estimator {name} compares with"
        raise ConfigError("--group-quorum", config.flow.group_quorum, problem, "Leave out one of the two.")
    if limit == n:
        problem = f"has no room for a group of {n} and its greedy episode, which begin together"
        raise ConfigError("--max-concurrent-episodes", limit, problem, f"Use at least {n + 1}, or 0.")


def _kl_penalty_has_a_place(config: TrainConfig) -> None:
    algo = config.algo
    if algo.init_kl_coef:
        if not algo.use_kl_loss and not estimator_facts(algo.advantage_estimator).charges_kl:
            problem = f"has no effect on rewards with the estimator {algo.advantage_estimator!r}, which does not subtract inputs.kl"
            remedy = "Add --use-kl-loss, or subtract it and state charges_kl=True."
            raise ConfigError("--init-kl-coef", algo.init_kl_coef, problem, remedy)
        return
    for flag, value in (
        ("--use-kl-loss", algo.use_kl_loss),
        ("--kl-bias-correction", algo.kl_bias_correction),
        ("--kl-target", algo.kl_target),
        ("--ref-reset-every", algo.ref_reset_every),
    ):
        if value:
            raise ConfigError(flag, value, "has no effect without a KL penalty", "Give a coefficient too, for example --init-kl-coef 0.01.")


def _a_teacher_can_be_heard(config: TrainConfig) -> None:
    algo, name, defaults = config.algo, config.algo.advantage_estimator, AlgoConfig()
    if not algo.teacher:
        if estimator_facts(name).needs_teacher:
            raise ConfigError("--advantage-estimator", name, "learns from a teacher alone", "Give one with --teacher MODEL.")
        for option in ("teacher_coef", "teacher_loss", "teacher_top_k", "teacher_by", "teacher_template"):
            if (value := getattr(algo, option)) != getattr(defaults, option):
                raise ConfigError(flag_of(option), value, "has no effect without a teacher", "Give one with --teacher MODEL.")
        return
    if algo.teacher_loss == "sampled" and algo.old_logprobs == "interpolated":
        problem = "comes too late: the teacher is compared with the policy before the first update"
        raise ConfigError("--old-logprobs", "interpolated", problem, "Leave out one of the two.")
    if algo.teacher_loss == "sampled" and algo.teacher_top_k != defaults.teacher_top_k:
        raise ConfigError("--teacher-top-k", algo.teacher_top_k, "has no effect on sampled tokens", "Add --teacher-loss forward.")
    (_a_served_teacher_fits_the_run if served_teachers(algo.teacher) else _a_teacher_fits_the_learner)(config)


def _a_teacher_fits_the_learner(config: TrainConfig) -> None:
    algo = config.algo
    if (algo.teacher == SELF) != bool(algo.teacher_template):
        problem = "has nothing to read that the policy does not" if algo.teacher == SELF else "takes no --teacher-template"
        raise ConfigError("--teacher", algo.teacher, problem, "Give --teacher self --teacher-template FILE, or neither.")
    if algo.teacher == SELF:
        check_hint_template(algo.teacher_template)


def _a_served_teacher_fits_the_run(config: TrainConfig) -> None:
    if config.algo.teacher_template:
        raise ConfigError("--teacher-template", config.algo.teacher_template, "is for --teacher self", "Leave it out.")
    if config.sampling.temperature != 1.0:
        problem = "is not that of a served teacher, whose log-probabilities are at temperature 1"
        raise ConfigError("--temperature", config.sampling.temperature, problem, "Use --temperature 1, or --teacher MODEL.")


def _critic_fits_the_estimator(config: TrainConfig) -> None:
    name, learner = config.algo.advantage_estimator, config.learner
    if not estimator_facts(name).needs_critic:
        if learner.critic_warmup_steps:
            problem = f"the estimator {name!r} has no critic"
            raise ConfigError("--critic-warmup-steps", learner.critic_warmup_steps, problem, "Use --advantage-estimator gae.")
    elif not learner.critic_learning_rate:
        problem = f"the estimator {name!r} needs a critic that learns"
        remedy = "Give a rate such as 1e-3, or use --advantage-estimator reinforce, which needs no critic."
        raise ConfigError("--critic-learning-rate", learner.critic_learning_rate, problem, remedy)


def _loss_without_ratio_updates_once(config: TrainConfig) -> None:
    name = config.algo.policy_loss
    if not loss_facts(name).single_update:
        return
    for flag, value in (("--ppo-epochs", config.algo.ppo_epochs), ("--mini-batches", config.algo.mini_batches)):
        if value > 1:
            raise ConfigError(flag, value, f"--policy-loss {name} is right for one update per batch only", "Use 1, or --policy-loss ppo.")
    if config.algo.old_logprobs == "behaviour" and config.flow.staleness:
        problem = f"leaves no ratio at all to correct older tokens with --policy-loss {name}"
        raise ConfigError("--old-logprobs", "behaviour", problem, "Leave it out, or use --policy-loss ppo.")


def _kl_in_the_loss_has_a_gradient(config: TrainConfig) -> None:
    if config.algo.kl_bias_correction and not config.algo.use_kl_loss:
        problem = "weighs the KL penalty in the loss, and this one is in the reward"
        raise ConfigError("--kl-bias-correction", True, problem, "Add --use-kl-loss.")
    if config.algo.use_kl_loss and config.algo.kl_estimator == "k1" and not config.algo.kl_bias_correction:
        problem = "has a gradient of mean 0 in the loss (--use-kl-loss)"
        raise ConfigError("--kl-estimator", "k1", problem, "Use k2 or k3, add --kl-bias-correction, or put the penalty into the reward.")


def _changed_options(algo: AlgoConfig, function: Callable[..., Any]) -> list[tuple[str, Any]]:
    """Flag and value of the options that do not have their defaults."""
    options = options_of(algo, function)
    return [(flag_of(name), value) for name, value in vars(options).items() if value != getattr(type(options)(), name)]


def _corrections_have_a_ratio(config: TrainConfig) -> None:
    """With the recorded log-probabilities as the old ones, the ratio of every correction is 1."""
    algo = config.algo
    if algo.old_logprobs != "behaviour":
        return
    for flag, value in (
        # The default, `tis`, may be there without anybody having asked for it.
        ("--off-policy", None if algo.off_policy in ("tis", "none") else algo.off_policy),
        *_changed_options(algo, find_correction(algo.off_policy)),
    ):
        if value is not None:
            problem = "has nothing to correct with --old-logprobs behaviour, where the clipped ratio of the loss does all of it"
            raise ConfigError(flag, value, problem, "Leave out one of the two.")


def _interpolation_saves_a_pass(config: TrainConfig) -> None:
    algo = config.algo
    if algo.old_logprobs != "interpolated":
        return
    correction = find_correction(algo.off_policy)
    whole = needs_whole_batch(correction, options_of(algo, correction))
    judge = f"--off-policy {algo.off_policy}" if correction_facts(algo.off_policy).whole_batch else "M2PO"
    problems = (
        (algo.ppo_epochs * algo.mini_batches == 1, "saves nothing with one update per batch", "Leave it out, or raise --mini-batches."),
        (algo.init_kl_coef and not algo.use_kl_loss, "comes too late for a KL penalty in the reward", "Add --use-kl-loss."),
        (whole, f"is made per micro-batch, and {judge} judges the whole batch", "Use --off-policy tis."),
        (algo.aux_loss_coef, "saves nothing: --aux-loss-coef needs the same forward pass", "Leave it out."),
        (algo.top_entropy_share < 1.0, "saves nothing: --top-entropy-share needs the same forward pass", "Leave it out."),
        (loss_facts(algo.policy_loss).selects, f"comes too late for --policy-loss {algo.policy_loss}", "Leave it out."),
    )
    for wrong, problem, remedy in problems:
        if wrong:
            raise ConfigError("--old-logprobs", "interpolated", problem, remedy)


def _length_penalties_fit(config: TrainConfig) -> None:
    buffer, factor, budget = config.penalty.overlong_buffer, config.penalty.overlong_penalty, config.rollout.max_new_tokens
    if buffer > budget:
        raise ConfigError("--overlong-buffer", buffer, f"exceeds --max-new-tokens {budget}", f"Use at most {budget}.")
    if not buffer and factor != PenaltyConfig.overlong_penalty:
        raise ConfigError("--overlong-penalty", factor, "has no effect without a buffer", f"Give --overlong-buffer, up to {budget}.")


def _baseline_may_lack_truncated(config: TrainConfig) -> None:
    algo = config.algo
    name = algo.advantage_estimator
    if algo.truncated_in_baseline:
        if algo.mask_truncated and estimator_facts(name).token_baseline:
            problem = f"leaves no token of truncated episodes, of which the baseline of {name!r} is made"
            raise ConfigError("--mask-truncated", True, problem, "Add --no-truncated-in-baseline.")
        return
    problems = (
        (not algo.mask_truncated, "has no effect while truncated episodes are trained", "Add --mask-truncated."),
        (not estimator_facts(name).compares_group, f"has no effect: {name!r} has no baseline of a group", "Leave it out."),
        (config.penalty.stop_properly_penalty is not None, "leaves --stop-properly-penalty without effect", "Leave out one of the two."),
    )
    for wrong, problem, remedy in problems:
        if wrong:
            raise ConfigError("--truncated-in-baseline", False, problem, remedy)


def _filter_flags_have_a_filter(config: TrainConfig) -> None:
    flow, algo = config.flow, config.algo
    own, chosen = flow.group_filter, flow.score_range
    if own and flow.flat_groups == "resample":
        raise ConfigError("--group-filter", own, "takes the place of --flat-groups resample", "Leave out one of the two.")
    if own:
        # The user's file is imported here, so that a mistake in it is answered before anything is started.
        filter_facts(own)
    if chosen is not None and (own or flow.flat_groups == "train"):
        problem = "has no effect with --group-filter" if own else "has no effect while all groups are trained"
        raise ConfigError("--score-range", chosen, problem, "Leave it out." if own else "Add --flat-groups resample or drop.")
    if flow.flat_groups == "train" or own or chosen is not None:
        return
    taught = f"--teacher {algo.teacher}" if algo.teacher else f"--advantage-estimator {algo.advantage_estimator}"
    if algo.teacher or estimator_facts(algo.advantage_estimator).is_flat is never_flat:
        problem = f"has no effect with {taught}, which learns of every group"
        raise ConfigError("--flat-groups", flow.flat_groups, problem, "Leave it out, or choose groups by --score-range 0 1.")


def _group_reward_can_judge(config: TrainConfig) -> None:
    flow = config.flow
    if flow.group_reward:
        group_reward_facts(flow.group_reward)
    if not flow.group_reward and flow.group_reward_weight != FlowConfig.group_reward_weight:
        problem = "has no effect without --group-reward"
        raise ConfigError("--group-reward-weight", flow.group_reward_weight, problem, "Add it, or leave this out.")
    if flow.group_reward and not math.isfinite(flow.group_reward_weight):
        raise ConfigError("--group-reward-weight", flow.group_reward_weight, "is not finite", "Give a number such as 0.5.")


def _task_sampling_fits(config: TrainConfig) -> None:
    data, rule = config.data, config.flow.task_sampling

    if rule == "epochs":
        return
    if not is_task_rule(rule):
        raise ConfigError("--task-sampling", rule, "is no order of drawing tasks", f"Choose of {', '.join(TASK_RULES)}, curriculum:KEY.")
    for name, given in (("--no-shuffle", not data.shuffle), ("--prompt-probs", data.prompt_probs)):
        if given:
            raise ConfigError("--task-sampling", rule, f"does not go with {name}, which sets another order", "Leave out one of the two.")


def _a_quorum_is_most_of_a_group(config: TrainConfig) -> None:
    quorum, n = config.flow.group_quorum, config.sampling.n_samples_per_prompt
    if quorum == 1.0:
        return
    if quorum < 0.5:
        problem = "would judge the rest by less than half of a group"
        raise ConfigError("--group-quorum", quorum, problem, "Use at least 0.5.")
    if math.ceil(quorum * n) >= n:
        problem = f"asks for all {n} episodes of a group"
        raise ConfigError("--group-quorum", quorum, problem, f"Use at most {(n - 1) / n:.3g}, or raise --n-samples-per-prompt.")
    if estimator_facts(config.algo.advantage_estimator).length_neutral:
        problem = f"leaves out what takes long, and --advantage-estimator {config.algo.advantage_estimator} is there to treat lengths alike"
        raise ConfigError("--group-quorum", quorum, problem, "Leave out one of the two.")


def _async_is_corrected(config: TrainConfig) -> None:
    if config.flow.staleness and config.algo.off_policy == "none" and not config.algo.allow_uncorrected:
        problem = "an asynchronous run would train on older weights' tokens without correction"
        raise ConfigError("--off-policy", "none", problem, "Use tis, or say that you mean it with --allow-uncorrected.")


def _sampling_keeps_ratio_unbiased(config: TrainConfig) -> None:
    for flag, value, whole in (("--top-p", config.rollout.top_p, 1), ("--top-k", config.rollout.top_k, 0)):
        if value != whole and has_ratios(config.algo):
            remedy = "Use --top-p 1 and --top-k 0, or --off-policy none without --old-logprobs behaviour."
            raise ConfigError(flag, value, "truncated sampling biases the importance ratio", remedy)


def _mini_batches_have_groups(config: TrainConfig) -> None:
    parts, groups = config.algo.mini_batches, config.flow.groups_per_step
    if parts > groups:
        raise ConfigError("--mini-batches", parts, f"exceeds --groups-per-step {groups}, and groups stay whole", f"Use at most {groups}.")


def _experts_can_be_replayed(config: TrainConfig) -> None:
    if not config.algo.router_replay:
        return
    flag, engine = "--router-replay", config.engine
    shape = read_shape(config.model.model)
    if shape is not None and not shape.experts:
        raise ConfigError(flag, True, "needs a mixture of experts, and the model is none", "Leave it out.")
    if config.learner.compile_layers:
        raise ConfigError(flag, True, "does not go with --compile-layers", "Leave out one of the two.")
    if not engine.facts.reports_experts_on_cpu and not may_have_gpus(config):
        problem = "cannot be had from vLLM on a CPU: it reports experts by a part of its (Model Runner V2) that needs Triton"
        raise ConfigError(flag, True, problem, "Use --engine transformers.")
    if engine.facts.is_distributed and engine.gpus_per_engine > engine.tensor_parallel_size:
        problem = "cannot be had from vLLM with pipeline parallelism"
        raise ConfigError(flag, True, problem, "Leave out pipeline_parallel_size of --engine-args.")


ALGORITHM_RULES: tuple[Callable[[TrainConfig], None], ...] = (
    _groups_can_be_compared,
    _estimator_fits_the_rewards,
    _the_greedy_episode_is_played,
    _kl_penalty_has_a_place,
    _a_teacher_can_be_heard,
    _critic_fits_the_estimator,
    _loss_without_ratio_updates_once,
    _kl_in_the_loss_has_a_gradient,
    _corrections_have_a_ratio,
    _interpolation_saves_a_pass,
    _length_penalties_fit,
    _baseline_may_lack_truncated,
    _filter_flags_have_a_filter,
    _group_reward_can_judge,
    _task_sampling_fits,
    _a_quorum_is_most_of_a_group,
    _async_is_corrected,
    _sampling_keeps_ratio_unbiased,
    _mini_batches_have_groups,
    _experts_can_be_replayed,
)

"""Rules that a configuration must obey; checked before anything heavy is imported."""

from __future__ import annotations

import dataclasses
import math
import re
import string
import sys
from collections.abc import Callable
from pathlib import Path

from agentrl.config.evaluate import EvaluateConfig, PlayConfig
from agentrl.config.plugins import resolve_plugins
from agentrl.config.schema import CRITIC_ESTIMATORS, GROUP_ESTIMATORS, AlgoConfig, EvalConfig, FlowConfig, IsolationConfig, TrainConfig
from agentrl.core.errors import ConfigError
from agentrl.core.process import cuda_device_count


def prompts_exist(config: PlayConfig) -> None:
    """Files that are named are there."""
    for flag, sources in (("--prompts", config.data.prompt_sources), ("--eval-prompts", config.data.eval_sources)):
        for name in sources:
            path = Path(name).expanduser()
            if name.endswith((".jsonl", ".json", ".ndjson", ".parquet")) and not path.exists():
                raise ConfigError(flag, name, "no such file", f"Looked for {path.absolute()}.")


def probabilities_fit(config: PlayConfig) -> None:
    """There is one positive number per data set."""
    given, sources = config.data.prompt_probs, config.data.prompt_sources
    if not given:
        return
    try:
        weights = config.data.prompt_weights
    except ValueError:
        raise ConfigError("--prompt-probs", given, "is not a list of numbers", "Write, for example, 0.7,0.3.") from None
    if len(weights) != len(sources):
        problem = f"has {len(weights)} number{'s' * (len(weights) != 1)} for {len(sources)} data set{'s' * (len(sources) != 1)}"
        raise ConfigError("--prompt-probs", given, problem, "Give one for each of --prompts, with commas between them.")
    if not all(0 < weight < math.inf for weight in weights):
        raise ConfigError("--prompt-probs", given, "must hold numbers above 0", "Leave out the data set that is not to be used.")


def template_has_one_place(config: PlayConfig) -> None:
    """The prompt has exactly one place in the template."""
    template = config.data.input_template
    if not template:
        return
    if not config.data.prompt_sources and not config.data.eval_sources:
        raise ConfigError("--input-template", template, "has no effect without a data set", "Give --prompts, or leave it out.")
    try:
        places = [(name, form, conversion) for _, name, form, conversion in string.Formatter().parse(template) if name is not None]
    except ValueError:
        places = []
    if places != [("", "", None)]:
        problem = "must hold {} exactly once, where the prompt goes"
        raise ConfigError("--input-template", template, problem, "Write {{ and }} for braces that are meant as such.")


DATA_RULES: tuple[Callable[[PlayConfig], None], ...] = (prompts_exist, probabilities_fit, template_has_one_place)


MEASURES = re.compile(r"eval/(reward|score|pass@([1-9]\d*))(/.+)?")


def _best_is_measured(config: TrainConfig) -> None:
    name, samples = config.eval.keep_best, config.eval.eval_samples
    if not name:
        return
    if not config.eval.eval_every:
        raise ConfigError("--keep-best", name, "is measured by evaluations, and there are none", "Add --eval-every N.")
    measure = MEASURES.fullmatch(name)
    if measure is None:
        raise ConfigError("--keep-best", name, "is no figure of an evaluation", "Use eval/score, eval/reward or eval/pass@1.")
    if measure[2] and int(measure[2]) > samples:
        raise ConfigError("--keep-best", name, f"needs more episodes per task than {samples}", f"Give --eval-samples {measure[2]}.")


def _eval_flags_have_an_evaluation(config: TrainConfig) -> None:
    if config.eval.eval_every or config.eval.eval_at_start:
        return
    for flag, value, default in (
        ("--eval-samples", config.eval.eval_samples, EvalConfig.eval_samples),
        ("--eval-temperature", config.eval.eval_temperature, EvalConfig.eval_temperature),
        ("--eval-by", config.eval.eval_by, EvalConfig.eval_by),
        ("--eval-pass-score", config.eval.eval_pass_score, EvalConfig.eval_pass_score),
    ):
        if value != default:
            raise ConfigError(flag, value, "has no effect without evaluations", "Add --eval-every N.")


EVAL_RULES: tuple[Callable[[TrainConfig], None], ...] = (_best_is_measured, _eval_flags_have_an_evaluation)


def _limits_have_processes(config: PlayConfig) -> None:
    if config.isolation.env_isolation != "none":
        return
    for item in dataclasses.fields(IsolationConfig):
        value = getattr(config.isolation, item.name)
        if value != item.default:
            flag = f"--{item.name.replace('_', '-')}"
            raise ConfigError(flag, value, "has no effect on environments in the rollout worker", "Add --env-isolation process.")


def _processes_can_be_held(config: PlayConfig) -> None:
    if config.isolation.env_isolation == "process" and sys.platform != "linux":
        raise ConfigError("--env-isolation", "process", f"needs Linux, and this is {sys.platform}", "Leave it out, or use a container.")


def _passed_are_names(config: PlayConfig) -> None:
    for name in config.isolation.env_pass:
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise ConfigError("--env-pass", name, "is not the name of an environment variable", "Give names only, not values.")


ISOLATION_RULES: tuple[Callable[[PlayConfig], None], ...] = (_limits_have_processes, _processes_can_be_held, _passed_are_names)


def check(config: TrainConfig) -> TrainConfig:
    """Apply every rule and fill in what follows from other settings.

    Returns:
        The configuration with ``agent``, ``max_staleness`` and ``asynchronous`` made explicit, and absolute paths of plug-ins.

    Raises:
        ConfigError: For the first rule that does not hold.
    """
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, agent=_judged_agent(config)))
    config = resolve_plugins(config)
    for rule in RULES:
        rule(config)
    flow = dataclasses.replace(config.flow, max_staleness=config.staleness, asynchronous=config.staleness > 0)
    return dataclasses.replace(config, flow=flow)


def _judged_agent(config: PlayConfig) -> str:
    """The agent, or what ``--remote-rm-url`` stands for."""
    urls, given = config.data.remote_rm_url, config.run.agent
    if not urls:
        return given
    if urls.endswith(".py"):
        agent = urls
    else:
        options = f"timeout_s={config.rollout.reward_timeout_s:g}&batch_size={config.rollout.reward_batch_size}"
        agent = f"reward:{','.join(url.strip() for url in urls.split(','))}#{options}"
    if given and given.partition("#")[0] != agent.partition("#")[0]:
        raise ConfigError("--remote-rm-url", urls, f"--agent {given} says already what judges", "Leave out one of the two.")
    return agent


def _reward_servers_can_be_asked(config: PlayConfig) -> None:
    urls, limit = config.data.remote_rm_url, config.rollout.step_timeout_s
    if not urls or urls.endswith(".py"):
        return
    if not all(url.strip().startswith(("http://", "https://")) for url in urls.split(",")):
        problem = "is neither a Python file nor a list of addresses"
        raise ConfigError("--remote-rm-url", urls, problem, "Write http://HOST:PORT/PATH, with commas between several.")
    if not config.data.prompts:
        raise ConfigError("--prompts", "", "is not given, and a reward server has no tasks", "Name a data set.")
    if config.rollout.reward_timeout_s >= limit:
        problem = f"is not below --step-timeout-s {limit:g}, which would end the request first"
        raise ConfigError("--reward-timeout-s", config.rollout.reward_timeout_s, problem, "Lower it, or raise the other.")


def _agent_is_named(config: PlayConfig) -> None:
    if not config.run.agent:
        raise ConfigError("--agent", "", "no environment is named", "Give one, for example --agent envs/calculator.py.")
    path = config.run.agent.partition(":")[0]
    if path.endswith(".py") and not Path(path).is_file():
        raise ConfigError("--agent", config.run.agent, "no such file", f"Looked for {Path(path).absolute()}.")


def _model_exists(config: PlayConfig) -> None:
    name = config.model.model
    if not name:
        return
    path = Path(name).expanduser()
    looks_local = name.startswith(("/", "./", "../", "~")) or path.exists() or name.count("/") > 1
    if looks_local and not (path / "config.json").is_file():
        problem = "the directory holds no config.json" if path.is_dir() else "no such directory"
        raise ConfigError("--model", name, problem, "Give a Hugging Face model directory or a hub name like `org/name`.")


def _group_size_fits_estimator(config: TrainConfig) -> None:
    name, n = config.algo.advantage_estimator, config.rollout.n_samples_per_prompt
    if name in GROUP_ESTIMATORS and n < 2:
        raise ConfigError(
            "--n-samples-per-prompt",
            n,
            f"the estimator {name!r} compares the members of a group and needs at least 2",
            "Raise it, or choose --advantage-estimator reinforce.",
        )


def _a_group_may_begin(config: TrainConfig) -> None:
    limit, n = config.rollout.max_concurrent_episodes, config.rollout.n_samples_per_prompt
    if 0 < limit < n:
        problem = f"is less than a group of --n-samples-per-prompt {n}, and a group begins as a whole"
        raise ConfigError("--max-concurrent-episodes", limit, problem, f"Use at least {n}, or 0.")


def _group_estimators_do_not_discount(config: TrainConfig) -> None:
    name, gamma = config.algo.advantage_estimator, config.algo.gamma
    if name in GROUP_ESTIMATORS - {"reinforce_baseline"} and gamma != 1.0:
        raise ConfigError("--gamma", gamma, f"the estimator {name!r} has no discount", "Use 1, or --advantage-estimator reinforce or gae.")


def _groups_divide_over_ranks(config: TrainConfig) -> None:
    groups, ranks = config.rollout.groups_per_step, config.learner.num_learners
    if groups % ranks:
        raise ConfigError("--groups-per-step", groups, f"does not divide over --num-learners {ranks}", f"Use a multiple of {ranks}.")


def _mini_batches_have_groups(config: TrainConfig) -> None:
    parts, groups = config.algo.mini_batches, config.rollout.groups_per_step
    if parts > groups:
        raise ConfigError("--mini-batches", parts, f"exceeds --groups-per-step {groups}, and groups stay whole", f"Use at most {groups}.")


def _kl_flags_have_a_coefficient(config: TrainConfig) -> None:
    if config.algo.init_kl_coef:
        return
    for flag, value in (
        ("--use-kl-loss", config.algo.use_kl_loss),
        ("--kl-target", config.algo.kl_target),
        ("--ref-reset-every", config.algo.ref_reset_every),
    ):
        if value:
            raise ConfigError(flag, value, "has no effect without a KL penalty", "Give a coefficient too, for example --init-kl-coef 0.01.")


def _critic_flags_have_a_critic(config: TrainConfig) -> None:
    name, steps = config.algo.advantage_estimator, config.learner.critic_warmup_steps
    if steps and name not in CRITIC_ESTIMATORS:
        raise ConfigError("--critic-warmup-steps", steps, f"the estimator {name!r} has no critic", "Use --advantage-estimator gae.")


def _critic_learns(config: TrainConfig) -> None:
    rate = config.learner.critic_learning_rate
    if config.algo.advantage_estimator in CRITIC_ESTIMATORS and not rate:
        raise ConfigError(
            "--critic-learning-rate",
            rate,
            f"the estimator {config.algo.advantage_estimator!r} needs a critic that learns",
            "Give a rate such as 1e-3, or use --advantage-estimator reinforce, which needs no critic.",
        )


def _loss_without_ratio_updates_once(config: TrainConfig) -> None:
    if config.algo.policy_loss != "reinforce":
        return
    for flag, value in (("--ppo-epochs", config.algo.ppo_epochs), ("--mini-batches", config.algo.mini_batches)):
        if value > 1:
            raise ConfigError(flag, value, "--policy-loss reinforce is right for one update per batch only", "Use 1, or --policy-loss ppo.")
    if config.algo.reuse_behaviour_logprobs and config.staleness:
        problem = "leaves no ratio at all to correct older tokens with --policy-loss reinforce"
        raise ConfigError("--reuse-behaviour-logprobs", True, problem, "Leave it out, or use --policy-loss ppo.")


def _loss_flags_have_their_loss(config: TrainConfig) -> None:
    if config.algo.dual_clip is not None and config.algo.policy_loss != "ppo":
        problem = f"has no effect on --policy-loss {config.algo.policy_loss}"
        raise ConfigError("--dual-clip", config.algo.dual_clip, problem, "Leave it out, or use --policy-loss ppo.")
    if config.algo.use_kl_loss and config.algo.kl_estimator == "k1":
        problem = "has a gradient of mean 0 in the loss (--use-kl-loss)"
        raise ConfigError("--kl-estimator", "k1", problem, "Use k2 or k3, or put the penalty into the reward.")


def _corrections_have_a_ratio(config: TrainConfig) -> None:
    """With the recorded log-probabilities as the old ones, the ratio of every correction is 1."""
    algo = config.algo
    if not algo.reuse_behaviour_logprobs:
        return
    for flag, value in (
        ("--off-policy", None if algo.off_policy in ("tis", "none") else algo.off_policy),
        ("--off-policy-level", algo.off_policy_level),
        ("--off-policy-mode", algo.off_policy_mode),
        ("--off-policy-range", algo.off_policy_range),
        ("--opsm-delta", algo.opsm_delta),
        ("--m2po-tau", algo.m2po_tau),
    ):
        if value is not None:
            problem = "has nothing to correct with --reuse-behaviour-logprobs, where the clipped ratio of the loss does all of it"
            raise ConfigError(flag, value, problem, "Leave out one of the two.")


def _length_penalties_fit(config: TrainConfig) -> None:
    buffer, factor, budget = config.algo.overlong_buffer, config.algo.overlong_penalty, config.rollout.max_new_tokens
    if buffer > budget:
        raise ConfigError("--overlong-buffer", buffer, f"exceeds --max-new-tokens {budget}", f"Use at most {budget}.")
    if not buffer and factor != AlgoConfig.overlong_penalty:
        raise ConfigError("--overlong-penalty", factor, "has no effect without a buffer", f"Give --overlong-buffer, up to {budget}.")


def _filter_flags_have_a_filter(config: TrainConfig) -> None:
    chosen = config.flow.dynamic_filtering_range
    if chosen != FlowConfig.dynamic_filtering_range and not config.flow.dynamic_filtering:
        raise ConfigError("--dynamic-filtering-range", chosen, "has no effect while filtering is off", "Add --dynamic-filtering.")


def _a_quorum_is_most_of_a_group(config: TrainConfig) -> None:
    quorum, n = config.flow.group_quorum, config.rollout.n_samples_per_prompt
    if quorum == 1.0:
        if config.flow.straggler_factor != FlowConfig.straggler_factor:
            problem = "has no effect while groups wait for all of their episodes"
            raise ConfigError("--straggler-factor", config.flow.straggler_factor, problem, "Give --group-quorum too, for example 0.75.")
        return
    if quorum < 0.5:
        problem = "would judge the rest by less than half of a group"
        raise ConfigError("--group-quorum", quorum, problem, "Use at least 0.5.")
    if math.ceil(quorum * n) >= n:
        problem = f"asks for all {n} episodes of a group"
        raise ConfigError("--group-quorum", quorum, problem, f"Use at most {(n - 1) / n:.3g}, or raise --n-samples-per-prompt.")
    if config.algo.advantage_estimator == "dr_grpo":
        problem = "leaves out what takes long, and --advantage-estimator dr_grpo is there to treat lengths alike"
        raise ConfigError("--group-quorum", quorum, problem, "Leave out one of the two.")


def _async_and_staleness_agree(config: TrainConfig) -> None:
    if config.flow.asynchronous and config.flow.max_staleness == 0:
        remedy = "Leave out --async for synchronous training, or allow a staleness of 1."
        raise ConfigError("--max-staleness", 0, "contradicts --async", remedy)


def _async_is_corrected(config: TrainConfig) -> None:
    if config.staleness and config.algo.off_policy == "none" and not config.algo.allow_uncorrected:
        raise ConfigError(
            "--off-policy",
            "none",
            "an asynchronous run would train on older weights' tokens without correction",
            "Use tis, or say that you mean it with --allow-uncorrected.",
        )


def _sampling_keeps_ratio_unbiased(config: TrainConfig) -> None:
    truncated = config.rollout.top_p < 1 or config.rollout.top_k > 0
    if truncated and config.algo.off_policy != "none":
        raise ConfigError(
            "--top-p" if config.rollout.top_p < 1 else "--top-k",
            config.rollout.top_p if config.rollout.top_p < 1 else config.rollout.top_k,
            "truncated sampling biases the importance ratio of the correction",
            "Sample from the whole distribution (--top-p 1 --top-k 0), or use --off-policy none.",
        )


def _ranges_are_ordered(config: TrainConfig) -> None:
    for flag, (low, high) in (
        ("--reward-clip-range", config.algo.reward_clip_range),
        ("--off-policy-range", config.algo.off_policy_range or (0.0, 1.0)),
        ("--dynamic-filtering-range", config.flow.dynamic_filtering_range),
    ):
        if not low < high:
            raise ConfigError(flag, (low, high), "the first number must be smaller than the second", "Swap them.")
    low, high = config.algo.reward_clip_range
    if not low <= 0.0 <= high:
        raise ConfigError("--reward-clip-range", (low, high), "must contain 0", "Give a lower bound <= 0 and an upper bound >= 0.")


def _local_runtime_is_single(config: PlayConfig) -> None:
    if config.run.runtime != "local":
        return
    ranks = config.learner.num_learners if isinstance(config, TrainConfig) else 0
    for flag, value in (("--num-engines", config.engine.num_engines), ("--num-learners", ranks)):
        if value > 1:
            raise ConfigError(flag, value, "--runtime local runs one of each in one process", "Use --runtime ray.")


def _budgets_fit(config: PlayConfig) -> None:
    budget, context = config.rollout.max_new_tokens, config.engine.max_model_len
    if context and budget >= context:
        raise ConfigError("--max-new-tokens", budget, f"leaves no room for a prompt in --max-model-len {context}", "Lower it.")


def _filtering_needs_groups(config: TrainConfig) -> None:
    if config.flow.dynamic_filtering and config.rollout.n_samples_per_prompt < 2:
        raise ConfigError("--dynamic-filtering", True, "filters on the spread within a group", "Use --n-samples-per-prompt 2 or more.")


def _gpu_flags_have_a_gpu(config: PlayConfig) -> None:
    if config.run.ray_address or cuda_device_count():
        return
    engine = config.engine
    wanted: list[tuple[str, object]] = []
    wanted += [("--tensor-parallel-size", engine.tensor_parallel_size)] * (engine.tensor_parallel_size > 1)
    wanted += [("--colocate", True)] * engine.colocate
    wanted += [("--engine-dtype", "float16")] * (engine.engine_dtype == "float16")
    if isinstance(config, TrainConfig):
        wanted += [("--optimizer-offload", True)] * config.learner.optimizer_offload
        wanted += [("--attn-implementation", "flash_attention_2")] * (config.learner.attn_implementation == "flash_attention_2")
    for flag, value in wanted:
        remedy = "Leave the flag out, or join a cluster with --ray-address."
        raise ConfigError(flag, value, "needs a GPU, and this machine has none", remedy)


def _colocated_pairs_match(config: TrainConfig) -> None:
    if not config.engine.colocate:
        return
    if config.engine.tensor_parallel_size > 1:
        raise ConfigError("--tensor-parallel-size", config.engine.tensor_parallel_size, "does not go with --colocate", "Use 1.")
    if config.engine.num_engines != config.learner.num_learners:
        raise ConfigError(
            "--num-engines", config.engine.num_engines, "--colocate pairs one engine with one rank", "Make the two numbers equal."
        )


PLAY_RULES: tuple[Callable[[PlayConfig], None], ...] = (
    _agent_is_named,
    _reward_servers_can_be_asked,
    *DATA_RULES,
    _model_exists,
    _local_runtime_is_single,
    _budgets_fit,
    _gpu_flags_have_a_gpu,
    *ISOLATION_RULES,
)

RULES: tuple[Callable[[TrainConfig], None], ...] = (
    *PLAY_RULES,
    _group_size_fits_estimator,
    _a_group_may_begin,
    _group_estimators_do_not_discount,
    _groups_divide_over_ranks,
    _mini_batches_have_groups,
    _kl_flags_have_a_coefficient,
    _critic_flags_have_a_critic,
    _critic_learns,
    _loss_without_ratio_updates_once,
    _loss_flags_have_their_loss,
    _corrections_have_a_ratio,
    _length_penalties_fit,
    _filter_flags_have_a_filter,
    _a_quorum_is_most_of_a_group,
    _async_and_staleness_agree,
    _async_is_corrected,
    _sampling_keeps_ratio_unbiased,
    _ranges_are_ordered,
    _filtering_needs_groups,
    _colocated_pairs_match,
    *EVAL_RULES,
)


def check_evaluation(config: EvaluateConfig) -> EvaluateConfig:
    """Apply the rules of ``agentrl eval`` and fill in what follows from other settings.

    Returns:
        The settings with ``agent`` and ``runtime`` made explicit.

    Raises:
        ConfigError: For the first rule that does not hold.
    """
    runtime = config.run.runtime
    if runtime == "auto":
        runtime = "ray" if config.engine.num_engines > 1 or config.run.ray_address else "local"
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, agent=_judged_agent(config), runtime=runtime))
    for rule in (*PLAY_RULES, _the_episodes_of_a_task_may_begin, _penalties_of_the_run_fit):
        rule(config)
    return config


def _the_episodes_of_a_task_may_begin(config: PlayConfig) -> None:
    limit, n = config.rollout.max_concurrent_episodes, config.eval.eval_samples
    if 0 < limit < n:
        problem = f"is less than --eval-samples {n}, and the episodes of a task begin together"
        raise ConfigError("--max-concurrent-episodes", limit, problem, f"Use at least {n}, or 0.")


def _penalties_of_the_run_fit(config: PlayConfig) -> None:
    budget, buffer = config.rollout.max_new_tokens, config.algo.overlong_buffer
    if budget < buffer:
        raise ConfigError("--max-new-tokens", budget, f"is less than the run's --overlong-buffer {buffer}", f"Use at least {buffer}.")

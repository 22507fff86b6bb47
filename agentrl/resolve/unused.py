"""Settings that somebody gave and that change nothing beside the others: refused, or named in a note where recipes have them all the same.

Only what was given is judged: defaults that follow from the model, and the settings of a run that goes on, may be without effect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from agentrl.algo.corrections import find_correction
from agentrl.algo.estimators import estimator_facts
from agentrl.algo.losses import find_loss, loss_facts
from agentrl.algo.options import option_names
from agentrl.algo.plan import options_of
from agentrl.algo.teacher_specs import served_teachers
from agentrl.config.engine_rules import may_have_gpus
from agentrl.config.model_defaults import defaults_of
from agentrl.config.schema import TrainConfig
from agentrl.config.sections import settings_of
from agentrl.core.errors import ConfigError
from agentrl.core.model_shape import local_config, read_shape, reads_images
from agentrl.core.settings import flag
from agentrl.resolve.steps import GIVEN

UNUSED_NOTE = "without effect: "
"""Beginning of the notes."""


def _updates_once(config: TrainConfig) -> bool:
    """Return True if the ratio of the loss is 1: the policy has not moved yet when its only update is computed."""
    return config.algo.ppo_epochs * config.algo.mini_batches == 1 and config.algo.old_logprobs == "recomputed"


def _has_no_kl(config: TrainConfig) -> bool:
    return not config.algo.init_kl_coef


def _has_no_critic(config: TrainConfig) -> bool:
    return not estimator_facts(config.algo.advantage_estimator).needs_critic


def _warms_up_for_ever(config: TrainConfig) -> bool:
    return config.learner.lr_warmup_steps > config.training.num_steps


def _has_one_rate(config: TrainConfig) -> bool:
    return config.learner.lr_schedule == "constant"


def _resets_nothing(config: TrainConfig) -> bool:
    return config.algo.ref_reset_every >= config.training.num_steps


def _holds_nothing_back(config: TrainConfig) -> bool:
    return loss_facts(config.algo.policy_loss).several_updates and _updates_once(config)


def _weighs_nothing(config: TrainConfig) -> bool:
    return getattr(options_of(config.algo, find_correction(config.algo.off_policy)), "off_policy_mode", "") == "none"


def _has_one_lambda(config: TrainConfig) -> bool:
    return config.algo.options.get("gae_lambda") != "adaptive"


def _has_adapters(config: TrainConfig) -> bool:
    return config.weights.publish == "adapter"


def _is_quantised(config: TrainConfig) -> bool:
    return config.engine.quantizes


def _is_synchronous(config: TrainConfig) -> bool:
    return config.flow.staleness == 0


def _shares_by_name(config: TrainConfig) -> bool:
    return config.engine.gpu_memory_utilization is not None


def _truncates(config: TrainConfig) -> bool:
    return config.training.max_mismatch not in (0, "none") and (config.rollout.top_p < 1.0 or config.rollout.top_k > 0)


def _reads_no_data(config: TrainConfig) -> bool:
    return not (config.data.prompts or config.data.eval_prompts)


def _is_dense(config: TrainConfig) -> bool:
    shape = read_shape(config.model.model)
    return shape is not None and not shape.experts


def _reads_text_only(config: TrainConfig) -> bool:
    model = config.model.model  # without a name the environment chooses
    return bool(model) and local_config(model) is not None and not reads_images(model)


def _asks_no_judge(config: TrainConfig) -> bool:
    servers = config.data.remote_rm_url and not config.data.remote_rm_url.endswith(".py")
    return not (config.reward.reward_model or config.flow.group_reward or served_teachers(config.algo.teacher) or servers)


def _has_one_teacher(config: TrainConfig) -> bool:
    return len(served_teachers(config.algo.teacher)) < 2


def _is_local(config: TrainConfig) -> bool:
    return config.run.runtime == "local"


def _joins_nothing(config: TrainConfig) -> bool:
    return not config.run.ray_address or _is_local(config)


RULES: tuple[tuple[tuple[str, ...], Callable[[TrainConfig], object], str, str], ...] = (
    (("kl_estimator",), _has_no_kl, "has no effect without a KL penalty", "Give a coefficient too, for example --init-kl-coef 0.01."),
    (("value_clip", "critic_learning_rate"), _has_no_critic, "has no effect without a critic", "Use --advantage-estimator gae."),
    (("lr_warmup_steps",), _warms_up_for_ever, "exceeds --num-steps: the learning rate never reaches its peak", "Lower it."),
    (("min_lr_ratio",), _has_one_rate, "has no effect on a constant learning rate", "Add --lr-schedule linear or cosine."),
    (("ref_reset_every",), _resets_nothing, "resets the reference in no step before the last", "Use less than --num-steps."),
    (("policy_loss",), _holds_nothing_back, "holds back nothing: the policy moves once per batch", "Add --mini-batches 2, or use ppo."),
    (("off_policy_level", "off_policy_range"), _weighs_nothing, "has no effect where no ratio is corrected", "Use --off-policy tis."),
    (("gae_alpha",), _has_one_lambda, "has no effect on a fixed lambda", "Add --gae-lambda adaptive."),
    (("weight_bucket_mib", "verify_weights_every"), _has_adapters, "has no effect on adapters, which are files", "Leave out --publish."),
    (("verify_weights_every",), _is_quantised, "has no effect: quantised engines hold other numbers than the learner", "Leave it out."),
    (("kv_on_publish",), _is_synchronous, "has no effect: nothing is generated while weights are published", "Add --async."),
    (("learner_memory_gib",), _shares_by_name, "has no effect beside --gpu-memory-utilization", "Leave out one of the two."),
    (("max_mismatch",), _truncates, "is not judged with --top-p or --top-k: the learner scores the whole distribution", "Leave it out."),
    (("prompt_split",), lambda c: not c.data.prompts, "has no effect without --prompts", "Leave it out."),
    (("eval_split",), lambda c: not c.data.eval_prompts, "has no effect without --eval-prompts", "Leave it out."),
    (("input_key", "label_key", "image_key"), _reads_no_data, "names a column of data sets, and there are none", "Give --prompts."),
    (("aux_loss_coef",), _is_dense, "needs a mixture of experts, and the model is none", "Leave it out."),
    (("train_vision",), _reads_text_only, "needs a model that reads images, and this one reads text only", "Leave it out."),
    (("reward_timeout_s",), _asks_no_judge, "has no effect without reward models, servers or teachers", "Use --step-timeout-s."),
    (("teacher_by",), _has_one_teacher, "chooses among several teachers, and there is one", "Name several with --teacher."),
    (("engine_timeout_s", "max_engine_restarts"), _is_local, "has no effect: no engine of one process is replaced", "Use --runtime ray."),
    (("cluster_timeout_s",), _joins_nothing, "has no effect without a cluster to join", "Add --ray-address."),
)
"""Settings, when they have no effect, why, and the remedy."""


def refuse_unused(config: TrainConfig, sources: Mapping[str, str]) -> None:
    """Refuse settings that were given and change nothing.

    Args:
        config: The settings.
        sources: Where those that are not defaults come from; see `Steps`.

    Raises:
        ConfigError: For the first one.
    """
    given = dict(_given(config, sources))
    for names, unused, problem, remedy in RULES:
        for name in names:
            if name in given and unused(config):
                raise ConfigError(flag(name), given[name], problem, remedy)


def unused_notes(config: TrainConfig, sources: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each reason for which settings that were given change nothing, although they are not refused."""
    given, loss = dict(_given(config, sources)), find_loss(config.algo.policy_loss)
    selecting = {"cov_share", "clip_cov_range"} if loss_facts(config.algo.policy_loss).selects else set()
    clips = {"value_clip", *option_names(type(options_of(config.algo, loss)))} - selecting
    on_gpu, engine = may_have_gpus(config), config.engine.engine
    whole = config.learner.dtype("cuda" if on_gpu else "cpu") == "float32"
    for names, unused, why in (
        (clips, _updates_once(config), "the policy moves once per batch, and its ratio is 1 (--mini-batches, --ppo-epochs)"),
        ({"gpu_memory_utilization"}, not on_gpu or engine == "transformers", "only vLLM on a GPU reads it; here --kv-cache-gib counts"),
        ({"kv_cache_gib"}, on_gpu and engine == "vllm", "vLLM on a GPU reads --gpu-memory-utilization instead"),
        ({"fp32_lm_head"}, whole, "the learner computes in float32 anyway"),
    ):
        if unused and (idle := [flag(name) for name in given if name in names]):
            yield f"{UNUSED_NOTE}{', '.join(idle)}: {why}"


def _given(config: TrainConfig, sources: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    """Yield the settings that somebody gave a value of their own."""
    form = TrainConfig.schema(vars(config.algo))
    loaded = config.to_load(form)
    filled = defaults_of(config)
    for item in settings_of(form).values():
        value = getattr(getattr(loaded, item.section), item.name)
        if sources.get(item.name) in GIVEN and not item.is_default(value) and value != filled.get(item.name):
            yield item.name, value

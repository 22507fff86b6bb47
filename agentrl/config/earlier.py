"""Settings of earlier versions, by name: what has become of each that is gone, for flags and for the files of runs that had it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from agentrl.core.errors import ConfigError
from agentrl.flow.plan import BRANCH_ENTROPY

ANY: Final = object()
"""A run was the same with every value: the setting decided where and how fast it went."""
RECORD_MIB = 256.0
"""MiB of ``--record budget``, unless others were given."""


@dataclass(frozen=True, slots=True)
class Removed:
    """A setting that is gone.

    Attributes:
        answer: What holds in its place, for messages.
        neutral: The value with which a run is the same without it; `ANY` if each is.
    """

    answer: str
    neutral: object = ANY


def _constant(value: str) -> str:
    return f"was removed: it is always {value}"


REMOVED: Mapping[str, Removed] = MappingProxyType(
    {
        "learner_parts": Removed(
            "was removed: a step is trained when all of its groups are there; --async overlaps generation and training", 1
        ),
        "reward_batch_size": Removed(_constant("64; a server of your own may be named as reward:URL#batch_size=8")),
        "reward_model_max_tokens": Removed(_constant("the context length of the reward model"), 0),
        "reward_model_dtype": Removed(_constant("float32 on a CPU and bfloat16 on a GPU; see agentrl serve-reward-model --dtype"), "auto"),
        "reward_model_workers": Removed(_constant("one process; more: agentrl serve-reward-model, and --remote-rm-url with all addresses")),
        "value_head_prefix": Removed("was removed: write value_head_prefix into the config.json of the reward model", ""),
        "publish_timeout_s": Removed(_constant("300 s")),
        "upload_timeout_s": Removed(_constant("1800 s")),
        "callback_timeout_s": Removed(_constant("300 s")),
        "max_learner_restarts": Removed(_constant("3")),
        "max_nonfinite_steps": Removed(_constant("3")),
        "task_exploration": Removed(_constant("0.1"), 0.1),
        "straggler_factor": Removed(_constant("3 times the median"), 3.0),
        "sandbox_max_starting": Removed(_constant("two for each core")),
        "kl_horizon": Removed(_constant("10,000 episodes"), 10_000.0),
        "entropy_coef_step": Removed(_constant("0.005"), 0.005),
        "min_pass_rate": Removed(_constant("0.01")),
        "reward_model_clip": Removed(_constant("10"), 10.0),
        "train_cancelled": Removed("was removed: what was sampled of an answer whose client left is recorded, and not trained", False),
    }
)


@dataclass(frozen=True, slots=True)
class Replaced:
    """Settings in whose place there is another one.

    Attributes:
        old: Their names.
        new: Name of the setting now.
        answer: What to write now, for messages.
        value: Makes the value of the new setting from the old ones that are given, by name, and from its own, `None` if it has none.
        more: Makes further settings of this version from the old ones.
    """

    old: tuple[str, ...]
    new: str
    answer: str
    value: Callable[[Mapping[str, Any], Any], Any]
    more: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda _: {}


OFFLOADS = {"optimizer_offload": "optimizer", "activation_offload": "activations", "reference_offload": "reference", "ema_offload": "ema"}
LIMITS = ("memory_mib", "cpu_s", "file_mib", "processes", "open_files")
CHECKS = {"check_env": "env", "certify": "model", "check_memory": "memory"}
VARIANTS = {"use_rslora": "rslora", "use_dora": "dora"}
DEEPSPEED_ARGS = {
    "zero_hpz_size": "zero_hpz_partition_size={}",
    "zero_quantized_weights": "zero_quantized_weights",
    "zero_quantized_gradients": "zero_quantized_gradients",
    "fp32_communication": "communication_data_type=fp32",
    "deepcompile": "deepcompile",
}
"""Settings that are values of another one now."""


def _chosen(names: Mapping[str, str]) -> Callable[[Mapping[str, Any], Any], Any]:
    """Make the value of a setting with several names, of which each was a switch."""
    return lambda old, now: (*(now or ()), *(name for switch, name in names.items() if old.get(switch)))


def _skipped(old: Mapping[str, Any], now: Any) -> Any:
    return (*(now or ()), *(name for switch, name in CHECKS.items() if not old.get(switch, True)))


def _deepspeed_args(old: Mapping[str, Any], now: Any) -> Any:
    given = {name: value for name, value in old.items() if value not in (False, 1) or value is True}
    return (*(now or ()), *(DEEPSPEED_ARGS[name].format(value) for name, value in given.items()))


def _old_logprobs(old: Mapping[str, Any], now: Any) -> Any:
    if old.get("reuse_behaviour_logprobs"):
        return "behaviour"
    return "interpolated" if old.get("interpolate_old_logprobs") else now or "recomputed"


def _limits(old: Mapping[str, Any], now: Any) -> Any:
    usual = {"env_memory_mib": 1024, "env_cpu_s": 600.0, "env_file_mib": 256, "env_processes": 32, "env_open_files": 512}
    return (*(now or ()), *(f"{name.removeprefix('env_')}={value}" for name, value in old.items() if value != usual[name]))


def _sinks(old: Mapping[str, Any], now: Any) -> Any:
    return (*(now or ()), *(f"{name.removesuffix('_project')}:{project}" for name, project in old.items() if project))


def _record(old: Mapping[str, Any], now: Any) -> Any:
    return old["record_mib"] if now in (None, "budget") else now


def _partners(old: Mapping[str, Any], now: Any) -> Any:
    every, pool = old.get("partner_every", 50), old.get("partner_pool", 4)
    if (every, pool) == (50, 4):
        return now or ()
    return tuple(f"{spec}#every={every}&pool={pool}" if spec.endswith("=past") else spec for spec in now or ())


def _weight_beside_group_reward(old: Mapping[str, Any], now: Any) -> Any:
    return 0.0 if old["group_reward_mode"] == "replace" else 1.0 if now is None else now


REPLACED: tuple[Replaced, ...] = (
    Replaced(tuple(OFFLOADS), "offload", "write --offload, with one or more of optimizer, activations, reference, ema", _chosen(OFFLOADS)),
    Replaced(tuple(CHECKS), "skip_checks", "write --skip-checks, with one or more of env, model, memory", _skipped),
    Replaced(tuple(VARIANTS), "lora_variant", "write --lora-variant rslora, dora, or both", _chosen(VARIANTS)),
    Replaced(
        ("adam_beta1", "adam_beta2"),
        "adam_betas",
        "write --adam-betas 0.9 0.95",
        lambda old, now: (old.get("adam_beta1", 0.9), old.get("adam_beta2", 0.95)),
    ),
    Replaced(
        tuple(DEEPSPEED_ARGS),
        "deepspeed_args",
        "write --deepspeed-args, with zero_hpz_partition_size=N, zero_quantized_weights, zero_quantized_gradients, "
        "communication_data_type=fp32 or deepcompile",
        _deepspeed_args,
    ),
    Replaced(
        ("reuse_behaviour_logprobs", "interpolate_old_logprobs"),
        "old_logprobs",
        "write --old-logprobs behaviour or interpolated",
        _old_logprobs,
    ),
    Replaced(
        tuple(f"env_{name}" for name in LIMITS),
        "env_limits",
        f"write --env-limits, with {', '.join(f'{name}=N' for name in LIMITS)}",
        _limits,
    ),
    Replaced(("wandb_project", "trackio_project"), "sink", "write --sink wandb:PROJECT or trackio:PROJECT", _sinks),
    Replaced(("record_mib",), "record", "write the number of MiB as --record 256", _record),
    Replaced(("partner_every", "partner_pool"), "partner", "write --partner 'NAME=past#every=50&pool=4'", _partners),
    Replaced(
        ("group_reward_mode",),
        "environment_reward_weight",
        "write --environment-reward-weight 0 beside --group-reward, to pay the reward of the group alone",
        _weight_beside_group_reward,
    ),
    Replaced(
        ("enforce_eager",),
        "engine_args",
        "write --engine-args enforce_eager",
        lambda old, now: (*(now or ()), *(["enforce_eager"] if old["enforce_eager"] else [])),
    ),
    Replaced(
        ("dynamic_filtering", "dynamic_filtering_range"),
        "flat_groups",
        "write --flat-groups resample --score-range 0 1",
        lambda old, now: "resample" if old.get("dynamic_filtering") else now or "train",
        # A range did nothing where filtering was off, and every file of a run had one.
        lambda old: {"score_range": list(old.get("dynamic_filtering_range", (0.0, 1.0)))} if old.get("dynamic_filtering") else {},
    ),
    Replaced(
        ("branch_entropy",),
        "branch_at",
        "write --branch-at entropy:0.2",
        lambda old, now: (
            f"entropy:{old['branch_entropy']}" if now == "entropy" and old["branch_entropy"] != BRANCH_ENTROPY else now or "never"
        ),
    ),
    Replaced(
        ("curriculum_key",),
        "task_sampling",
        "write --task-sampling curriculum:KEY",
        lambda old, now: f"curriculum:{old['curriculum_key']}" if now == "curriculum" and old["curriculum_key"] else now or "epochs",
    ),
)


def answer_of(name: str) -> str:
    """Return what has become of a setting of an earlier version; empty if there was none of this name."""
    if (removed := REMOVED.get(name)) is not None:
        return removed.answer
    return next((each.answer for each in REPLACED if name in each.old), "")


def renewed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with those of this version in place of earlier ones."""
    new = dict(values)
    for each in REPLACED:
        if old := {name: new.pop(name) for name in each.old if name in new}:
            value = each.value(old, new.get(each.new))
            new |= {each.new: list(value) if isinstance(value, tuple) else value, **each.more(old)}
    if new.get("record") == "budget":
        new["record"] = RECORD_MIB
    return new


def refuse_removed(data: Mapping[str, Any], source: str) -> None:
    """Refuse a removed setting with which a training would be another one than without it.

    Raises:
        ConfigError: If there is one.
    """
    for name, value in data.items():
        removed = REMOVED.get(name)
        if removed is not None and removed.neutral is not ANY and value != removed.neutral:
            raise ConfigError(f"{source}: {name}", value, removed.answer, f"Delete it there, or set it to {removed.neutral!r}.")

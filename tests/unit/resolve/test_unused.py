"""Every flag of ``agentrl train`` changes something beside each kind of run, or is refused or named there.

`READ_WHEN` says of each setting when something reads it; a setting that it does not name is read in every run. The plan of a run holds
sections whole, so that a change of the plan alone does not show that a setting is read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.algo.compute import compute_policy_loss, select_tokens
from agentrl.algo.estimators import estimator_facts
from agentrl.algo.facts import facts_of
from agentrl.algo.losses import POLICY_LOSSES
from agentrl.algo.plan import built_in_options
from agentrl.algo.teacher_specs import served_teachers
from agentrl.algo.token_losses import LossInputs
from agentrl.assets import VISION_MODEL
from agentrl.config.engine_rules import may_have_gpus
from agentrl.config.schema import TrainConfig
from agentrl.config.sections import Setting, bare, settings_of
from agentrl.core.errors import ConfigError
from agentrl.core.settings import flag
from agentrl.resolve.commands import read_train
from agentrl.resolve.plan import RunPlan, checked_steps
from agentrl.resolve.unused import UNUSED_NOTE, unused_notes
from tests.golden.drawing import VALUES, _split, _values
from tests.golden.machines import MACHINES, simulated
from tests.learner_support import write_experts

Reads = Callable[[TrainConfig], object]
CALCULATOR = ("--agent", "envs/calculator.py")


def _several(c: TrainConfig) -> bool:
    return c.algo.ppo_epochs * c.algo.mini_batches > 1 or c.algo.old_logprobs == "behaviour"


def _critic(c: TrainConfig) -> bool:
    return estimator_facts(c.algo.advantage_estimator).needs_critic


def _data(c: TrainConfig) -> bool:
    return bool(c.data.prompts or c.data.eval_prompts)


def _vllm_on_gpu(c: TrainConfig) -> bool:
    return may_have_gpus(c) and c.engine.engine != "transformers"


def _judges(c: TrainConfig) -> bool:
    servers = c.data.remote_rm_url and not c.data.remote_rm_url.endswith(".py")
    return bool(c.reward.reward_model or c.flow.group_reward or served_teachers(c.algo.teacher) or servers)


def _groups(reads: Reads, *names: str) -> dict[str, Reads]:
    return dict.fromkeys(names, reads)


READ_WHEN: dict[str, Reads] = {
    **_groups(lambda c: c.algo.init_kl_coef, "kl_estimator", "use_kl_loss", "kl_target"),
    "ref_reset_every": lambda c: c.algo.init_kl_coef and c.training.num_steps > 40,
    "kl_bias_correction": lambda c: c.algo.init_kl_coef and c.algo.use_kl_loss,
    **_groups(lambda c: c.algo.teacher, "teacher_coef", "teacher_loss"),
    "teacher_top_k": lambda c: c.algo.teacher and c.algo.teacher_loss != "sampled",
    "teacher_by": lambda c: len(served_teachers(c.algo.teacher)) > 1,
    "sft_coef": lambda c: c.algo.sft_data,
    "truncated_in_baseline": lambda c: c.algo.mask_truncated,
    "value_clip": lambda c: _critic(c) and _several(c),
    **_groups(_critic, "critic_learning_rate", "critic_warmup_steps", "gae_lambda", "critic_lambda", "bootstrap_truncated"),
    "gae_alpha": lambda c: c.algo.options.get("gae_lambda") == "adaptive",
    **_groups(
        _several, "eps_clip_low", "eps_clip_high", "dual_clip", "kl_cov_coef", "ipo_kl_coef", "sapo_tau_positive", "sapo_tau_negative"
    ),
    "cov_share": lambda c: c.algo.policy_loss == "clip_cov" or _several(c),
    **_groups(lambda c: c.algo.off_policy != "none", "off_policy_level", "off_policy_range"),
    "allow_uncorrected": lambda c: c.flow.staleness and c.algo.off_policy == "none",
    **_groups(lambda c: c.learner.lr_schedule != "constant", "min_lr_ratio"),
    "group_reward_weight": lambda c: c.flow.group_reward,
    "environment_reward_weight": lambda c: c.flow.group_reward or c.reward.reward_model,
    **_groups(lambda c: c.reward.reward_model, "reward_model_weights", "normalize_reward", "process_reward_at", "reward_model_gpus"),
    "reward_timeout_s": _judges,
    "overlong_penalty": lambda c: c.penalty.overlong_buffer,
    **_groups(lambda c: c.isolation.env_isolation == "process", "env_limits", "env_pass", "env_reuse"),
    "sandbox_read": lambda c: c.sandbox.sandbox != "none",
    "sandbox_image": lambda c: c.sandbox.sandbox == "container",
    "branches": lambda c: c.flow.branch_at != "never",
    "score_range": lambda c: c.flow.flat_groups != "train",
    **_groups(lambda c: c.training.evaluates, "eval_samples", "eval_temperature", "eval_by", "eval_pass_score"),
    **_groups(lambda c: c.training.eval_every, "eval_engines", "keep_best"),
    "checkpoint_upload": lambda c: c.training.save_every,
    "sleep_level": lambda c: c.weights.colocate,
    "learner_memory_gib": lambda c: c.weights.colocate and c.engine.gpu_memory_utilization is None,
    **_groups(lambda c: c.weights.publish != "adapter", "weight_bucket_mib", "verify_weights_every"),
    "kv_on_publish": lambda c: c.flow.staleness,
    **_groups(lambda c: c.lora.lora_rank, "publish", "lora_alpha", "lora_target_modules", "lora_dropout", "lora_variant", "load_in_4bit"),
    "max_mismatch": lambda c: c.rollout.top_p == 1.0 and not c.rollout.top_k,
    "prompt_split": lambda c: c.data.prompts,
    "eval_split": lambda c: c.data.eval_prompts,
    **_groups(_data, "input_key", "label_key", "image_key", "input_template"),
    "prompt_probs": lambda c: "," in c.data.prompts,
    **_groups(lambda c: "experts" in c.model.model, "aux_loss_coef", "router_replay"),
    "train_vision": lambda c: c.model.model.endswith(VISION_MODEL),
    **_groups(lambda c: c.run.runtime != "local", "engine_timeout_s", "max_engine_restarts"),
    "cluster_timeout_s": lambda c: c.run.ray_address,
    "gpu_memory_utilization": _vllm_on_gpu,
    "kv_cache_gib": lambda c: not _vllm_on_gpu(c),
    "fp32_lm_head": lambda c: c.learner.dtype("cuda" if may_have_gpus(c) else "cpu") != "float32",
    "adam_betas": lambda c: c.learner.optimizer != "adafactor",
    "record_requests": lambda c: c.record.record != "none",
}
"""When something reads a setting, of those that not every run reads."""

ACCEPTED: dict[str, str] = {
    "allow_uncorrected": "a permission, which a run need not use",
    "train_vision": "the environment chooses among the bundled models, after the rules; with --model it is refused",
}
"""Settings that are accepted without an effect, each with the reason."""

EXTRA = {
    "prompt_split": ("test",),
    "eval_split": ("train",),
    "input_key": ("question",),
    "label_key": ("answer",),
    "image_key": ("pictures",),
    "input_template": ("Question: {}",),
    "gae_lambda": ("0.9",),
    "critic_lambda": ("0.9",),
    "publish": ("adapter",),
    "max_mismatch": ("0.2",),
}
"""Values of settings beside those that are drawn."""
LEFT_OUT = {
    **dict.fromkeys(
        ("branches", "sleep_level", "checkpoint_upload", "router_replay", "load_in_4bit"), "refused beside most, as its own tests say"
    ),
    "sft_coef": "needs demonstrations",
    "prompt_probs": "has as many numbers as there are data sets",
    "teacher_template": "names a file",
}
"""Conditional settings that are tried elsewhere."""


def modes(folder: Path) -> dict[str, tuple[str, tuple[str, ...]]]:
    prompts = folder / "prompts.jsonl"
    prompts.write_text('{"prompt": "a", "label": "b"}\n')
    gpu = (*CALCULATOR, "--engine", "vllm", "--init-kl-coef", "0.01", "--kl-estimator", "k3")
    return {
        "plain": ("cpu", CALCULATOR),
        "gae": ("cpu", (*CALCULATOR, "--advantage-estimator", "gae")),
        "gae with several updates": (
            "cpu",
            (*CALCULATOR, "--advantage-estimator", "gae", "--mini-batches", "2", "--gae-lambda", "adaptive"),
        ),
        "remax": ("cpu", (*CALCULATOR, "--advantage-estimator", "remax", "--lr-schedule", "cosine")),
        "KL in the reward": ("cpu", (*CALCULATOR, "--init-kl-coef", "0.01")),
        "KL in the loss": ("cpu", (*CALCULATOR, "--init-kl-coef", "0.01", "--use-kl-loss", "--kl-estimator", "k2")),
        "asynchronous": ("cpu", (*CALCULATOR, "--async", "--off-policy", "none", "--allow-uncorrected")),
        "top-p": ("cpu", (*CALCULATOR, "--off-policy", "none", "--top-p", "0.9", "--flat-groups", "resample")),
        "one process": ("cpu", (*CALCULATOR, "--runtime", "local", "--record", "none", "--optimizer", "adafactor")),
        "adapters": ("cpu", (*CALCULATOR, "--engine", "vllm", "--lora-rank", "8", "--publish", "adapter", "--policy-loss", "clip_cov")),
        "evaluations": ("cpu", (*CALCULATOR, "--eval-every", "2", "--eval-size", "4", "--ppo-epochs", "2", "--policy-loss", "sapo")),
        "data set": ("cpu", ("--prompts", str(prompts), "--eval-prompts", str(prompts), "--reward", "envs/calculator.py")),
        "teacher": ("cpu", (*CALCULATOR, "--teacher", "MODEL", "--teacher-loss", "forward", "--mask-truncated")),
        "teachers": ("cpu", (*CALCULATOR, "--teacher", "a=engine:A,b=engine:B", "--env-isolation", "process", "--overlong-buffer", "16")),
        "reward model": ("cpu", (*CALCULATOR, "--reward-model", "helpful", "--mini-batches", "2", "--policy-loss", "ipo")),
        "group reward": ("podman", (*CALCULATOR, "--group-reward", "diversity", "--sandbox", "container")),
        "no sandbox": ("cpu", (*CALCULATOR, "--sandbox", "none", "--mini-batches", "2", "--policy-loss", "kl_cov")),
        "one GPU": ("gpu1", gpu),
        "merged adapters": ("cpu", (*CALCULATOR, "--engine", "vllm", "--lora-rank", "8")),
        "two GPUs": ("gpu2", (*gpu, "--gpu-memory-utilization", "0.5", "--async")),
        "transformers on a GPU": ("gpu2", (*CALCULATOR, "--engine", "transformers")),
        "cluster": ("cluster-cpu", (*CALCULATOR, "--ray-address", "HEAD:6379", "--device", "cpu")),
        "pictures": ("cpu", (*CALCULATOR, "--model", VISION_MODEL)),
        "experts": ("cpu", (*CALCULATOR, "--model", str(folder / "experts"))),
    }


def words_of(setting: Setting) -> Iterator[tuple[str, ...]]:
    """Yield a few ways of giving a setting a value of its own."""
    if bare(setting.hint) is bool:
        yield (flag(setting.name) if not setting.default else f"--no-{flag(setting.name)[2:]}",)
        return
    for value in EXTRA.get(setting.name) or VALUES.get(setting.name) or _values(setting):
        if value != str(setting.default):
            yield (flag(setting.name), *_split(setting, value))


def outcome(words: tuple[str, ...], name: str) -> str:
    """Return "refused", "noted" or "taken" for a command line with a further setting."""
    try:
        steps = checked_steps(read_train(words))
    except (ConfigError, SystemExit):
        return "refused"
    idle = [
        line for line in unused_notes(steps.settings, steps.sources) if flag(name) in line.partition(": ")[2].split(": ")[0].split(", ")
    ]
    return "noted" if idle else "taken"


def table(algorithms: dict[str, str]) -> dict[str, Setting]:
    return dict(settings_of(TrainConfig.schema(algorithms)))


def test_a_setting_that_nothing_reads_is_refused_or_named(tmp_path: Path) -> None:
    write_experts(tmp_path / "experts")
    wrong, tried = [], dict.fromkeys(READ_WHEN, False)
    for mode, (machine, words) in modes(tmp_path).items():
        with simulated(MACHINES[machine], tmp_path):
            config = checked_steps(read_train(words)).settings
            chosen = {name: getattr(config.algo, name) for name in ("advantage_estimator", "policy_loss", "off_policy")}
            own = {name: setting for name, setting in table(chosen).items() if name in READ_WHEN and name not in LEFT_OUT}
            for name, setting in own.items():
                reads = READ_WHEN[name](config)
                if flag(name) in words or (reads and tried[name]):
                    continue
                found = [outcome((*words, *given), name) for given in islice(words_of(setting), 2)]
                tried[name] |= bool(reads) and "taken" in found
                wrong += [f"{mode}: {flag(name)} is said to be without effect"] * bool(reads and "noted" in found)
                accepted = name in ACCEPTED and (name != "train_vision" or "--model" not in words)
                wrong += [f"{mode}: nothing reads {flag(name)}"] * (not reads and "taken" in found and not accepted)
    assert not wrong, "\n".join(wrong)
    assert {name for name, taken in tried.items() if not taken} - LEFT_OUT.keys() - ACCEPTED.keys() == set()


def test_every_other_setting_reaches_a_part(tmp_path: Path) -> None:
    with simulated(MACHINES["cpu"], tmp_path):
        before, unread = parts(CALCULATOR), []
        for name, setting in table({}).items():
            found = [parts((*CALCULATOR, *given)) for given in islice(words_of(setting), 3)] if name not in READ_WHEN else []
            plans = [plan for plan in found if plan]
            unread += [name] * (bool(plans) and all(plan == before for plan in plans))
    assert unread == []


def parts(words: tuple[str, ...]) -> str:
    """Return what the parts of a run receive, or nothing if it is refused."""
    try:
        plan = RunPlan.of(read_train(words), named=False)
    except (ConfigError, SystemExit):
        return ""
    return repr((plan.cluster, plan.flow, plan.evaluation, plan.inputs, plan.track))


def test_settings_with_a_condition_exist() -> None:
    known = {*settings_of(TrainConfig), *built_in_options(), *(item.name for kind in POLICY_LOSSES.values() for item in options(kind))}
    assert {*READ_WHEN, *LEFT_OUT, *ACCEPTED, *EXTRA} - known == set()


def options(loss: Any) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(facts_of(loss).options)


OTHER = {"dual_clip": 3.0, "clip_cov_range": (0.1, 9.0), "cov_share": 0.3}


def gradient(loss: Any, chosen: Any, moved: float) -> torch.Tensor:
    draw = torch.Generator().manual_seed(0)
    old, step, advantages = (torch.randn(64, generator=draw) for _ in range(3))
    new = (old - 2 + moved * step).requires_grad_()
    inputs = LossInputs(new=new, old=old - 2, advantages=3 * advantages, sequence=torch.arange(64) // 8)
    inputs = dataclasses.replace(inputs, selected=select_tokens(loss, inputs, chosen))
    (found,) = torch.autograd.grad(compute_policy_loss(loss, inputs, chosen).per_token.sum(), new)
    return found


@pytest.mark.parametrize("name", list(POLICY_LOSSES))
def test_options_of_losses_act_once_the_policy_has_moved(name: str) -> None:
    loss = POLICY_LOSSES[name]
    kind = facts_of(loss).options
    for item in options(loss):
        other = kind(**{item.name: OTHER[item.name] if item.name in OTHER else item.default * 3 + 0.07})
        acts = [not torch.allclose(gradient(loss, kind(), moved), gradient(loss, other, moved), atol=1e-7) for moved in (0.0, 0.6, 3.0)]
        assert acts[0] == (name == "clip_cov" and item.name in ("cov_share", "clip_cov_range")), item.name
        assert any(acts), item.name


def test_a_note_names_the_flags_and_the_reason(tmp_path: Path) -> None:
    words = (*CALCULATOR, "--eps-clip-high", "0.28", "--dual-clip", "3", "--fp32-lm-head", "--gpu-memory-utilization", "0.5")
    with simulated(MACHINES["cpu"], tmp_path):
        notes = RunPlan.of(read_train(words), named=False).notes
    idle = [note.removeprefix(UNUSED_NOTE) for note in notes if note.startswith(UNUSED_NOTE)]
    assert [note.partition(": ")[0] for note in idle] == ["--eps-clip-high, --dual-clip", "--gpu-memory-utilization", "--fp32-lm-head"]
    assert "--mini-batches" in idle[0]


def test_a_run_that_goes_on_keeps_settings_without_effect(tmp_path: Path) -> None:
    saved = tmp_path / "config.json"
    saved.write_text('{"agent": "envs/calculator.py", "kl_estimator": "k3"}')
    with pytest.raises(ConfigError, match=r"--kl-estimator = 'k3': has no effect without a KL penalty"):
        checked_steps(read_train(("--config", str(saved))))
    checked_steps(read_train(("--config", str(saved), "--resume", str(tmp_path))))


def test_defaults_of_a_model_are_nobodys_word() -> None:
    steps = checked_steps(read_train((*CALCULATOR, "--model", "nobody/has-this-model")))
    assert steps.settings.learner.critic_learning_rate == 1e-5


def test_a_default_that_is_written_out_is_accepted() -> None:
    checked_steps(read_train((*CALCULATOR, "--value-clip", "0.2", "--kl-estimator", "k1", "--lr-warmup-steps", "50")))
    of_model = ("--model", "nobody/has-this-model", "--critic-learning-rate", "1e-5")
    checked_steps(read_train((*CALCULATOR, *of_model)))

"""Settings of earlier versions: files of runs that have them are read, and flags are answered with what took their place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentrl.config.earlier import ANY, REMOVED, REPLACED, renewed
from agentrl.config.mapping import differences, from_mapping
from agentrl.config.schema import TrainConfig
from agentrl.config.sections import settings_of
from agentrl.core.errors import ConfigError, UnknownFlagError
from agentrl.core.settings import flag
from agentrl.resolve.commands import load_config

AGENT = ["--agent", "module:Name"]
TAKEN = {
    "adam_beta2",
    "deepcompile",
    "dynamic_filtering",
    "dynamic_filtering_range",
    "enforce_eager",
    "use_dora",
    "use_rslora",
    "wandb_project",
}
"""Settings whose flags are still taken, as words of another system."""
OLD: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "offload": ({"optimizer_offload": True, "reference_offload": False, "ema_offload": True}, {"offload": ["optimizer", "ema"]}),
    "checks": ({"check_env": False, "certify": True, "check_memory": False}, {"skip_checks": ["env", "memory"]}),
    "adapters": ({"use_rslora": True, "use_dora": True}, {"lora_variant": ["rslora", "dora"]}),
    "betas": ({"adam_beta1": 0.8, "adam_beta2": 0.99}, {"adam_betas": [0.8, 0.99]}),
    "one beta": ({"adam_beta2": 0.99}, {"adam_betas": [0.9, 0.99]}),
    "deepspeed": (
        {"zero_hpz_size": 4, "zero_quantized_weights": True, "fp32_communication": True, "deepcompile": False},
        {"deepspeed_args": ["zero_hpz_partition_size=4", "zero_quantized_weights", "communication_data_type=fp32"]},
    ),
    "deepspeed, both": ({"deepspeed_args": ["a=1"], "deepcompile": True}, {"deepspeed_args": ["a=1", "deepcompile"]}),
    "deepspeed, nothing": ({"zero_hpz_size": 1, "zero_quantized_gradients": False}, {"deepspeed_args": []}),
    "old log-probabilities": ({"reuse_behaviour_logprobs": True, "interpolate_old_logprobs": False}, {"old_logprobs": "behaviour"}),
    "interpolated": ({"interpolate_old_logprobs": True}, {"old_logprobs": "interpolated"}),
    "recomputed": ({"reuse_behaviour_logprobs": False}, {"old_logprobs": "recomputed"}),
    "limits": ({"env_memory_mib": 512, "env_cpu_s": 600.0, "env_processes": 0}, {"env_limits": ["memory_mib=512", "processes=0"]}),
    "services": ({"wandb_project": "mine", "trackio_project": "", "sink": ["own.py:Sink"]}, {"sink": ["own.py:Sink", "wandb:mine"]}),
    "record": ({"record": "budget", "record_mib": 8.0}, {"record": 8.0}),
    "record all": ({"record": "all", "record_mib": 256.0}, {"record": "all"}),
    "record, usual": ({"record": "budget"}, {"record": 256.0}),
    "partners": (
        {"partner": ["bob=past", "eve=model:DIR"], "partner_every": 5, "partner_pool": 4},
        {"partner": ["bob=past#every=5&pool=4", "eve=model:DIR"]},
    ),
    "partners, usual": ({"partner": ["bob=past"], "partner_every": 50, "partner_pool": 4}, {"partner": ["bob=past"]}),
    "group reward alone": ({"group_reward_mode": "replace"}, {"environment_reward_weight": 0.0}),
    "group reward": ({"group_reward_mode": "add", "environment_reward_weight": 0.5}, {"environment_reward_weight": 0.5}),
    "filtering": (
        {"dynamic_filtering": True, "dynamic_filtering_range": [0.0, 1.0]},
        {"flat_groups": "resample", "score_range": [0.0, 1.0]},
    ),
    "filtering alone": ({"dynamic_filtering": True}, {"flat_groups": "resample", "score_range": [0.0, 1.0]}),
    "no filtering": ({"dynamic_filtering": False, "dynamic_filtering_range": [0.0, 1.0]}, {"flat_groups": "train"}),
    "eager": ({"enforce_eager": True, "engine_args": ["a=1"]}, {"engine_args": ["a=1", "enforce_eager"]}),
    "branches": ({"branch_at": "entropy", "branch_entropy": 0.5}, {"branch_at": "entropy:0.5"}),
    "branches, usual": ({"branch_at": "entropy", "branch_entropy": 0.2}, {"branch_at": "entropy"}),
    "no branches": ({"branch_entropy": 0.2}, {"branch_at": "never"}),
    "curriculum": ({"task_sampling": "curriculum", "curriculum_key": "level"}, {"task_sampling": "curriculum:level"}),
    "no curriculum": ({"task_sampling": "failures", "curriculum_key": ""}, {"task_sampling": "failures"}),
}


@pytest.mark.parametrize("name", OLD)
def test_earlier_settings_become_those_of_this_version(name: str) -> None:
    old, new = OLD[name]
    assert renewed({"seed": 3, **old}) == {"seed": 3, **new}
    config = from_mapping(TrainConfig, old)
    loaded = {key: getattr(getattr(config, settings_of(TrainConfig)[key].section), key) for key in new}
    assert json.loads(json.dumps(loaded)) == new


def test_every_setting_that_was_replaced_is_tried() -> None:
    assert {old for each in REPLACED for old in each.old} - {old for settings, _ in OLD.values() for old in settings} == {
        "activation_offload",
        "env_file_mib",
        "env_open_files",
    }
    table = settings_of(TrainConfig)
    assert all(each.new in table for each in REPLACED)
    assert not table.keys() & {*REMOVED, *(old for each in REPLACED for old in each.old)}


def test_a_run_of_an_earlier_version_is_the_same_run() -> None:
    config = from_mapping(TrainConfig, {"agent": "a.py", "adam_betas": (0.8, 0.95), "old_logprobs": "behaviour"})
    saved = {"learner": {"adam_beta1": 0.8, "adam_beta2": 0.95}, "algo": {"reuse_behaviour_logprobs": True}, "run": {"agent": "a.py"}}
    assert differences(saved, config) == []
    assert differences({**saved, "learner": {"adam_beta1": 0.9}}, config) == ["--adam-betas (was [0.9, 0.95], now [0.8, 0.95])"]


@pytest.mark.parametrize("name", sorted({*REMOVED, *(old for each in REPLACED for old in each.old)} - TAKEN))
def test_an_earlier_flag_is_answered_with_what_holds_now(name: str) -> None:
    with pytest.raises(UnknownFlagError) as caught:
        load_config([*AGENT, flag(name), "1"])
    (answer,) = str(caught.value).splitlines()[-1:]
    became = REMOVED[name].answer if name in REMOVED else next(each.answer for each in REPLACED if name in each.old)
    assert flag(name) in answer
    assert became in answer


def test_a_removed_setting_that_changed_a_run_is_refused_in_its_file(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    for name, removed in REMOVED.items():
        if removed.neutral is ANY:
            path.write_text(json.dumps({"agent": "module:Name", name: 12345}))
            load_config(["--config", str(path)])
            continue
        path.write_text(json.dumps({"agent": "module:Name", name: removed.neutral}))
        load_config(["--config", str(path)])
        path.write_text(json.dumps({"agent": "module:Name", name: 12345}))
        with pytest.raises(ConfigError, match=f"{name} = 12345: .*Delete it there, or set it to "):
            load_config(["--config", str(path)])

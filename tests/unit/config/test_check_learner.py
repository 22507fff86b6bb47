from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentrl.config.learner_rules import check_learner
from agentrl.config.sections import changed
from agentrl.core.errors import ConfigError
from agentrl.resolve.commands import load_config

AGENT = ["--agent", "module:Name"]


@pytest.mark.parametrize(
    "flags",
    [
        ["--mini-batches", "17"],
        ["--use-kl-loss"],
        ["--kl-target", "0.1"],
        ["--ref-reset-every", "5"],
        ["--critic-warmup-steps", "3"],
        ["--reward-clip-range", "1", "2"],
        ["--dual-clip", "0.5"],
        ["--ema-decay", "1"],
        ["--deepspeed-args", "zero_hpz_partition_size=2"],
        ["--deepspeed-args", "zero_hpz_partition_size=3", "--zero-stage", "3", "--num-learners", "4"],
        ["--deepspeed-args", "zero_hpz_partition_size=2", "--zero-stage", "3", "--num-learners", "4", "--advantage-estimator", "gae"],
        ["--deepspeed-args", "communication_data_type=fp32", "--zero-stage", "0"],
        ["--learner-tensor-parallel", "3", "--num-learners", "4"],
        ["--learner-tensor-parallel", "2", "--num-learners", "4", "--lora-rank", "8"],
        ["--learner-tensor-parallel", "2", "--num-learners", "4", "--sequence-parallel", "2"],
        ["--learner-tensor-parallel", "2", "--num-learners", "4", "--ema-decay", "0.9"],
        ["--compile-layers", "--zero-stage", "3"],
        ["--compile-layers", "--tiled-mlp"],
    ],
)
def test_settings_without_effect_or_sense_are_refused_by_name(flags: list[str]) -> None:
    with pytest.raises(ConfigError, match=flags[0]):
        load_config([*AGENT, *flags])


def test_the_same_settings_in_their_place_are_accepted() -> None:
    kl = ["--init-kl-coef", "0.1", "--use-kl-loss", "--kl-estimator", "k2", "--kl-target", "0.1", "--ref-reset-every", "5"]
    config = load_config([*AGENT, *kl, "--advantage-estimator", "gae", "--critic-warmup-steps", "3", "--mini-batches", "16"])
    assert config.learner.critic_warmup_steps == 3
    assert config.algo.kl_target == 0.1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--num-learners", "3", "--sequence-parallel", "2"], "--sequence-parallel = 2: does not divide --num-learners 3"),
        (["--num-learners", "2", "--sequence-parallel", "2", "--attn-implementation", "sdpa"], "--sequence-parallel = 2: needs packed"),
        (["--offload", "activations"], "--offload = 'activations': needs a GPU"),
    ],
)
def test_settings_for_long_rows_fit_together(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config([*AGENT, *flags])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--deepspeed-args", "zero_quantized_weights"], "--deepspeed-args = 'zero_quantized_weights': has no effect with --zero-stage 2"),
        (["--offload", "reference"], "--offload = 'reference': has nothing to move"),
        (["--offload", "reference", "--init-kl-coef", "0.1", "--lora-rank", "8"], "the reference is the model with its adapter off"),
        (["--offload", "ema"], "--offload = 'ema': has nothing to move"),
        (["--offload", "optimizer", "--zero-stage", "0"], "--offload = 'optimizer': has no effect with --zero-stage 0"),
    ],
)
def test_settings_that_have_nothing_to_act_on_are_refused(flags: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.core.process.cuda_device_count", lambda: 8)
    with pytest.raises(ConfigError, match=message):
        load_config([*AGENT, *flags])


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("flags", "gpus", "message"),
    [
        (["--weight-transport", "nccl"], 0, "--weight-transport = 'nccl': needs GPUs"),
        (["--weight-transport", "nccl", "--engine", "transformers"], 8, "--weight-transport = 'nccl': needs vLLM"),
        (["--weight-transport", "ipc"], 8, "share a GPU.*Add --colocate"),
        (["--weight-transport", "nccl", "--colocate"], 8, "two processes on one GPU"),
        (["--weight-transport", "disk", "--lora-rank", "8", "--publish", "adapter"], 8, "does not go with --publish adapter"),
    ],
)
def test_weights_take_a_path_that_is_there(flags: list[str], gpus: int, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.core.process.cuda_device_count", lambda: gpus)
    with pytest.raises(ConfigError, match=message):
        load_config([*AGENT, *flags])


@pytest.mark.vllm
def test_a_core_on_a_thread_is_for_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.core.process.cuda_device_count", lambda: 1)
    with pytest.raises(ConfigError, match=r"--engine-core = 'thread': is for engines on a CPU.*Use --engine-core process, or --device cpu"):
        load_config([*AGENT, "--engine-core", "thread"])
    with pytest.raises(ConfigError, match="--engine-core = 'thread'"):
        load_config([*AGENT, "--engine-core", "thread", "--ray-address", "auto"])
    for flags in (["--engine-core", "process"], ["--engine-core", "thread", "--device", "cpu"]):
        engine = load_config([*AGENT, *flags]).engine
        assert engine.core_on_thread("cpu") == ("thread" in flags)
    auto = load_config(AGENT).engine
    assert auto.core_on_thread("cpu")
    assert not auto.core_on_thread("cuda")


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--async"], "--async = 1: engines and learner take turns.*Leave out --async, or add --sleep-level 0"),
        (["--max-staleness", "2"], "--max-staleness = 2: engines and learner take turns"),
        (["--tensor-parallel-size", "2"], "2 x 2 GPUs, 2 ranks.*equal to --num-learners 2"),
        (["--zero-stage", "1"], "--zero-stage = 1: cannot be moved to CPU memory in bfloat16.*Use --zero-stage 2"),
        (["--sleep-level", "2", "--lora-rank", "8", "--publish", "adapter"], "--sleep-level = 2: drops the weights.*Use --sleep-level 1"),
        (["--no-colocate", "--sleep-level", "2"], "--sleep-level = 2: has no effect without --colocate"),
        (["--no-colocate", "--learner-memory-gib", "9"], "--learner-memory-gib = 9.0: has no effect without --colocate"),
    ],
)
def test_shared_gpus_are_divided(flags: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.core.process.cuda_device_count", lambda: 8)
    with pytest.raises(ConfigError, match=message):
        load_config([*AGENT, "--colocate", "--num-engines", "2", "--num-learners", "2", *flags])


@pytest.mark.vllm
def test_shared_gpus_with_wide_engines_or_without_turns_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.core.process.cuda_device_count", lambda: 8)
    wide = load_config([*AGENT, "--colocate", "--num-engines", "2", "--tensor-parallel-size", "2", "--num-learners", "4"])
    assert wide.weights.sleeps
    both = load_config([*AGENT, "--colocate", "--async", "--sleep-level", "0", "--zero-stage", "1"])
    assert not both.weights.sleeps


def test_long_rows_over_all_ranks_are_accepted() -> None:
    load_config([*AGENT, "--num-learners", "4", "--sequence-parallel", "2", "--tiled-mlp"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--zero-stage", "0"], "has no effect with --zero-stage 0"),
        (["--advantage-estimator", "gae"], "trains a critic beside the policy"),
        (["--compile-layers"], "does not go with --compile-layers"),
        (["--offload", "optimizer"], "does not go with --offload optimizer"),
        (["--lora-rank", "8"], "does not go with --lora-rank"),
    ],
)
def test_deepcompile_needs_a_gpu_and_one_whole_model(flags: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="--deepspeed-args = 'deepcompile': needs a GPU, and this machine has none"):
        load_config([*AGENT, "--deepspeed-args", "deepcompile"])
    monkeypatch.setattr("agentrl.core.process.cuda_device_count", lambda: 2)
    assert load_config([*AGENT, "--deepspeed-args", "deepcompile"]).learner.deepspeed_args == ("deepcompile",)
    with pytest.raises(ConfigError, match=f"--deepspeed-args = 'deepcompile': .*{message}"):
        load_config([*AGENT, "--deepspeed-args", "deepcompile", *flags])


@pytest.fixture
def experts(tmp_path: Path) -> list[str]:
    """Flags of a mixture of experts, of which only the configuration is read."""
    sizes = {"hidden_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1, "vocab_size": 8, "intermediate_size": 8}
    routed = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "model_type": "qwen3_moe"}
    (tmp_path / "config.json").write_text(json.dumps(sizes | routed), encoding="utf-8")
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    return [*AGENT, "--model", str(tmp_path), "--router-replay"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--engine", "vllm"], r"cannot be had from vLLM on a CPU.*Triton. Use --engine transformers"),
        (["--engine", "transformers", "--compile-layers"], "does not go with --compile-layers"),
        (["--engine", "transformers", "--num-learners", "2", "--learner-tensor-parallel", "2"], "does not go with --router-replay"),
        (["--engine", "transformers", "--model", ""], "needs a mixture of experts, and the model is none"),
    ],
)
def test_router_replay_needs_experts_and_an_engine_that_reports_them(experts: list[str], flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config([*experts, *flags])


def test_vllm_on_a_gpu_may_report_experts_without_pipelines(experts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.core.process.cuda_device_count", lambda: 3)
    assert load_config([*experts, "--engine", "vllm"]).algo.router_replay
    with pytest.raises(ConfigError, match="pipeline parallelism"):
        load_config([*experts, "--engine", "vllm", "--engine-args", "pipeline_parallel_size=2"])
    with pytest.raises(ConfigError, match="--router-replay"):
        load_config([*experts, "--engine", "vllm", "--engine-args", "enable_return_routed_experts=true"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--optimizer", "muon", "--zero-stage", "2"],
            "--zero-stage = 2: gives optimizers flattened parts of matrices, and muon",
        ),
        (["--optimizer", "muon", "--learner-dtype", "bfloat16"], "--learner-dtype = 'bfloat16': has float32 master weights in ZeRO 1 to 3"),
        (
            ["--optimizer", "adafactor", "--adam-betas", "0.8", "0.95"],
            r"--adam-betas = \(0.8, 0.95\): has no effect with --optimizer adafactor",
        ),
        (["--optimizer", "muon", "--learner-tensor-parallel", "2", "--num-learners", "2"], "--learner-tensor-parallel = 2: goes with"),
    ],
)
def test_optimizers_are_refused_where_they_cannot_work(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config([*AGENT, *flags])


def test_an_optimizer_of_whole_matrices_has_its_own_defaults() -> None:
    for name in ("muon", "adafactor"):
        learner = load_config([*AGENT, "--optimizer", name]).learner
        assert (learner.zero_stage, learner.dtype("cuda"), learner.dtype("cpu")) == (0, "float32", "float32")
    assert load_config([*AGENT, "--optimizer", "muon", "--adam-betas", "0.8", "0.9"]).learner.adam_betas == (0.8, 0.9)
    learner = load_config(AGENT).learner
    assert (learner.zero_stage, learner.dtype("cuda")) == (2, "bfloat16")


def test_an_optimizer_of_a_missing_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.config.learner_rules.importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"--optimizer = 'adamw_8bit': needs bitsandbytes, .*pip install 'agentrl\[qlora\]'"):
        load_config([*AGENT, "--optimizer", "adamw_8bit"])
    monkeypatch.setattr("agentrl.config.learner_rules.importlib.util.find_spec", lambda name: object())
    assert load_config([*AGENT, "--optimizer", "adamw_8bit", "--zero-stage", "3"]).learner.optimizer == "adamw_8bit"
    for name, value in (("offload", "optimizer"), ("deepspeed_args", "deepcompile")):
        with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} = '{value}': goes with --optimizer adamw only"):
            check_learner(changed(load_config([*AGENT, "--optimizer", "adamw_8bit"]), **{name: (value,)}))


@pytest.mark.parametrize(
    ("argument", "problem"),
    [
        ("zero_hpz_partition=2", "'zero_hpz_partition': is no argument that can be set. Did you mean zero_hpz_partition_size"),
        ("stage=3", "'stage': is no argument that can be set. Choose of zero_hpz_partition_size"),
        ("zero_hpz_partition_size=0", "'zero_hpz_partition_size=0': must be an integer from 1"),
        ("zero_hpz_partition_size", "'zero_hpz_partition_size=True': must be an integer from 1"),
        ("deepcompile=1", "'deepcompile=1': must be true or false"),
        ("communication_data_type=32", "'communication_data_type=32': must be a data type, such as fp32"),
    ],
)
def test_a_wrong_argument_of_deepspeed_is_refused(argument: str, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.config.engine_rules.may_have_gpus", lambda config: True)
    with pytest.raises(ConfigError, match=f"--deepspeed-args = {problem}"):
        load_config([*AGENT, "--zero-stage", "3", "--deepspeed-args", argument])


@pytest.mark.parametrize("argument", ["zero_hpz_partition_size=1", "zero_quantized_weights=false", "deepcompile=False"])
def test_an_argument_of_deepspeed_that_changes_nothing_needs_nothing(argument: str) -> None:
    load_config([*AGENT, "--zero-stage", "2", "--deepspeed-args", argument])

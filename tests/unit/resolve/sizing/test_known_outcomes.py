"""Plans of configurations whose outcome is known: latent attention, experts, quantised engines, adapters, shared GPUs, narrow machines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentrl.cli.main import main
from agentrl.config.schema import TrainConfig
from agentrl.config.sections import changed
from agentrl.core.errors import ConfigError
from agentrl.core.model_shape import ModelShape, find_shape, shape_of
from agentrl.resolve.memory import memory_sign
from agentrl.resolve.sizing.memory import GIB, engine_plan, host_bytes, learner_parts, micro_batch_parts
from agentrl.resolve.sizing.plan import Hardware, Plan, Workload, divide, make_plan
from agentrl.resolve.sizing.search import remedies

ROOT = Path(__file__).parents[4]
MODELS, FAMILIES = ROOT / "docs" / "models", ROOT / "tests" / "model_configs"
SEVEN = find_shape(str(MODELS / "qwen2.5-7b.json"))
CARD = 80 * GIB


def family(name: str, **other: Any) -> ModelShape:
    return shape_of(json.loads((FAMILIES / f"{name}.json").read_text(encoding="utf-8")) | other)


def thirty_two() -> ModelShape:
    sizes = json.loads((MODELS / "qwen2.5-72b.json").read_text(encoding="utf-8"))
    return shape_of(sizes | {"hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 40})


def planned(shape: ModelShape, gpus: int, **settings: Any) -> Plan:
    hardware = Hardware(gpus=gpus, gpu_bytes=CARD)
    return make_plan(divide(changed(TrainConfig(), gradient_checkpointing=True, **settings), shape, hardware), shape, hardware, Workload())


def test_the_parameters_of_deepseek_v3_are_those_of_transformers() -> None:
    import torch
    from transformers import AutoModelForCausalLM, DeepseekV3Config

    sizes = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    narrow = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10, "vocab_size": 128}
    experts = {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    }
    config = DeepseekV3Config(**sizes, **narrow, **experts)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = shape_of(json.loads(json.dumps(config.to_dict())))
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert family("deepseek-v3").parameters == pytest.approx(671.03e9, rel=1e-3)  # published, without the head for further tokens


def test_the_narrow_vector_of_latent_attention_is_on_every_gpu() -> None:
    """By hand: (512 + 64) numbers of 2 bytes in each of 61 layers; 32 GPUs divide the weights and not the cache."""
    shape = family("deepseek-v3", quantization_config=None)
    found = engine_plan(changed(TrainConfig(), tensor_parallel_size=32), shape, CARD)
    free = 0.9 * CARD - shape.parameters * 2 / 32 - 2.5 * GIB
    assert found.cache_tokens == pytest.approx(free / (61 * 576 * 2), rel=1e-6)
    assert found.cache_tokens == pytest.approx(466_000, rel=0.1)


@pytest.mark.parametrize(("name", "gib"), [("qwen3-235b-a22b", 4.5), ("deepseek-v3", 21.0)])
def test_a_block_of_experts_is_gathered_whole(name: str, gib: float) -> None:
    config = changed(TrainConfig(), zero_stage=3, num_learners=64)
    buckets = 0.25 * (2 + 2 + 4 / 64)  # GiB: the bucket, a copy of it while it is summed, and the rank's part in float32
    assert learner_parts(config, family(name))["buffers"] / GIB - 1 - buckets == pytest.approx(gib, rel=0.03)


def test_few_tokens_of_experts_need_the_gradient_of_their_first_two_matrices() -> None:
    """By hand: 128 experts of three matrices of 2,048 by 768, of which two have one gradient of 2 bytes a number."""
    parts = micro_batch_parts(find_shape(str(MODELS / "qwen3-30b-a3b.json")), 16, width=2, checkpointing=True)
    assert sum(parts.values()) == pytest.approx(128 * 2 * 2048 * 768 * 2, rel=0.05)


@pytest.mark.parametrize(("name", "whole"), [("qwen2.5-7b", 2), ("qwen2.5-1.5b", 1)])
def test_tensor_parallel_learners_divide_layers_and_keep_embedding_and_output_layer(name: str, whole: int) -> None:
    shape = find_shape(str(MODELS / f"{name}.json"))
    config = changed(TrainConfig(), zero_stage=1, num_learners=2, learner_tensor_parallel=2, learner_dtype="bfloat16")
    apart = whole * shape.embedding  # which is one tensor where they are tied
    assert learner_parts(config, shape)["parameters"] == pytest.approx(2 * (apart + (shape.parameters - apart) / 2))


@pytest.mark.parametrize(
    ("arguments", "weights", "number"),
    [
        ((), 2.0, 2),
        (("quantization=fp8", "kv_cache_dtype=fp8"), 1.0, 1),
        (("quantization=awq",), 0.516, 2),
        (("pipeline_parallel_size=2",), 2.0, 2),
    ],
)
def test_quantised_engines_and_caches_hold_more(arguments: tuple[str, ...], weights: float, number: int) -> None:
    stages = 2 if "pipeline_parallel_size=2" in arguments else 1
    found = engine_plan(changed(TrainConfig(), engine_args=arguments), SEVEN, CARD)
    whole = 2 * SEVEN.embedding
    assert found.weights == pytest.approx((whole * 2 + (SEVEN.parameters - whole) * weights) / stages)
    assert found.cache_tokens == pytest.approx(found.cache / (28 / stages * 2 * 4 * 128 * number), rel=1e-6)


def test_host_memory_of_an_adapter_is_that_of_the_engine_and_the_adapter() -> None:
    turns = changed(TrainConfig(), num_engines=8, num_learners=8, colocate=True, lora_rank=16, gradient_checkpointing=True)
    assert 14 < host_bytes(turns, SEVEN) / GIB < 30
    assert host_bytes(changed(turns, lora_rank=0), SEVEN) / GIB > 30


@pytest.mark.parametrize(
    ("shape", "gpus", "wide"), [(find_shape(str(MODELS / "qwen2.5-72b.json")), 32, 4), (thirty_two(), 8, 1)], ids=["72b", "32b"]
)
def test_wide_engines_let_large_models_share_gpus(shape: ModelShape, gpus: int, wide: int) -> None:
    plan = planned(shape, gpus, colocate=True)
    assert plan.problems
    best = remedies(plan, Workload())[0]
    engine = best.plan.config.engine
    assert (best.plan.problems, engine.tensor_parallel_size) == ([], wide)
    assert engine.num_engines * wide == best.plan.config.learner.num_learners == gpus
    assert (f"--tensor-parallel-size {wide}" in best.flags) == (wide > 1)


def test_one_gpu_is_shared() -> None:
    small = find_shape(str(MODELS / "qwen2.5-1.5b.json"))
    turns, resident = planned(small, 1), planned(small, 1, asynchronous=True)
    assert (turns.problems, turns.config.weights.sleeps) == ([], True)
    assert (resident.problems, resident.config.weights.sleeps) == ([], False)


def test_an_engine_wider_than_a_machine_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--model", str(MODELS / "qwen2.5-72b.json"), "--gpus", "64", "--num-learners", "32", "--zero-stage", "3"]
    wide = [*words, "--tensor-parallel-size", "16", "--num-engines", "2"]
    assert main(wide) == 1
    assert "an engine of 16 GPUs has to be on one machine, and a machine has 8 (--gpus-per-node)" in capsys.readouterr().out
    assert main([*wide, "--gpus-per-node", "16"]) == 0
    shape = family("deepseek-v3")
    hardware = Hardware(gpus=256, gpu_bytes=CARD)
    assert divide(TrainConfig(), shape, hardware).engine.tensor_parallel_size == 8


SMALL, MIDDLE, LARGE = (f"qwen2.5-{size}" for size in ("1.5b", "7b", "72b"))
OUTCOMES: list[tuple[str, int, float, dict[str, Any], bool]] = [
    (SMALL, 1, 80, {}, True),  # one GPU without a flag
    (SMALL, 1, 24, {"asynchronous": True}, False),  # states of 18 bytes a parameter and an engine
    (SMALL, 1, 24, {"asynchronous": True, "lora_rank": 16}, True),
    (MIDDLE, 1, 24, {"asynchronous": True}, False),
    (MIDDLE, 1, 80, {}, False),  # 133 GiB of states
    (MIDDLE, 1, 80, {"offload": ("optimizer",)}, True),
    (MIDDLE, 1, 48, {"lora_rank": 16}, True),
    (MIDDLE, 8, 80, {}, True),
    (MIDDLE, 8, 80, {"gradient_checkpointing": False}, False),
    ("qwen3-30b-a3b", 16, 80, {}, False),  # 122 GiB on a rank of ZeRO-2
    ("qwen3-30b-a3b", 16, 80, {"zero_stage": 3}, True),
    (LARGE, 32, 80, {"zero_stage": 3}, False),
    (LARGE, 32, 80, {"zero_stage": 3, "num_learners": 24, "micro_batch_tokens": 4096}, True),  # as the recipe divides them
    (LARGE, 32, 80, {"zero_stage": 3, "colocate": True, "tensor_parallel_size": 4}, True),
    (LARGE, 32, 80, {"zero_stage": 3, "colocate": True, "tensor_parallel_size": 1}, False),  # an engine needs 135 GiB
    (LARGE, 64, 80, {"zero_stage": 3, "tensor_parallel_size": 16}, False),  # wider than a machine
    ("deepseek-v3", 64, 80, {"zero_stage": 3}, False),  # 12 TB of states
]


@pytest.mark.parametrize(("name", "gpus", "gib", "settings", "fits"), OUTCOMES)
def test_verdicts_are_right(name: str, gpus: int, gib: float, settings: dict[str, Any], fits: bool) -> None:
    published = MODELS / f"{name}.json"
    shape = find_shape(str(published)) if published.exists() else family(name)
    config = changed(TrainConfig(), gradient_checkpointing=True, micro_batch_tokens=8192 if shape.parameters > 2e10 else 16384)
    config = changed(config, **settings)
    hardware = Hardware(gpus=gpus, gpu_bytes=gib * GIB)
    plan = make_plan(divide(config, shape, hardware, settings.keys()), shape, hardware, Workload())
    assert (not plan.problems) == fits, plan.problems


def test_a_cache_that_may_be_too_small_is_a_warning_and_weights_that_are_too_large_an_error() -> None:
    """An engine in fp8 has room where one in bfloat16 has none; what it needs beside its weights is partly assumed."""
    config = changed(TrainConfig(), model=str(MODELS / "qwen2.5-7b.json"), num_learners=16, zero_stage=3, gradient_checkpointing=True)
    config = changed(config, micro_batch_tokens=1024, offload=("optimizer",))
    with pytest.raises(ConfigError, match="KV cache"):
        memory_sign(config, 15.5 * GIB)
    assert memory_sign(config, 18 * GIB) is not None
    assert memory_sign(changed(config, engine_args=("quantization=fp8",)), 18 * GIB) is None

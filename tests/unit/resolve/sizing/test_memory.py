"""The memory that a plan computes, against tensors that exist."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest

from agentrl.config.schema import TrainConfig
from agentrl.config.sections import changed
from agentrl.core.errors import ConfigError
from agentrl.core.model_shape import find_shape, read_shape, shape_of
from agentrl.resolve.sizing import memory
from agentrl.resolve.sizing.memory import adapter_parameters, learner_parts, micro_batch_parts, offloaded_bytes
from tests.learner_support import CollectingSender, make_groups, make_settings, write_model

MODELS = Path(__file__).parents[4] / "docs" / "models"
SMALL = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2}


def test_published_numbers_of_parameters_come_out() -> None:
    found = {name: find_shape(str(MODELS / f"{name}.json")).parameters for name in ("qwen2.5-7b", "qwen2.5-72b", "qwen3-30b-a3b")}
    assert found == {"qwen2.5-7b": 7_615_616_512, "qwen2.5-72b": 72_706_203_648, "qwen3-30b-a3b": 30_532_122_624}


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "mixtral"])
def test_parameters_are_those_of_transformers(kind: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "shared_expert_intermediate_size": 80}
    if kind == "mixtral":
        experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    wanted = SMALL | {"vocab_size": 320} | (experts if kind in ("qwen2_moe", "qwen3_moe", "mixtral") else {})
    if kind == "qwen3_moe":
        del wanted["shared_expert_intermediate_size"]
    config = AutoConfig.for_model(kind, **wanted)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = shape_of(json.loads(json.dumps(config.to_dict())))
    assert shape.exact
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("bf16", [True, False])
@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("vocabulary", [2000, pytest.param(80_000, marks=pytest.mark.slow)])
def test_a_micro_batch_needs_what_is_computed(bf16: bool, checkpointing: bool, vocabulary: int) -> None:
    import torch

    from tests.benchmarks.learner_memory import PeakMemory, build, micro_batch

    sizes = SMALL | {"vocab_size": vocabulary, "tie_word_embeddings": False, "intermediate_size": 2048}
    policy, micro = build(sizes, dtype=torch.bfloat16 if bf16 else torch.float32), micro_batch(1024, vocabulary)
    if not checkpointing:
        policy.model.gradient_checkpointing_disable()
    for parameter in policy.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with PeakMemory() as peak:
        peak.ignore(*policy.parameters(), *policy.buffers(), *(parameter.grad for parameter in policy.parameters()))
        policy(micro)[0].sum().backward()
    parts = micro_batch_parts(shape_of(sizes), 1024, width=2 if bf16 else 4, checkpointing=checkpointing)
    assert sum(parts.values()) == pytest.approx(peak.peak, rel=0.1)


def two_layers(name: str) -> dict[str, Any]:
    """Sizes of a published model, but for its depth."""
    published = MODELS / f"{name}.json"
    path = published if published.exists() else MODELS.parents[1] / "tests" / "model_configs" / f"{name}.json"
    other = ("quantization_config", "architectures", "dtype", "torch_dtype", "auto_map")
    sizes = {key: value for key, value in json.loads(path.read_text(encoding="utf-8")).items() if key not in other}
    return {**sizes, "num_hidden_layers": 2} | ({"first_k_dense_replace": 2} if "first_k_dense_replace" in sizes else {})


def peak_of(sizes: dict[str, Any], tokens: int, *, checkpointing: bool, dtype: Any, rank: int) -> int:
    """Peak of a micro-batch by shapes alone, on fake tensors of a GPU where torch is built for one."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from agentrl.learner.lora import add_adapter
    from agentrl.learner.plan import LoraConfig
    from tests.benchmarks.learner_memory import SHAPES_ONLY, PeakMemory, build, micro_batch, register_shapes_only

    register_shapes_only()
    with FakeTensorMode(), torch.device("cuda" if torch.version.cuda else "cpu"), pytest.MonkeyPatch.context() as patch:
        policy, micro = build(sizes, dtype=dtype, kernel=SHAPES_ONLY), micro_batch(tokens, sizes["vocab_size"])
        if rank:
            patch.setattr(torch.nn.Module, "to", lambda module, *_, **__: module)  # parameters that are fake cannot be exchanged
            torch.set_default_dtype(dtype)
            add_adapter(policy.model, LoraConfig(lora_rank=rank), base="none")
            torch.set_default_dtype(torch.float32)
        if not checkpointing:
            policy.model.gradient_checkpointing_disable()
        trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        with PeakMemory() as counted:
            counted.ignore(*policy.parameters(), *policy.buffers(), *(parameter.grad for parameter in trained))
            policy(micro)[0].sum().backward()
    return counted.peak


SHAPES = [
    ("qwen2.5-7b", 8192, True, "bfloat16", 0),
    ("qwen2.5-7b", 32768, True, "bfloat16", 0),
    ("qwen2.5-7b", 8192, False, "bfloat16", 0),
    ("qwen2.5-7b", 4096, True, "float32", 0),
    ("qwen2.5-7b", 8192, True, "bfloat16", 16),
    ("qwen2.5-7b", 8192, False, "bfloat16", 16),
    ("qwen2.5-72b", 8192, True, "bfloat16", 0),
    ("qwen2.5-72b", 4096, False, "bfloat16", 0),
    ("qwen2.5-1.5b", 16384, True, "bfloat16", 0),
    ("qwen3-30b-a3b", 8192, True, "bfloat16", 0),
    ("qwen3-30b-a3b", 4096, False, "bfloat16", 0),
    ("qwen3-235b-a22b", 4096, True, "bfloat16", 0),
    ("glm-4.5", 4096, False, "bfloat16", 0),
    ("deepseek-v3", 8192, True, "bfloat16", 0),
    ("deepseek-v3", 8192, False, "bfloat16", 0),
]


@pytest.mark.parametrize(
    ("name", "tokens", "checkpointing", "dtype", "rank"), [SHAPES[0], *(pytest.param(*each, marks=pytest.mark.slow) for each in SHAPES[1:])]
)
def test_peaks_of_large_models_are_those_by_shapes(name: str, tokens: int, checkpointing: bool, dtype: str, rank: int) -> None:
    import torch

    sizes = two_layers(name)
    peak = peak_of(sizes, tokens, checkpointing=checkpointing, dtype=getattr(torch, dtype), rank=rank)
    width = 2 if dtype == "bfloat16" else 4
    parts = micro_batch_parts(shape_of(sizes), tokens, width=width, checkpointing=checkpointing, frozen=rank > 0)
    assert sum(parts.values()) == pytest.approx(peak, rel=0.1)


def live_storages() -> dict[int, Any]:
    """Storages of the tensors there are, by address; held by the caller, so that no address is used again."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor

    gc.collect()
    things = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor) and not isinstance(thing, FakeTensor)]
    tensors = [thing for thing in things if thing.layout is torch.strided and thing.device.type != "meta"]
    return {storage.data_ptr(): storage for storage in (tensor.untyped_storage() for tensor in tensors)}


SHARDED = [
    (0, "float32", "adamw"),
    (0, "float32", "muon"),
    (0, "float32", "adafactor"),
    pytest.param(0, "bfloat16", "adamw", marks=pytest.mark.slow),
    pytest.param(1, "bfloat16", "adamw", marks=pytest.mark.slow),
    (3, "bfloat16", "adamw"),
    (3, "float32", "adamw"),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("stage", "dtype", "optimizer"), SHARDED)
def test_deepspeed_holds_what_is_computed(stage: int, dtype: str, optimizer: str, tmp_path: Path) -> None:
    from agentrl.learner.learner import LearnerRank

    model = write_model(tmp_path, **(SMALL | {"num_hidden_layers": 4, "vocab_size": 8000}))  # muon is not for embeddings
    before = live_storages()
    learner = LearnerRank(
        make_settings(model, learner={"zero_stage": stage, "learner_dtype": dtype, "optimizer": optimizer}), CollectingSender()
    )
    learner.start(0, 1, 0)
    learner.train(0, *make_groups(2, 2))
    sizes = [storage.nbytes() for address, storage in live_storages().items() if address not in before]
    held = sum(sizes)
    learner.close()
    config = changed(TrainConfig(), zero_stage=stage, num_learners=1, learner_dtype=dtype, optimizer=optimizer)
    parts = learner_parts(config, find_shape(model))
    kept = 0.0 if (stage, dtype) == (0, "float32") else parts["gradients"]  # without ZeRO the gradients are gone after the step
    if stage == 3:  # and its bucket stays
        kept += parts["parameters"]
    assert parts["parameters"] + parts["optimizer"] + kept == pytest.approx(held, rel=0.1)


BUCKET = 2**22


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("stage", "offload"), [(1, False), (2, False), (2, True), (3, False), (3, True)])
def test_the_peak_of_a_whole_step_is_what_is_computed(stage: int, offload: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPU and CPU memory are one here, so the parts of both are added."""
    from agentrl.learner.deepspeed import engine, options
    from agentrl.learner.learner import LearnerRank
    from tests.benchmarks.learner_memory import PeakMemory

    for module in (engine, options, memory):
        monkeypatch.setattr(module, "BUCKET_ELEMENTS", BUCKET)
    model = write_model(tmp_path, **(SMALL | {"num_hidden_layers": 6}))
    before = live_storages()
    settings = {"zero_stage": stage, "learner_dtype": "bfloat16", "offload": ("optimizer",) if offload else ()}
    learner = LearnerRank(make_settings(model, learner=settings), CollectingSender())
    learner.start(0, 1, 0)
    learner.train(0, *make_groups(2, 2))
    there = live_storages()
    held = sum(storage.nbytes() for address, storage in there.items() if address not in before and storage.nbytes() < 2**28)
    with PeakMemory() as step:
        step.ignore_storages(there.values())
        learner.train(1, *make_groups(2, 2, version=1))
    learner.close()
    config, shape = changed(TrainConfig(), num_learners=1, micro_batch_tokens=64, **settings), find_shape(model)
    parts = learner_parts(config, shape)
    planned = sum(parts[name] for name in ("parameters", "gradients", "optimizer", "buffers")) - memory.CONTEXT
    if stage == 3:  # a bound for large models
        planned -= shape.parameters * 2
    if stage == 2 and not offload:  # a rank that is alone has no buckets, which are more than the activations here
        planned += parts["activations"] + parts["logits"]
    assert planned + offloaded_bytes(config, shape) == pytest.approx(held + step.peak, rel=0.1)


def test_a_model_that_is_not_there_or_of_another_form_is_refused(tmp_path: Path) -> None:
    assert read_shape("./no/such") is None
    with pytest.raises(ConfigError, match="there is no"):
        find_shape("./no/such")
    (tmp_path / "config.json").write_text('{"model_type": "mamba", "hidden_size": 8}')
    with pytest.raises(ConfigError, match="num_attention_heads"):
        find_shape(str(tmp_path))


def test_text_models_within_others_are_read() -> None:
    outer: dict[str, Any] = {"model_type": "mistral3", "text_config": {**SMALL, "model_type": "mistral", "vocab_size": 100}}
    assert shape_of(outer).layers == 2
    assert shape_of(outer).model_type == "mistral"


def test_an_adapter_needs_no_gradients_and_no_optimizer_for_the_model() -> None:
    shape, config = find_shape(str(MODELS / "qwen2.5-7b.json")), TrainConfig()

    def parts(**changes: Any) -> dict[str, float]:
        return learner_parts(changed(config, init_kl_coef=0.1, zero_stage=2, **changes), shape)

    whole, adapted, small = parts(), parts(lora_rank=16), parts(lora_rank=16, load_in_4bit=True)
    trained = adapter_parameters(shape, 16)
    assert 0.003 < trained / shape.parameters < 0.008
    assert whole["optimizer"] == 12 * shape.parameters
    assert (adapted["optimizer"], adapted["gradients"]) == (12 * trained, 4 * trained)
    assert adapted["parameters"] == 2 * (shape.parameters + trained)
    assert "reference model" not in adapted
    assert small["parameters"] < 0.5 * adapted["parameters"]
    native = parts(lora_rank=16, publish="adapter")
    assert native["for the engines"] == 2 * trained


def test_the_parameters_of_an_adapter_are_those_of_peft(tmp_path: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from agentrl.learner.lora import add_adapter
    from agentrl.learner.plan import LoraConfig

    folder = write_model(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    add_adapter(model, LoraConfig(lora_rank=4), base=folder)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert adapter_parameters(find_shape(folder), 4) == trained

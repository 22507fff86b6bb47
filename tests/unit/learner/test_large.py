"""What models of billions of parameters need: offloading, communication and compiled layers change no result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from agentrl.core.errors import ConfigError
from agentrl.learner import models
from agentrl.learner.deepspeed import loading
from agentrl.learner.deepspeed.options import deepspeed_config
from agentrl.learner.parameters import on_device
from agentrl.learner.plan import LearnerConfig
from tests.learner_support import gradients, largest_difference, make_groups, make_settings

GROUPS = make_groups(4, 3, seed=2)


def zero(config: LearnerConfig, *, trained: bool = True) -> Any:
    """Settings as DeepSpeed understands them."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    return DeepSpeedZeroConfig(**deepspeed_config(config, bf16=True, trained=trained)["zero_optimization"])


def test_deepspeed_gets_what_is_asked_for() -> None:
    plain = zero(LearnerConfig())
    assert (plain.stage, plain.overlap_comm, plain.offload_optimizer) == (2, True, None)
    config = LearnerConfig(
        zero_stage=3,
        offload=("optimizer", "reference"),
        deepspeed_args=(
            *("zero_hpz_partition_size=8", "zero_quantized_weights", "zero_quantized_gradients=true", "communication_data_type=fp32"),
        ),
    )
    trained, frozen = zero(config), zero(config, trained=False)
    assert (trained.zero_hpz_partition_size, trained.zero_quantized_weights, trained.zero_quantized_gradients) == (8, True, True)
    assert (trained.offload_optimizer.device, trained.offload_param) == ("cpu", None)
    assert (frozen.offload_optimizer, frozen.offload_param.device) == (None, "cpu")
    assert (frozen.zero_hpz_partition_size, frozen.zero_quantized_weights, frozen.zero_quantized_gradients) == (1, True, False)
    assert deepspeed_config(config, bf16=True)["communication_data_type"] == "fp32"
    assert "communication_data_type" not in deepspeed_config(LearnerConfig(), bf16=True)


def test_a_module_in_cpu_memory_is_on_the_device_within_the_block_alone() -> None:
    """A device with a number is another one to torch, although there is one CPU only."""
    module = nn.BatchNorm1d(3)
    before = {name: tensor.data_ptr() for name, tensor in module.state_dict().items()}
    with on_device(module, torch.device("cpu", 0)):
        assert not before.items() & {name: tensor.data_ptr() for name, tensor in module.state_dict().items()}.items()
    assert {name: tensor.data_ptr() for name, tensor in module.state_dict().items()} == before
    with on_device(module, torch.device("cpu")):
        assert {name: tensor.data_ptr() for name, tensor in module.state_dict().items()} == before
    with on_device(lambda micro: micro, torch.device("cpu", 0)):  # an adapter that is off has nothing to move
        pass


def test_other_ranks_read_shapes_and_small_tensors_alone(tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import modeling_utils

    read, file = modeling_utils.load_state_dict, Path(tiny_model) / "model.safetensors"
    whole = read(file)
    monkeypatch.setattr(loading, "BUFFER_BYTES", 200)
    with loading.only_shapes():
        found = modeling_utils.load_state_dict(file, map_location="cpu", weights_only=True)
    assert modeling_utils.load_state_dict is read
    assert {name: tensor.shape for name, tensor in found.items()} == {name: tensor.shape for name, tensor in whole.items()}
    assert {name for name, tensor in found.items() if tensor.device.type == "cpu"} == {name for name in whole if "norm" in name}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_layers_give_the_same_gradients(tiny_model: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = gradients(make_settings(tiny_model), GROUPS)
    compile_layers, compiled = models.compile_layers, list[Any]()

    def compile_quickly(model: Any) -> None:
        compile_layers(model, backend=backend)
        compiled.extend(module for module in model.modules() if module._compiled_call_impl is not None)

    monkeypatch.setattr(models, "compile_layers", compile_quickly)
    for checkpointing in (False, True):
        learner = {"compile_layers": True, "zero_stage": 2, "gradient_checkpointing": checkpointing, "micro_batch_tokens": 60}
        found = gradients(make_settings(tiny_model, learner=learner), GROUPS)
        assert largest_difference(plain, found) < 1e-5
    assert len(compiled) == 4  # two layers, twice
    torch._dynamo.reset()


def test_deepcompile_is_asked_for_and_started(tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels need a GPU, so that here only DeepSpeed's reading of the settings and the call are seen."""
    from deepspeed.compile.config import CompileConfig
    from deepspeed.runtime.engine import DeepSpeedEngine

    assert "compile" not in deepspeed_config(LearnerConfig(), bf16=True)
    config = LearnerConfig(deepspeed_args=("deepcompile",))
    assert CompileConfig(**deepspeed_config(config, bf16=True)["compile"]).deepcompile
    assert "compile" not in deepspeed_config(config, bf16=True, trained=False)
    started = list[bool]()
    monkeypatch.setattr(DeepSpeedEngine, "compile", lambda engine: started.append(engine.is_deepcompile_enabled()))
    settings = make_settings(tiny_model, learner={"deepspeed_args": ("deepcompile",), "zero_stage": 2})
    assert largest_difference(gradients(make_settings(tiny_model), GROUPS), gradients(settings, GROUPS)) < 1e-5
    assert started == [True]


def test_a_model_without_layers_is_not_compiled() -> None:
    with pytest.raises(ConfigError, match="--compile-layers"):
        models.compile_layers(nn.Linear(2, 2))

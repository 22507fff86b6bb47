"""Forms of adapters and of weights on given data: rsLoRA, DoRA, 4 bits, bfloat16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.config.methods import METHODS
from agentrl.core.errors import ConfigError
from agentrl.resolve.tune import load_given
from agentrl.tune import build

DATA = Path(__file__).parents[3] / "examples" / "tune"
OF = {"sft": "chats", "reward-model": "helpful", "process-reward-model": "steps"}


def config(command: str = "sft", **settings: Any) -> Any:
    return load_given(METHODS[command], {"data": str(DATA / f"{OF[command]}.jsonl"), **settings})


def model_of(command: str = "sft", **settings: Any) -> Any:
    return build._trained_model(config(command, **settings), 0)


def test_the_scale_of_rslora_and_the_lengths_of_dora_are_those_of_peft() -> None:
    plain, scaled = model_of(lora_rank=16, lora_alpha=32), model_of(lora_rank=16, lora_alpha=32, lora_variant=("rslora", "dora"))
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    assert plain.get_submodule(name).scaling == {"default": 2.0}
    layer = scaled.get_submodule(name)
    assert layer.scaling == {"default": 8.0}
    assert torch.allclose(layer.lora_magnitude_vector["default"].weight, layer.base_layer.weight.norm(dim=1))
    assert not plain.get_submodule(name).lora_magnitude_vector


def test_weights_in_bfloat16_have_an_adapter_in_float32_beside_them() -> None:
    whole, adapted = model_of(weight_dtype="bfloat16"), model_of(weight_dtype="bfloat16", lora_rank=4)
    assert {parameter.dtype for parameter in whole.parameters()} == {torch.bfloat16}
    assert {parameter.dtype for parameter in adapted.parameters() if parameter.requires_grad} == {torch.float32}
    assert {parameter.dtype for parameter in adapted.parameters() if not parameter.requires_grad} == {torch.bfloat16}
    assert build.arguments(config(weight_dtype="bfloat16"), Path("run"), 1, evaluate_first=False)["bf16"]


@pytest.mark.parametrize("command", OF)
def test_frozen_layers_are_in_4_bits_and_heads_are_whole(command: str) -> None:
    pytest.importorskip("bitsandbytes")
    model = model_of(command, lora_rank=4, load_in_4bit=True)
    small = {
        name.split(".")[-2] for name, module in model.named_modules() if name.endswith("base_layer") and hasattr(module, "quant_state")
    }
    assert small == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    heads = [parameter for name, parameter in model.named_parameters() if "score.modules_to_save" in name]
    assert bool(heads) == (command != "sft")
    assert all(head.dtype == torch.float32 and head.requires_grad for head in heads)
    ids = torch.arange(2, 22)[None]
    with torch.no_grad():
        first = model(input_ids=ids).logits
    assert torch.equal(model(input_ids=ids).logits, first)  # bitsandbytes has another kernel for passes without a gradient


@pytest.mark.parametrize(
    ("settings", "field", "message"),
    [
        ({"load_in_4bit": True}, "--load-in-4bit", "has no effect without an adapter"),
        ({"lora_variant": ("dora",)}, "--lora-variant", "has no effect without an adapter"),
        ({"lora_rank": 4, "lora_variant": ("dora",), "zero_stage": 3}, "--zero-stage", "measures whole rows"),
        ({"lora_rank": 4, "load_in_4bit": True, "zero_stage": 3}, "--zero-stage", "cannot spread weights in 4 bits"),
        ({"weight_dtype": "bfloat16", "dtype": "float32"}, "--dtype", "computes in more digits"),
        ({"weight_dtype": "bfloat16", "zero_stage": 2}, "--zero-stage", "keeps float32 weights beside"),
        ({"liger_kernels": True}, "--liger-kernels", "needs a GPU"),
    ],
)
def test_forms_that_do_not_go_together_are_refused(settings: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        config(**settings)
    assert error.value.field == field


def test_liger_kernels_need_their_package_and_leave_losses_to_us(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.resolve.tune_rules.cuda_device_count", lambda: 1)
    with pytest.raises(ConfigError, match="needs liger-kernel, which is not installed"):
        config(liger_kernels=True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    found = build.arguments(config(liger_kernels=True), Path("run"), 1, evaluate_first=False)
    assert found["use_liger_kernel"]
    assert found["liger_kernel_config"] == {"cross_entropy": False, "fused_linear_cross_entropy": False}

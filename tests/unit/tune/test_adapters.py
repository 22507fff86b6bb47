"""Forms of adapters and of weights on given data: rsLoRA, DoRA, 4 bits, bfloat16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.config.methods import METHODS
from agentrl.core.errors import ConfigError
from agentrl.resolve.tune import load_given
from tests.unit.tune.plans import state_of

DATA = Path(__file__).parents[3] / "examples" / "tune"
OF = {"sft": "chats", "reward-model": "helpful", "process-reward-model": "steps"}


def config(command: str = "sft", **settings: Any) -> Any:
    return load_given(METHODS[command], {"data": str(DATA / f"{OF[command]}.jsonl"), **settings})


def model_of(command: str = "sft", **settings: Any) -> Any:
    return state_of(config(command, **settings)).policy


def test_the_scale_of_rslora_and_the_lengths_of_dora_are_those_of_peft() -> None:
    plain, scaled = model_of(lora_rank=16, lora_alpha=32), model_of(lora_rank=16, lora_alpha=32, lora_variant=("rslora", "dora"))
    name = "model.layers.0.self_attn.q_proj"
    assert plain.get_submodule(name).scaling == {"default": 2.0}
    layer = scaled.get_submodule(name)
    assert layer.scaling == {"default": 8.0}
    assert torch.allclose(layer.lora_magnitude_vector["default"].weight, layer.base_layer.weight.norm(dim=1))
    assert not plain.get_submodule(name).lora_magnitude_vector


@pytest.mark.parametrize("command", OF)
def test_frozen_layers_are_in_4_bits_and_heads_are_whole(command: str) -> None:
    pytest.importorskip("bitsandbytes")
    model = model_of(command, lora_rank=4, load_in_4bit=True)
    small = {
        name.split(".")[-2] for name, module in model.named_modules() if name.endswith("base_layer") and hasattr(module, "quant_state")
    }
    assert small == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    heads = [parameter for name, parameter in model.named_parameters() if name == "score.weight"]
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
        ({"liger_kernels": True}, "--liger-kernels", "is not known to the learner"),
    ],
)
def test_forms_that_do_not_go_together_are_refused(settings: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        config(**settings)
    assert error.value.field == field


@pytest.mark.parametrize("command", ["reward-model", "process-reward-model"])
def test_an_adapter_beside_a_head_is_loaded_with_it(command: str, tmp_path: Path) -> None:
    """The head is trained whole, and peft finds it in the adapter's file."""
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

    state = state_of(config(command, lora_rank=4))
    trained = {name for name, parameter in state.policy.named_parameters() if parameter.requires_grad}
    assert "score.weight" in trained
    assert all("lora_" in name or name.startswith("score.") for name in trained)
    with torch.no_grad():
        for parameter in state.policy.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    state.save(str(tmp_path / "adapter"))
    kind = AutoModelForSequenceClassification if command == "reward-model" else AutoModelForTokenClassification
    base = kind.from_pretrained(state.settings.model, num_labels=1 if command == "reward-model" else 2, dtype=torch.float32)
    loaded = PeftModel.from_pretrained(base, str(tmp_path / "adapter")).get_base_model()
    hidden = torch.randn(3, state.models.hidden_size)
    with torch.no_grad():
        assert torch.equal(loaded.score(hidden), state.policy.score(hidden))
        bodies = [model.model(torch.arange(2, 20)[None]).last_hidden_state for model in (loaded, state.policy)]
        torch.testing.assert_close(*bodies)

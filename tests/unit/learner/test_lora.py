"""Low-rank adapters: what is trained, published, saved and exported; the base model stays as it is."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl.core.errors import CheckpointError, ConfigError
from agentrl.learner import quantised
from agentrl.learner.learner import LearnerRank
from agentrl.learner.plan import LoraConfig
from tests.learner_support import CollectingSender, make_groups, make_settings, write_model

LORA = LoraConfig(lora_rank=4, lora_alpha=8)
EVERYTHING: dict[str, Any] = {
    "learner": {"ema_decay": 0.5, "critic_warmup_steps": 1, "weight_decay": 0.1, "max_grad_norm": 0.5},
    "algo": {"advantage_estimator": "gae", "init_kl_coef": 0.1},
}


def started(
    model: str, *, lora: LoraConfig = LORA, learner: dict[str, Any] | None = None, algo: dict[str, Any] | None = None
) -> LearnerRank:
    rank = LearnerRank(replace(make_settings(model, learner=learner, algo=algo), lora=lora), CollectingSender())
    rank.start(0, 1, 0)
    return rank


def steps(learner: LearnerRank, first: int, last: int) -> list[dict[str, float]]:
    found = [learner.train(step, *make_groups(seed=step, version=step)).metrics for step in range(first, last)]
    return [{name: value for name, value in metrics.items() if not name.startswith("time/")} for metrics in found]


def published(learner: LearnerRank) -> dict[str, Tensor]:
    learner.export_weights(1)
    return learner._sender.weights


def parameters(learner: LearnerRank) -> dict[str, Tensor]:
    from agentrl.learner.deepspeed.parameters import PARAMETERS

    return {name: tensor.clone() for name, tensor in PARAMETERS.named(learner._started.policy)}


def logprobs(model: Any) -> Tensor:
    ids = torch.arange(2, 42).reshape(2, 20)
    with torch.no_grad():
        return torch.log_softmax(model(input_ids=ids).logits.float(), -1)


def loaded(weights: dict[str, Tensor], base: str) -> Any:
    """The base model with published weights in the place of its own."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base)
    missing, unknown = model.load_state_dict(weights, strict=False)
    assert not unknown
    assert set(missing) <= {"lm_head.weight"}  # tied
    return model


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_adapter_alone_is_trained_and_published_within_the_weights(tiny_model: str, stage: int) -> None:
    from safetensors.torch import load_file

    learner = started(tiny_model, learner={"zero_stage": stage}, algo={"init_kl_coef": 0.1})
    base, before = load_file(Path(tiny_model) / "model.safetensors"), parameters(learner)
    first = published(learner)
    assert set(first) == set(base)
    assert all(torch.equal(first[name], base[name]) for name in base)  # B is 0
    metrics = steps(learner, 0, 3)
    assert metrics[0]["kl/reference"] == 0.0 != metrics[2]["kl/reference"]
    now, after = published(learner), parameters(learner)
    frozen = [name for name in after if ".lora_" not in name]
    assert all(torch.equal(after[name], before[name]) for name in frozen)  # also by the publication
    for name in base:
        owner = name.removesuffix(".weight")
        if f"{owner}.base_layer.weight" not in after:
            assert torch.equal(now[name], base[name])
            continue
        a, b = after[f"{owner}.lora_A.default.weight"], after[f"{owner}.lora_B.default.weight"]
        assert torch.equal(now[name], base[name] + 2.0 * (b @ a))
        assert not torch.equal(now[name], base[name])
    trained = loaded(now, tiny_model)
    if stage < 3:
        assert torch.allclose(logprobs(trained), logprobs(learner._started.policy), atol=1e-5)
    learner.close()


def test_the_stage_makes_no_difference(tiny_model: str) -> None:
    found = []
    for stage in (0, 2, 3):
        learner = started(tiny_model, learner={"zero_stage": stage, "gradient_checkpointing": stage == 3}, algo={"init_kl_coef": 0.1})
        steps(learner, 0, 2)
        found.append(published(learner))
        learner.close()
    for other in found[1:]:
        assert all(torch.allclose(found[0][name], other[name], atol=1e-4) for name in found[0])


def test_the_reference_is_the_model_with_the_adapter_off(tiny_model: str) -> None:
    """A second model that is not trained, as there is without an adapter, scores alike."""
    from agentrl.learner.models import PolicyModel, load_model
    from agentrl.learner.probes import probe

    learner = started(tiny_model, algo={"init_kl_coef": 0.1})
    steps(learner, 0, 2)
    state = learner._started
    micro = probe(state.policy.config)
    plain = PolicyModel(load_model(replace(state.settings, lora=LoraConfig()), trained=False))
    with torch.no_grad():
        expected, found, trained = (score(micro)[0] for score in (plain, state.models.reference, state.models.policy))
    assert torch.equal(found, expected)
    assert not torch.allclose(trained, expected)
    learner.close()


@pytest.mark.parametrize(("stage", "dtype"), [(0, "float32"), (2, "float32"), (3, "float32"), (2, "bfloat16")])
def test_a_resumed_learner_goes_on_bit_for_bit(tiny_model: str, tmp_path: Path, stage: int, dtype: str) -> None:
    lora = replace(LORA, lora_dropout=0.2)
    changes = {"learner": EVERYTHING["learner"] | {"zero_stage": stage, "learner_dtype": dtype}, "algo": EVERYTHING["algo"]}
    learner = started(tiny_model, lora=lora, **changes)
    steps(learner, 0, 2)
    learner.save_checkpoint(str(tmp_path), 2)
    expected = steps(learner, 2, 4), published(learner), parameters(learner)
    averages = {name: tensor.clone() for name, tensor in learner._started.average.weights()}
    learner.close()
    again = started(tiny_model, lora=lora, **changes)
    assert again.load_checkpoint(str(tmp_path)) == 2
    assert steps(again, 2, 4) == expected[0]
    for mine, theirs in (
        (published(again), expected[1]),
        (parameters(again), expected[2]),
        (dict(again._started.average.weights()), averages),
    ):
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    assert all(".lora_" in name for name in averages)
    again.close()


@pytest.mark.parametrize(("stage", "other"), [(0, 2), (2, 3), (3, 0)])
def test_the_stage_may_change_between_save_and_resume(tiny_model: str, tmp_path: Path, stage: int, other: int) -> None:
    learner = started(tiny_model, learner={"zero_stage": stage})
    steps(learner, 0, 2)
    learner.save_checkpoint(str(tmp_path), 2)
    expected = published(learner)
    learner.close()
    again = started(tiny_model, learner={"zero_stage": other})
    again.load_checkpoint(str(tmp_path))
    assert all(torch.equal(expected[name], found) for name, found in published(again).items())
    again.close()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_checkpoint_holds_the_adapter_alone(tiny_model: str, tmp_path: Path, stage: int) -> None:
    from agentrl.learner.deepspeed.saved import read_saved

    learner = started(tiny_model, learner={"zero_stage": stage})
    steps(learner, 0, 1)
    learner.save_checkpoint(str(tmp_path), 1)
    learner.close()
    (saved,) = (tmp_path / "policy" / "state").glob("*mp_rank_00_model_states.pt")
    assert all(".lora_" in name for name in read_saved(saved)["module"])


def test_a_checkpoint_of_another_base_is_refused(tiny_model: str, tmp_path: Path) -> None:
    learner = started(tiny_model)
    learner.save_checkpoint(str(tmp_path), 0)
    learner.close()
    other = started(write_model(tmp_path / "other", seed=1))
    with pytest.raises(CheckpointError, match="the adapter was trained beside"):
        other.load_checkpoint(str(tmp_path))
    other.close()


@pytest.mark.parametrize("average", [False, True])
def test_export_writes_the_adapter_or_the_merged_model(tiny_model: str, tmp_path: Path, average: bool) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from agentrl.learner.export import export_checkpoint
    from agentrl.learner.merge import merge_into_base

    learner = started(tiny_model, learner={"ema_decay": 0.5, "zero_stage": 2})
    steps(learner, 0, 2)
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    learner.save_checkpoint(str(checkpoint), 2)
    learner.save_model(str(tmp_path / "model"))
    settings, weights = learner._started.settings, published(learner)
    learner.close()
    adapter, merged = tmp_path / "adapter", tmp_path / "merged"
    assert export_checkpoint(checkpoint, settings, adapter, average=average) < export_checkpoint(
        checkpoint, settings, merged, average=average, merge=True
    )
    saved = tmp_path / ("model-ema" if average else "model")
    assert (adapter / "adapter_model.safetensors").read_bytes() == (saved / "adapter_model.safetensors").read_bytes()
    assert json.loads((saved / "adapter_config.json").read_text())["base_model_name_or_path"] == tiny_model
    assert (saved / "tokenizer.json").is_file()
    assert not (saved / "config.json").exists()
    base = AutoModelForCausalLM.from_pretrained(tiny_model)
    by_peft = logprobs(PeftModel.from_pretrained(base, saved).eval())
    whole = AutoModelForCausalLM.from_pretrained(merged)
    merge_into_base(saved, tmp_path / "again", base=settings.model, dtype="float32")
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (merged / "model.safetensors").read_bytes()
    assert torch.allclose(logprobs(whole), by_peft, atol=1e-5)
    if not average:
        assert all(torch.equal(tensor, weights[name]) for name, tensor in whole.named_parameters())


def test_dropout_is_the_same_in_all_passes_of_a_step(tiny_model: str) -> None:
    """The importance ratio of the policy to itself is 1, and another order of rows changes nothing; each step leaves out others."""
    from agentrl.learner.lora import adapted_layers, step_dropout

    learner = started(tiny_model, lora=replace(LORA, lora_dropout=0.5), algo={"ppo_epochs": 1})
    second = steps(learner, 0, 2)[1]
    assert second["policy/ratio_max"] == pytest.approx(1.0, abs=1e-5)
    assert second["policy/ratio_min"] == pytest.approx(1.0, abs=1e-5)
    policy = learner._started.policy
    whole = logprobs(policy)
    outputs = []
    for step in (1, 1, 2):
        with step_dropout([policy], 0, step):
            outputs.append(logprobs(policy))
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.allclose(outputs[0], outputs[2])
    assert torch.equal(logprobs(policy), whole)
    assert all(layer.lora_dropout["default"].mask is None for layer in adapted_layers(policy).values())
    learner.close()


@pytest.mark.parametrize(
    ("modules", "message"),
    [("q_proj,nothing", "nothing"), ("nothing", "not found"), ("embed_tokens", "no plain linear"), ("lm_head", "no plain linear")],
)
def test_layers_that_cannot_have_an_adapter_are_refused(tiny_model: str, modules: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        started(tiny_model, lora=replace(LORA, lora_target_modules=modules))
    assert error.value.field == "--lora-target-modules"


def test_named_layers_alone_have_adapters(tiny_model: str) -> None:
    from agentrl.learner.lora import adapted_layers

    learner = started(tiny_model, lora=replace(LORA, lora_target_modules="q_proj, v_proj"))
    assert {name.rpartition(".")[2] for name in adapted_layers(learner._started.policy)} == {"q_proj", "v_proj"}
    learner.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_in_4_bits_is_trained_published_and_merged_into_the_whole_one(tiny_model: str, tmp_path: Path, dtype: str) -> None:
    pytest.importorskip("bitsandbytes")
    from safetensors.torch import load_file

    from agentrl.learner.export import export_checkpoint
    from agentrl.learner.lora import adapter_off

    changes = {
        "learner": {"zero_stage": 2, "learner_dtype": dtype, "gradient_checkpointing": True, "load_in_4bit": True},
        "algo": {"init_kl_coef": 0.1},
    }
    learner = started(tiny_model, **changes)
    base, rounded, tolerance = load_file(Path(tiny_model) / "model.safetensors"), published(learner), 1e-5 if dtype == "float32" else 0.05
    assert set(rounded) == set(base)
    changed = [name for name in base if not torch.allclose(rounded[name].float(), base[name], rtol=1e-2)]
    assert len(changed) == 14  # seven linear layers in each of two blocks
    metrics = steps(learner, 0, 2)
    assert metrics[1]["kl/reference"] != 0.0
    learner.save_checkpoint(str(tmp_path), 2)
    policy, now = learner._started.policy, published(learner)
    assert (logprobs(loaded(now, tiny_model).to(policy.dtype)) - logprobs(policy)).abs().mean() < tolerance
    with adapter_off(policy):
        assert (logprobs(loaded(rounded, tiny_model).to(policy.dtype)) - logprobs(policy)).abs().mean() < tolerance
    expected = steps(learner, 2, 3), published(learner)
    adapter = {name: tensor for name, tensor in parameters(learner).items() if ".lora_" in name}
    learner.close()
    again = started(tiny_model, **changes)
    again.load_checkpoint(str(tmp_path))
    assert steps(again, 2, 3) == expected[0]
    assert all(torch.equal(tensor, expected[1][name]) for name, tensor in published(again).items())
    again.save_checkpoint(str(tmp_path), 3)
    settings = again._started.settings
    again.close()
    export_checkpoint(tmp_path, settings, tmp_path / "merged", merge=True)
    whole = load_file(tmp_path / "merged" / "model.safetensors")
    name = "model.layers.0.mlp.up_proj"
    change = 2.0 * adapter[f"{name}.lora_B.default.weight"].float() @ adapter[f"{name}.lora_A.default.weight"].float()
    assert torch.allclose(whole[f"{name}.weight"], base[f"{name}.weight"] + change, atol=1e-5 if dtype == "float32" else 1e-2)


def test_the_gradient_of_a_layer_in_4_bits_is_that_of_the_whole_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = torch.nn.Linear(3, 2)
    layer = copy.deepcopy(plain)
    layer.weight.quant_state = "4 bits"  # type: ignore[assignment]
    monkeypatch.setattr(quantised, "whole_weight", lambda parameter: parameter.data)
    quantised.use_one_product(layer)
    x, y = (torch.arange(3.0, requires_grad=True) for _ in range(2))
    (plain(x) * torch.tensor([1.0, -2.0])).sum().backward()
    (layer(y) * torch.tensor([1.0, -2.0])).sum().backward()
    assert torch.equal(layer(y), plain(x))
    assert torch.equal(y.grad, x.grad)

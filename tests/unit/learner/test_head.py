"""Scores of action tokens are those of the model's own logits, which never exist for all tokens at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from agentrl.core.errors import ConfigError
from agentrl.learner import settings as sizes
from agentrl.learner.head import given_scores, token_scores
from agentrl.learner.layout import MicroBatch
from agentrl.learner.models import PolicyModel, ValueModel, check_output
from tests.benchmarks.learner_memory import CASES, micro_batch, peak_bytes, two_micro_batches
from tests.learner_support import gradients, largest_difference, make_groups, make_settings

CPU = torch.device("cpu")
SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}
SMALL = {"num_key_value_heads": 1, "initializer_range": 0.3, "pad_token_id": 0}


def tiny(name: str, **options: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{name}TextConfig", None) or getattr(transformers, f"{name}Config")
    return getattr(transformers, f"{name}ForCausalLM")(config(**SHAPE | SMALL | options))


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2, initializer_range=0.3))


MODELS = {
    "llama": lambda: tiny("Llama"),
    "gpt2": gpt2,
    "a bias": lambda: tiny("Phi"),
    "a soft cap": lambda: tiny("Gemma2", head_dim=16, final_logit_softcapping=2.0),
    "a soft cap and a window": lambda: tiny("Gemma3", head_dim=16, final_logit_softcapping=2.0, sliding_window=4),
    "a factor": lambda: tiny("Cohere", logit_scale=0.3),
    "a divisor": lambda: tiny("Granite", logits_scaling=3.0),
    "experts": lambda: tiny("Qwen3Moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, output_router_logits=True),
}


def small_batch() -> MicroBatch:
    torch.manual_seed(1)
    return replace(micro_batch(20, 64), temperature=torch.rand(19) + 0.5)


def formula(model: Any, micro: MicroBatch) -> tuple[Tensor, Tensor]:
    logits = model(input_ids=micro.input_ids, use_cache=False).logits[0][micro.select]
    return token_scores(logits, micro.targets, micro.temperature, True)


def parameter_gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("rows", [7, 512])
@pytest.mark.parametrize("name", MODELS)
def test_scores_and_gradients_are_those_of_the_models_own_logits(name: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "CHUNK_ELEMENTS", 1)
    monkeypatch.setattr(sizes, "MIN_ROWS", rows)
    model, micro, weights = MODELS[name]().eval(), small_batch(), torch.randn(2, 19)
    policy = PolicyModel(model, entropy_gradient=True)
    check_output(policy, policy, CPU)
    assert not policy.whole
    expected, found = formula(model, micro), policy(micro)[:2]
    for left, right in zip(expected, found, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-5)
    wanted = parameter_gradients(model, (torch.stack(expected) * weights).sum())
    assert max(float(g.abs().max()) for g in wanted.values()) > 1e-2
    assert largest_difference(wanted, parameter_gradients(model, (torch.stack(found) * weights).sum())) < 1e-4


def test_a_model_that_does_more_goes_through_its_own_forward_pass() -> None:
    from transformers import LlamaForCausalLM

    class Squashed(LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = self.model(*args, **kwargs)
            output.logits = self.lm_head(torch.tanh(output.last_hidden_state))
            return output

    model = tiny("Llama")
    model.__class__ = Squashed
    policy = PolicyModel(model)
    check_output(policy, policy, CPU)
    assert policy.whole
    torch.testing.assert_close(policy(small_batch())[0], formula(model, small_batch())[0])
    refused = PolicyModel(model, fp32_head=True)
    with pytest.raises(ConfigError, match="--fp32-lm-head"):
        check_output(refused, refused, CPU)


def test_a_float32_head_rounds_no_logits() -> None:
    model, micro = tiny("Llama").bfloat16(), small_batch()
    narrow, wide = PolicyModel(model), PolicyModel(model, fp32_head=True)
    check_output(wide, wide, CPU)
    assert not wide.whole
    with torch.no_grad():
        hidden = model.model(input_ids=micro.input_ids).last_hidden_state[0][micro.select]
        exact = token_scores(hidden.float() @ model.lm_head.weight.float().T, micro.targets, micro.temperature, False)[0]
        errors = [float((policy(micro)[0] - exact).abs().max()) for policy in (narrow, wide)]
    assert errors[1] < 1e-5 < 1e-3 < errors[0]


def test_scores_of_bfloat16_logits_are_float32() -> None:
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(0)).bfloat16()
    targets, temperature = torch.arange(4), torch.full((4,), 0.7)
    found, entropy = token_scores(logits, targets, temperature, False)
    exact = torch.log_softmax(logits.double() / 0.7, -1)
    torch.testing.assert_close(found, exact[torch.arange(4), targets].float())
    torch.testing.assert_close(entropy, -(exact.exp() * exact).sum(-1).float())


def test_a_token_that_the_model_excludes_leaves_the_entropy_a_number() -> None:
    logits = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    logits[:, 5] = -torch.inf
    logits.requires_grad_()
    targets, ones = torch.tensor([0, 1, 7]), torch.ones(3)
    found, entropy = token_scores(logits, targets, ones, True)
    rest = [place for place in range(8) if place != 5]
    expected = torch.distributions.Categorical(logits=logits[:, rest]).entropy()
    torch.testing.assert_close(entropy, expected)
    (gradient,) = torch.autograd.grad((found + entropy).sum(), [logits], retain_graph=True)
    (others,) = torch.autograd.grad((found + expected).sum(), [logits])
    torch.testing.assert_close(gradient, others)
    assert gradient[:, 5].tolist() == [0.0] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_of_given_tokens_are_those_of_the_softmax(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(150, 40, generator=draw).to(dtype)
    logits[:, 5] = -torch.inf
    targets = torch.arange(150) % 5
    targets[100:] = logits[100:].argmax(-1)
    weights = torch.randn(150, generator=draw)
    own, others = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    found, figures = given_scores(own, targets, figures=True)
    distribution = torch.distributions.Categorical(logits=others.float()[:, torch.arange(40) != 5])
    expected = torch.log_softmax(others.float(), -1)[torch.arange(150), targets]
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(figures[:, 1], distribution.entropy().detach())
    assert torch.equal(figures[:, 0].bool(), logits.argmax(-1) == targets)
    assert 50 <= int(figures[:, 0].sum()) < 150
    assert not figures.requires_grad
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(own.grad, others.grad)
    assert own.grad is not None
    assert own.grad.dtype == dtype
    assert given_scores(logits, targets, figures=False)[1].shape == (150,)
    assert given_scores(logits[:0], targets[:0], figures=True)[1].shape == (0, 2)


@pytest.mark.parametrize("rows", [7, 512])
def test_given_rows_need_no_second_tensor_of_their_logits(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "CHUNK_ELEMENTS", 1)
    monkeypatch.setattr(sizes, "MIN_ROWS", rows)
    model, micro, weights = tiny("Llama").eval(), replace(small_batch(), temperature=torch.ones(19), top_k=1), torch.randn(19)
    given, sampled = PolicyModel(model, samples=False), PolicyModel(model)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: (kept.append(tensor.numel()), tensor)[1], lambda tensor: tensor):
        found, figures, _ = given(micro)
    assert sum(size == 19 * 64 for size in kept) == (rows > 19)
    expected, entropies, _ = sampled(replace(micro, top_k=0))
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(figures[:, 1], entropies)
    wanted = parameter_gradients(model, (expected * weights).sum())
    assert largest_difference(wanted, parameter_gradients(model, (found * weights).sum())) < 1e-5


def test_values_of_a_bfloat16_critic_are_not_rounded_to_bfloat16() -> None:
    critic = ValueModel(tiny("Llama").model).bfloat16()
    micro = small_batch()
    with torch.no_grad():
        critic.head.weight.normal_(0.0, 0.1, generator=torch.Generator().manual_seed(0))
        hidden = critic.model(input_ids=micro.input_ids).last_hidden_state[0][micro.select]
        torch.testing.assert_close(critic(micro), (hidden.double() @ critic.head.weight.double().T)[:, 0].float(), rtol=1e-5, atol=1e-6)


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that an operation made."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.elements = max([self.elements, *(t.numel() for t in tree_leaves(out) if isinstance(t, Tensor))])
        return out


@pytest.mark.parametrize("gradient", [False, True])
def test_no_tensor_of_all_tokens_and_the_vocabulary_exists(gradient: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "CHUNK_ELEMENTS", 1)
    monkeypatch.setattr(sizes, "MIN_ROWS", 64)
    policy, vocabulary = PolicyModel(tiny("Llama", vocab_size=4096), entropy_gradient=gradient), 4096
    micro = micro_batch(512, vocabulary)
    with Largest() as largest:
        torch.stack(policy(micro)[:2]).sum().backward()
        with torch.no_grad():
            policy(micro)
    assert largest.elements == 64 * vocabulary


def test_values_need_no_large_tensor() -> None:
    body = tiny("Llama", vocab_size=4096).model
    with Largest() as largest:
        ValueModel(body)(micro_batch(512, 4096)).sum().backward()
    assert largest.elements <= 4096 * 32  # the gradient of the embeddings


def test_zero_3_gathers_the_head_once_in_each_direction(untied_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

    monkeypatch.setattr(sizes, "CHUNK_ELEMENTS", 1)
    monkeypatch.setattr(sizes, "MIN_ROWS", 4)
    fetched: list[torch.Size] = []
    fetch = PartitionedParameterCoordinator.fetch_sub_module

    def count(self: Any, module: nn.Module, forward: bool) -> None:
        fetched.extend(p.ds_shape for p in module.parameters(recurse=False) if type(module) is nn.Linear)
        fetch(self, module, forward)

    settings = make_settings(str(untied_model), learner={"zero_stage": 3, "share_prompts": False})
    groups = make_groups(5, 3, seed=1)
    whole = gradients(make_settings(str(untied_model)), groups)
    fetched_at_start: list[int] = []
    from agentrl.learner.step import TrainingStep

    train = TrainingStep.train
    monkeypatch.setattr(PartitionedParameterCoordinator, "fetch_sub_module", count)
    monkeypatch.setattr(TrainingStep, "train", lambda *args: (fetched_at_start.append(fetched.count((64, 32))), train(*args))[1])
    assert largest_difference(whole, gradients(settings, groups)) < 1e-5
    assert fetched.count(torch.Size((64, 32))) - fetched_at_start[0] == 2


def measured_peak(shape: dict[str, Any], tokens: int) -> int:
    """Peak of torch's CPU allocator above what is there before, for two micro-batches in float32."""
    from tests.benchmarks.learner_memory import build

    policy, micro = build(shape, dtype=torch.float32), micro_batch(tokens, shape["vocab_size"])
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        two_micro_batches(policy, micro)
    held = peak = 0
    for event in record.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


@pytest.mark.parametrize("tokens", [512, 1500])
def test_measured_memory_is_what_shapes_say(tokens: int) -> None:
    shape = CASES["7b-width 2-layers"] | {"hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4, "vocab_size": 8192}
    assert measured_peak(shape, tokens) == pytest.approx(peak_bytes(shape, tokens, dtype=torch.float32), rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "gib"), [(16384, 9.5), (32768, 17.0)])
def test_a_7b_layer_fits(tokens: int, gib: float) -> None:
    assert peak_bytes(CASES["7b-width 2-layers"], tokens) <= gib * 2**30


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_are_those_of_logits_made_wide_first(dtype: torch.dtype) -> None:
    """Bit for bit, with their gradient; the division makes them wide by itself, and a backward pass needs no entropies."""
    torch.manual_seed(0)
    logits, targets, temperature = torch.randn(6, 50, dtype=dtype), torch.randint(50, (6,)), torch.rand(6) + 0.5
    found = []
    for wants_entropy in (True, False):
        given = logits.clone().requires_grad_()
        logprobs, entropies = token_scores(given, targets, temperature, False, wants_entropy=wants_entropy)
        logprobs.sum().backward()
        found.append((logprobs.detach(), given.grad))
        assert len(entropies) == (6 if wants_entropy else 0)
    given = logits.clone().requires_grad_()
    expected = torch.log_softmax(given.float() / temperature[:, None], -1).gather(-1, targets[:, None])[:, 0]
    expected.sum().backward()
    for logprobs, gradient in found:
        assert logprobs.dtype == torch.float32
        assert torch.equal(logprobs, expected)
        assert torch.equal(gradient, given.grad)  # type: ignore[arg-type]

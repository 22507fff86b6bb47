"""Prefix trees have the gradients of separate rows: for six families of models, in every layout, with every part of a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl.learner import head
from agentrl.learner.attention import KERNELS, register
from agentrl.learner.batch import Batch, collate
from agentrl.learner.layout import Layout, MicroBatch
from agentrl.learner.models import PolicyModel, ValueModel
from agentrl.learner.sharding import pad
from agentrl.learner.trees import Bundle, _trees, one_row_bundles, share_prefixes
from tests.learner_support import gradients, largest_difference, make_settings, make_trees

GROUPS = make_trees(2, branches=10, depth=6, seed=1)
DEPTH = 6
SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3": {"head_dim": 16},
    "Mistral": {"sliding_window": None},
    "Olmo2": {},
    "Phi3": {},
    "Gemma": {"head_dim": 16},
}
WIDE = 10_000
"""Width of a model for which sharing is always worth it."""


def tiny(name: str, **options: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**SHAPE | options))
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0.0, 0.2)
    return model.eval()


def micro_batches(batch: Batch, bundles: list[Bundle], budget: int, *, packed: bool) -> list[MicroBatch]:
    parts = pad([bundle.length for bundle in bundles], [(place,) for place in range(len(bundles))], budget)
    return [Layout(batch).micro_batch([bundles[place] for place in part], packed=packed) for part in parts]


def clipped_loss(new: Tensor, actions: Tensor) -> Tensor:
    """Sum over rows of a loss that is not linear in the advantage, so that shared tokens have different terms."""
    generator = torch.Generator().manual_seed(3)
    advantages, old = torch.randn(2, 1000, generator=generator)
    ratio = (new - old[actions] + 4.0).exp()
    own = advantages[actions]
    return -torch.minimum(ratio * own, ratio.clamp(0.8, 1.2) * own).sum()


def trained(model: Any, micros: list[MicroBatch], count: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probabilities and entropies of all action tokens # [2, A], and gradients of a loss of them."""
    policy = PolicyModel(model, entropy_gradient=True)
    policy.zero_grad()
    found = torch.zeros(2, count)
    for micro in micros:
        new, entropy, _ = policy(micro)
        found[:, micro.actions] = torch.stack([new, entropy]).detach()
        (clipped_loss(new, micro.actions) - 0.1 * entropy.sum()).backward()
    return found, {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def relative(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest difference of a gradient, over the largest of all."""
    return largest_difference(found, expected) / max(float(part.abs().max()) for part in expected.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_trees_are_those_of_rows(family: str) -> None:
    model, batch = tiny(family, **FAMILIES[family]), collate(GROUPS[:1])
    model.set_attn_implementation("eager")
    rows, expected = trained(model, micro_batches(batch, one_row_bundles(batch), 1, packed=False), batch.num_actions)
    assert max(len(path) for _, _, tree in _trees(batch) for path in tree.paths) >= DEPTH
    register("varlen")
    for kernel in ("sdpa", "varlen"):
        model.set_attn_implementation(KERNELS[kernel].implementation)
        for budget in (10**6, 60):
            bundles = share_prefixes(batch, budget=budget, hidden_size=WIDE)
            assert (len(bundles) == 1) == (budget > 60)
            micros = micro_batches(batch, bundles, budget, packed=KERNELS[kernel].packed)
            assert any(micro.ends is not None for micro in micros)
            found, together = trained(model, micros, batch.num_actions)
            assert (found - rows).abs().max() < 1e-5
            assert relative(together, expected) < 1e-5


LEARNERS: dict[str, dict[str, Any]] = {
    "padded": {},
    "several micro-batches": {"micro_batch_tokens": 60},
    "packed": {"attn_implementation": "varlen"},
    "checkpointed": {"gradient_checkpointing": True},
    "ZeRO-2, packed": {"zero_stage": 2, "attn_implementation": "varlen", "micro_batch_tokens": 60},
    "ZeRO-3, checkpointed": {"zero_stage": 3, "gradient_checkpointing": True},
}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "plain": {"entropy_coef": 0.1},
    "critic and reference": {"advantage_estimator": "gae", "init_kl_coef": 0.3, "use_kl_loss": True, "entropy_coef": 0.1},
}


@pytest.fixture(scope="module")
def of_rows(tiny_model: str) -> dict[str, dict[str, Any]]:
    """Gradients of rows, one at a time."""
    alone = {"share_prompts": False, "micro_batch_tokens": 1, "attn_implementation": "eager"}
    return {name: gradients(make_settings(tiny_model, algo=algo, learner=alone), GROUPS) for name, algo in ALGORITHMS.items()}


@pytest.mark.parametrize(("learner", "algo"), [(name, list(ALGORITHMS)[place % 2]) for place, name in enumerate(LEARNERS)])
def test_a_step_on_trees_has_the_gradient_of_rows(
    learner: str, algo: str, tiny_model: str, of_rows: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "chunk_rows", lambda vocabulary: 7)  # the output layer takes some rows at a time
    found = gradients(make_settings(tiny_model, algo=ALGORITHMS[algo], learner=LEARNERS[learner]), GROUPS)
    assert largest_difference(found, of_rows[algo]) < 1e-5 * max(1.0, *(float(part.abs().max()) for part in found.values()))


def test_the_critic_values_a_shared_token_once_and_for_each_row() -> None:
    batch = collate(GROUPS)
    torch.manual_seed(0)
    critic = ValueModel(tiny("Llama").model)
    critic.head.weight.data.normal_()
    tree, rows = (
        Layout(batch).micro_batch(bundles, packed=False)
        for bundles in (share_prefixes(batch, budget=10**6, hidden_size=WIDE), one_row_bundles(batch))
    )
    assert len(tree.select) < len(tree.actions) == batch.num_actions
    values = torch.zeros(2, batch.num_actions)
    for place, micro in enumerate((tree, rows)):
        values[place, micro.actions] = critic(micro).detach()
    assert (values[0] - values[1]).abs().max() < 1e-5

"""The learner takes the experts that the engine took: gradients are those of a model with these experts, whatever the layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from agentrl.core.errors import BatchError, ConfigError
from agentrl.core.types import Group
from agentrl.learner.batch import TurnRow, collate
from agentrl.learner.learner import LearnerRank
from agentrl.learner.trees import share_prefixes
from agentrl.weights.routers import Routers
from tests.learner_support import (
    CollectingSender,
    gradients,
    largest_difference,
    make_groups,
    make_settings,
    with_experts,
    write_experts,
    write_model,
)
from tests.unit.learner.test_gradients import plain_gradients

PLAIN = make_groups(3, 3, seed=1)
GROUPS = with_experts(PLAIN, layers=2, experts=4)
REPLAY = {"router_replay": True}


@pytest.fixture
def model(experts_model: str) -> str:
    return experts_model


@pytest.fixture(scope="module")
def expected(experts_model: str) -> dict[str, Tensor]:
    return plain_gradients(experts_model, groups=GROUPS, prepare=force)


def force(model: Any, row: TurnRow) -> None:
    """Make the routers of Qwen3-MoE take the experts of a row, by their formula: softmax, those of the experts, divided by their sum."""
    experts = row.experts
    assert experts is not None
    for number, layer in enumerate(model.model.layers):
        layer.mlp.gate.forward = router(layer.mlp.gate, torch.from_numpy(experts[:, number].astype(np.int64)))


def router(gate: Any, experts: Tensor) -> Any:
    chosen = torch.cat([experts, experts[-1:]])  # the last token predicts nothing

    def forward(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = hidden.reshape(-1, hidden.shape[-1]) @ gate.weight.T
        weights = logits.softmax(-1)[torch.arange(len(chosen))[:, None], chosen]
        return logits, weights / weights.sum(-1, keepdim=True), chosen

    return forward


@pytest.mark.parametrize(
    "learner",
    [
        {"zero_stage": 0},
        {"zero_stage": 0, "micro_batch_tokens": 1},
        {"zero_stage": 0, "micro_batch_tokens": 40, "share_prompts": False, "gradient_checkpointing": True},
        {"zero_stage": 2, "attn_implementation": "varlen"},
        {"zero_stage": 3, "micro_batch_tokens": 60, "gradient_checkpointing": True},
    ],
    ids=["padded and shared", "row by row", "checkpointed", "packed", "ZeRO-3"],
)
def test_gradients_are_those_of_the_forced_experts(model: str, expected: dict[str, Tensor], learner: dict[str, Any]) -> None:
    found = gradients(make_settings(model, learner=learner, algo=REPLAY), GROUPS)
    assert largest_difference(found, expected) < 1e-5


def test_other_experts_have_other_gradients_and_routers_learn(model: str, expected: dict[str, Tensor]) -> None:
    assert largest_difference(gradients(make_settings(model), GROUPS), expected) > 1e-2
    assert float(expected["model.model.layers.0.mlp.gate.weight"].abs().max()) > 1e-3


def trained(model: str, groups: tuple[Group, ...], **algo: Any) -> dict[str, float]:
    learner = LearnerRank(make_settings(model, algo=algo), CollectingSender())
    learner.start(0, 1, 0)
    try:
        return dict(learner.train(0, *groups).metrics)
    finally:
        learner.close()


def test_tokens_without_record_are_left_to_the_router_and_counted(model: str) -> None:
    own = gradients(make_settings(model), PLAIN)
    assert largest_difference(gradients(make_settings(model, algo=REPLAY), PLAIN), own) == 0.0
    first, *others = GROUPS[0].trajectories
    part = (replace(GROUPS[0], trajectories=(replace(first, turns=PLAIN[0].trajectories[0].turns), *others)), *GROUPS[1:])
    found = trained(model, part, **REPLAY)
    batch = collate(part)
    missing = sum(length - 1 for row, length in zip(batch.rows, batch.row_lengths.tolist(), strict=True) if row.experts is None)
    assert missing
    assert found["router_replay/share"] == pytest.approx(1 - missing / int(batch.input_lengths().sum()))
    assert 0.3 < found["router_replay/agreement"] < 0.7  # two of four at random
    assert not {"router_replay/share", "router_replay/agreement"} & trained(model, GROUPS).keys()


def test_a_reference_model_routes_by_itself(model: str) -> None:
    def divergence(groups: tuple[Group, ...], **more: Any) -> float:
        return trained(model, groups, init_kl_coef=0.1, use_kl_loss=True, kl_estimator="k2", **more)["kl/reference"]

    assert divergence(PLAIN, **REPLAY) == pytest.approx(0.0, abs=1e-9)
    assert divergence(GROUPS, **REPLAY) > 1e-3


def test_prompts_with_different_experts_are_not_shared() -> None:
    batch, budget = collate(GROUPS), 10_000
    assert max(len(bundle.rows) for bundle in share_prefixes(batch, budget=budget, hidden_size=1024)) > 1
    first, *others = GROUPS[0].trajectories
    experts = first.turns[0].experts
    assert experts is not None
    turned = replace(first.turns[0], experts=(experts + 1) % 4)
    group = replace(GROUPS[0], trajectories=(replace(first, turns=(turned, *first.turns[1:])), *others))
    rows = [bundle.rows for bundle in share_prefixes(collate([group]), budget=budget, hidden_size=1024)]
    assert (0,) in rows


def test_experts_of_too_few_tokens_are_an_error() -> None:
    turn = GROUPS[0].trajectories[0].turns[0]
    assert turn.experts is not None
    row = TurnRow(turns=(replace(turn, experts=turn.experts[1:]),), branch=0, trajectory_id="0-0", episode_id="0-0")
    with pytest.raises(BatchError, match="trajectory 0-0: turn 0 has experts of"):
        _ = row.experts


def test_a_dense_model_is_refused(tiny_model: str) -> None:
    with pytest.raises(ConfigError, match=r"--router-replay = True: LlamaForCausalLM is not a mixture of experts\. Leave it out"):
        trained(tiny_model, PLAIN, **REPLAY)


def test_routers_that_do_not_choose_by_scores_are_refused(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    def sorted_instead(self: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = hidden.reshape(-1, hidden.shape[-1]) @ self.weight.T
        found = logits.softmax(-1).sort(descending=True)
        return logits, found.values[:, :2], found.indices[:, :2]

    monkeypatch.setattr(Qwen3MoeTopKRouter, "forward", sorted_instead)
    with pytest.raises(ConfigError, match="the router of layer 0 does not choose 2 of 4 experts"):
        trained(model, PLAIN, **REPLAY)


FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {"mlp_only_layers": [0]},
    "Qwen2Moe": {"shared_expert_intermediate_size": 16},
    "Mixtral": {},
    "Olmoe": {},
    "GptOss": {},
    "DeepseekV3": {"n_routed_experts": 8, "num_experts": 8, "num_local_experts": 8, "first_k_dense_replace": 1}
    | {"n_group": 2, "topk_group": 1, "n_shared_experts": 1, "num_key_value_heads": 2}
    | {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_routers_of_known_families_are_told_and_asked(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    path = write_experts(tmp_path, family, **FAMILIES[family])
    model: nn.Module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    ids = torch.arange(3, 23).reshape(2, 10)

    def logits() -> Tensor:
        found: Tensor = model(input_ids=ids).logits
        return found

    before = logits()
    routers = Routers(model)
    own, chosen = routers.record(logits)
    assert torch.equal(own, before)
    assert chosen.shape == (20, 2, 2)
    assert routers.compact(chosen).dtype == np.uint8
    routers.forced = chosen
    torch.testing.assert_close(logits(), before)
    same, total = routers.take_agreement()
    assert same == total > 0
    routers.forced = (chosen + 1) % routers.experts
    other, taken = routers.record(logits)
    assert torch.equal(taken[:, 1], routers.forced[:, 1])
    assert other.isfinite().all()
    assert (other - before).abs().max() > 1e-3


def test_two_models_do_not_share_their_routers(model: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    path = write_model(tmp_path)
    with pytest.raises(ValueError, match="is not a mixture of experts"):
        Routers(AutoModelForCausalLM.from_pretrained(path))
    one, two = (AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32) for _ in range(2))
    ids = torch.arange(3, 13)[None]
    before = two(input_ids=ids).logits
    routers = Routers(one)
    _, chosen = routers.record(lambda: one(input_ids=ids))
    routers.forced = (chosen + 1) % 4
    assert not torch.equal(one(input_ids=ids).logits, before)
    assert torch.equal(two(input_ids=ids).logits, before)

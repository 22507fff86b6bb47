"""Single facts of a training step: its denominators, its schedule, the load of experts, windows of attention, sums in float32, dropout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import agentrl.learner.settings as sizes
from agentrl.learner import step as training
from agentrl.learner.attention import _reference
from agentrl.learner.engine import learning_rate
from agentrl.learner.head import OutputLayer, token_scores
from agentrl.learner.learner import LearnerRank
from agentrl.learner.lora import adapted_layers, step_dropout
from agentrl.learner.models import balance_share, routing_load
from tests.learner_support import (
    CollectingSender,
    gradients,
    largest_difference,
    make_groups,
    make_settings,
    with_experts,
)

GROUPS = make_groups(4, 3, seed=2)


def started(model: str, **changes: Any) -> LearnerRank:
    learner = LearnerRank(make_settings(model, **changes), CollectingSender())
    learner.start(0, 1, 0)
    return learner


def trained(model: str, groups: Sequence[Any] = GROUPS, step: int = 0, **changes: Any) -> dict[str, float]:
    learner = started(model, **changes)
    try:
        return dict(learner.train(step, *groups).metrics)
    finally:
        learner.close()


def test_the_constant_denominator_is_the_longest_answer_that_is_allowed(tiny_model: str) -> None:
    settings = make_settings(tiny_model, algo={"loss_aggregation": "constant"})
    short, long = (gradients(replace(settings, max_new_tokens=count), GROUPS) for count in (8, 16))
    assert largest_difference(short, {name: 2 * value for name, value in long.items()}) < 1e-5
    assert max(float(value.abs().max()) for value in long.values()) > 1e-3


@pytest.mark.parametrize("step", [2, 5, 9])
def test_the_policys_schedule_is_shorter_by_the_warm_up_of_the_critic(tiny_model: str, step: int) -> None:
    """Also for a learner that is started again within it: the rate follows from the number of the step."""
    config = {"critic_warmup_steps": 2, "lr_schedule": "linear", "lr_warmup_steps": 1, "min_lr_ratio": 0.1}
    found = trained(tiny_model, step=step, learner=config, algo={"advantage_estimator": "gae"})
    rates: dict[str, Any] = {"peak": 1e-2, "schedule": "linear", "warmup_steps": 1, "min_ratio": 0.1}
    assert found["learning_rate"] == pytest.approx(learning_rate(step - 2, num_steps=8, **rates))
    if step == 9:
        assert found["learning_rate"] == pytest.approx(1e-2 * (0.1 + 0.9 / 7))  # the last of the ten steps


def test_the_reference_of_an_adapter_routes_by_itself(experts_model: str) -> None:
    """The reference is the policy with its adapter off, which would take the recorded experts too if it was told of them."""
    recorded = with_experts(GROUPS, layers=2, experts=4)
    algo = {"init_kl_coef": 0.1, "use_kl_loss": True, "kl_estimator": "k2", "router_replay": True}
    lora = {"lora_rank": 2, "lora_target_modules": "q_proj"}
    assert trained(experts_model, GROUPS, algo=algo, lora=lora)["kl/reference"] == pytest.approx(0.0, abs=1e-9)
    assert trained(experts_model, recorded, algo=algo, lora=lora)["kl/reference"] > 1e-3


def test_each_update_balances_the_load_of_its_own_tokens(experts_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[float, float]] = []

    def noted(probability: Tensor, chosen: Tensor, top_k: int) -> Tensor:
        seen.append((float(probability.sum()), float(chosen.sum()) / top_k))
        return balance_share(probability, chosen, top_k)

    monkeypatch.setattr(training, "balance_share", noted)
    trained(experts_model, algo={"aux_loss_coef": 0.5, "mini_batches": 2})
    assert len(seen) == 2
    assert seen[0][1] != seen[1][1]
    for tokens, chosen in seen:
        assert chosen == pytest.approx(tokens, rel=1e-5)


def test_shared_tokens_would_count_once_so_a_balanced_model_shares_no_prompts(experts_model: str) -> None:
    assert trained(experts_model)["shared_prompts"] > 0.0
    assert trained(experts_model, algo={"aux_loss_coef": 0.5})["shared_prompts"] == 0.0


def test_padding_is_no_load() -> None:
    scores = torch.tensor([[3.0, 0.0, 0.0], [0.0, 3.0, 0.0], [0.0, 0.0, 9.0]])
    real = torch.tensor([True, True, False])
    counts, probabilities = routing_load([scores, scores], real, 1)
    assert counts.tolist() == [2.0, 2.0, 0.0]
    torch.testing.assert_close(probabilities, 2 * scores[:2].softmax(-1).sum(0))


def test_the_balance_of_equal_loads_is_the_number_of_experts_per_token() -> None:
    chosen = torch.tensor([6.0, 6.0, 6.0])  # 9 tokens, 2 of 3 experts each
    assert float(balance_share(torch.full((3,), 3.0), chosen, 2)) == pytest.approx(2.0)
    assert float(balance_share(torch.tensor([9.0, 0.0, 0.0]), torch.tensor([9.0, 9.0, 0.0]), 2)) == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("window", "seen"), [(1, [[0], [1], [2], [3]]), (2, [[0], [0, 1], [1, 2], [2, 3]]), (None, [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]])]
)
def test_a_window_of_tokens_ends_with_the_token_itself(window: int | None, seen: list[list[int]]) -> None:
    """Two rows back to back; all scores are equal, so that each output is the mean of the values that are seen."""
    query = torch.zeros(8, 1, 4)
    value = torch.eye(4).repeat(2, 1)[:, None]
    output = _reference(query, query, value, torch.tensor([0, 4, 8]), 4, 1.0, window, None, capped=False)[:, 0]
    expected = torch.stack([torch.eye(4)[places].mean(0) for places in seen]).repeat(2, 1)
    torch.testing.assert_close(output, expected)


def test_gradients_of_many_chunks_are_summed_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16 the sum would stop to grow where a chunk is less than half a step of it."""
    monkeypatch.setattr(sizes, "CHUNK_ELEMENTS", 1)
    monkeypatch.setattr(sizes, "MIN_ROWS", 1)
    count, layer = 1500, torch.nn.Linear(4, 8, bias=True).bfloat16()
    with torch.no_grad():
        layer.weight.fill_(0.0)
        layer.bias.fill_(0.0)
    end: Any = OutputLayer.__new__(OutputLayer)
    end.layer, end._samples, end._finish = layer, True, lambda logits: logits
    hidden = torch.ones(count, 4, dtype=torch.bfloat16)
    targets, temperature = torch.zeros(count, dtype=torch.long), torch.ones(count)
    logprobs, _ = end.score(hidden, targets, temperature, entropy_gradient=False, wide=False)
    logprobs.sum().backward()
    assert layer.weight.grad is not None
    assert layer.bias.grad is not None
    exact = count * torch.tensor([7 / 8] + [-1 / 8] * 7)
    torch.testing.assert_close(layer.weight.grad.float(), exact[:, None].expand(8, 4), rtol=0.01, atol=0.0)
    torch.testing.assert_close(layer.bias.grad.float(), exact, rtol=0.01, atol=0.0)


def test_scores_at_a_temperature() -> None:
    logits, targets = torch.tensor([[1.0, 3.0], [2.0, 0.0]]), torch.tensor([0, 0])
    logprobs, _ = token_scores(logits, targets, torch.tensor([2.0, 0.5]), False)
    torch.testing.assert_close(
        logprobs, torch.stack([torch.tensor([0.5, 1.5]).log_softmax(0)[0], torch.tensor([4.0, 0.0]).log_softmax(0)[0]])
    )


@pytest.mark.parametrize("several", [(), (3,)], ids=["one token", "three tokens"])
@pytest.mark.parametrize("top_k", [0, 2])
def test_no_place_has_no_scores(several: tuple[int, ...], top_k: int) -> None:
    """As on a rank whose part of the rows has no sampled token."""
    targets = torch.zeros((0, *several), dtype=torch.long)
    logprobs, entropy = token_scores(torch.zeros(0, 5, requires_grad=True), targets, torch.ones(0), True, top_k)
    assert logprobs.shape == ((0, (several or (1,))[0] + 2 * top_k) if top_k else (0, *several))
    assert entropy.shape == (0,)
    logprobs.sum().backward()


def test_inputs_that_dropout_keeps_are_scaled_up(tiny_model: str) -> None:
    learner = started(tiny_model, lora={"lora_rank": 2, "lora_dropout": 0.75})
    policy, kept = learner._started.policy, []
    with step_dropout([policy], 0, 1):
        for layer in adapted_layers(policy).values():
            mask = layer.lora_dropout["default"].mask
            assert set(mask.tolist()) == {0.0, 4.0}
            kept.append(mask)
    learner.close()
    assert float(torch.cat(kept).mean()) == pytest.approx(1.0, abs=0.25)
    assert not torch.equal(kept[0], kept[1])


def test_skipped_updates_in_a_row_are_counted_on_after_a_resume(tiny_model: str, tmp_path: Path) -> None:
    first = started(tiny_model)
    first.train(0, *GROUPS)
    first._started.models.policy.skipped_in_a_row = 2
    first.save_checkpoint(str(tmp_path), 1)
    first.close()
    second = started(tiny_model)
    assert second.load_checkpoint(str(tmp_path)) == 1
    assert second._started.models.policy.skipped_in_a_row == 2
    second.close()

"""Audits of one row: what they measure, in which layouts, and that they change nothing."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentrl.learner import audit as audits
from agentrl.learner.learner import LearnerRank
from agentrl.learner.settings import LearnerSettings
from tests.learner_support import CollectingSender, make_groups, make_settings, with_experts, write_experts

AUDITED = {"audit/logprob_error", "audit/logprob_error_max", "audit/gradient_angle"}


def trained(settings: LearnerSettings, groups: Any, *, steps: int = 1) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """The metrics of each step, and the weights behind the last."""
    sender = CollectingSender()
    learner = LearnerRank(settings, sender)
    learner.start(0, 1, 0)
    try:
        metrics = [dict(learner.train(step, *groups).metrics) for step in range(steps)]
        learner.export_weights(steps)
    finally:
        learner.close()
    return metrics, sender.weights


def audited(settings: LearnerSettings, groups: Any = None) -> dict[str, float]:
    [metrics], _ = trained(replace(settings, audit_every=1), make_groups() if groups is None else groups)
    return {name: value for name, value in metrics.items() if name.startswith("audit/")}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_with_each_zero_stage_the_row_is_exact(tiny_model: str, stage: int) -> None:
    found = audited(make_settings(tiny_model, learner={"zero_stage": stage}))
    assert found.keys() == AUDITED
    assert found["audit/logprob_error_max"] < 1e-5
    assert found["audit/gradient_angle"] < 0.01


@pytest.mark.parametrize(
    ("learner", "lora"),
    [
        ({"attn_implementation": "varlen"}, {}),
        ({"gradient_checkpointing": True, "tiled_mlp": True}, {}),
        ({}, {"lora_rank": 4, "lora_dropout": 0.0}),
        ({"share_prompts": False, "micro_batch_tokens": 40}, {}),
    ],
)
def test_other_layouts_are_exact_too(tiny_model: str, learner: dict[str, Any], lora: dict[str, Any]) -> None:
    found = audited(make_settings(tiny_model, learner=learner, lora=lora))
    assert found["audit/logprob_error_max"] < 1e-5
    assert found["audit/gradient_angle"] < 0.01


def test_several_updates_are_compared_before_the_first(tiny_model: str) -> None:
    found = audited(make_settings(tiny_model, algo={"mini_batches": 2, "ppo_epochs": 2}))
    assert found["audit/logprob_error_max"] < 1e-5


def test_bfloat16_is_rounded(tiny_model: str) -> None:
    found = audited(make_settings(tiny_model, learner={"learner_dtype": "bfloat16"}))
    assert 1e-4 < found["audit/logprob_error"] < 0.1
    assert 0.01 < found["audit/gradient_angle"] < 20.0


def test_the_experts_of_the_engine_are_taken(tmp_path: Path) -> None:
    model = write_experts(tmp_path / "experts")
    groups = with_experts(make_groups(), layers=2, experts=4)
    found = audited(make_settings(model, algo={"router_replay": True}), groups)
    assert found["audit/logprob_error_max"] < 1e-5


def test_an_error_of_the_loaded_model_is_seen(tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from agentrl.learner import state

    load = state.load_model

    def stretched(*args: Any, **named: Any) -> Any:
        model = load(*args, **named)
        model.model.rotary_emb.inv_freq.mul_(0.1)
        return model

    monkeypatch.setattr(state, "load_model", stretched)
    found = audited(make_settings(tiny_model))
    assert found["audit/logprob_error"] > 0.01
    assert found["audit/gradient_angle"] < 0.01  # both gradients are of the copy


def test_rows_that_see_each_other_are_seen(tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from agentrl.learner import layout

    bounds = layout._bounds
    monkeypatch.setattr(layout, "_bounds", lambda lengths: bounds(np.asarray([lengths.sum()])))
    monkeypatch.setattr("agentrl.learner.kernels.can_pack", lambda *args, **named: True)
    monkeypatch.setattr("agentrl.learner.kernels.Proof.problem", lambda *args, **named: "")
    found = audited(make_settings(tiny_model, learner={"attn_implementation": "varlen", "share_prompts": False}))
    assert found["audit/logprob_error"] > 0.01
    assert found["audit/gradient_angle"] > 1.0


def test_audits_change_nothing(tiny_model: str) -> None:
    states = []
    results = []
    for every in (0, 1):
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        metrics, weights = trained(replace(make_settings(tiny_model), audit_every=every), make_groups(), steps=3)
        states.append((torch.get_rng_state(), random.getstate(), np.random.get_state()[1]))
        results.append((metrics, weights))
    assert torch.equal(states[0][0], states[1][0])
    assert states[0][1] == states[1][1]
    assert np.array_equal(states[0][2], states[1][2])
    (plain, weights), (with_audits, same) = results
    assert all(torch.equal(weights[name], same[name]) for name in weights)
    assert [row["grad_norm"] for row in plain] == [row["grad_norm"] for row in with_audits]
    assert not AUDITED & plain[0].keys()
    assert with_audits[2].keys() >= AUDITED


def test_only_every_so_many_steps(tiny_model: str) -> None:
    metrics, _ = trained(replace(make_settings(tiny_model), audit_every=2), make_groups(), steps=3)
    assert ["audit/logprob_error" in row for row in metrics] == [True, False, True]


def test_without_memory_it_says_so(tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audits, "_free_bytes", lambda device: 1000.0)
    assert audited(make_settings(tiny_model)) == {"audit/off": audits.NO_MEMORY}


def test_the_last_parameters_of_a_large_model_are_compared() -> None:
    sizes = (audits.GRADIENT_ELEMENTS, 3, audits.GRADIENT_ELEMENTS - 5, 2)
    parameters = [torch.nn.Parameter(torch.empty(size, device="meta")) for size in sizes]
    parameters[3].requires_grad_(False)
    assert [len(parameter) for parameter in audits._last(parameters)] == [audits.GRADIENT_ELEMENTS - 5, 3]


@pytest.mark.parametrize(("degrees"), [0.0, 1e-6, 30.0, 180.0])
def test_angles(degrees: float) -> None:
    angle = np.deg2rad(degrees)
    first, second = torch.tensor([2.0, 0.0], dtype=torch.float64), torch.tensor([np.cos(angle), np.sin(angle)], dtype=torch.float64)
    assert audits._angle(first, second) == pytest.approx(degrees, abs=1e-9)
    assert audits._angle(first, torch.zeros(2)) is None

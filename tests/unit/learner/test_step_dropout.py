"""Inputs of adapters that a step leaves out: others in each step and in each layer, the same ones for the same seed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from agentrl.learner import lora


def masks(monkeypatch: pytest.MonkeyPatch, *, seed: int = 0, step: int = 0) -> list[list[float]]:
    """The masks of two layers of one size within a step."""

    def layer() -> Any:
        weight = torch.zeros(2, 64)
        dropout = SimpleNamespace(share=0.25, mask=None)
        return SimpleNamespace(in_features=64, lora_dropout={lora.ADAPTER: dropout}, lora_A={lora.ADAPTER: SimpleNamespace(weight=weight)})

    layers = {name: layer() for name in ("first", "second")}
    monkeypatch.setattr(lora, "adapted_layers", lambda model: layers)
    with lora.step_dropout([torch.nn.Identity()], seed, step):
        return [each.lora_dropout[lora.ADAPTER].mask.tolist() for each in layers.values()]


def test_masks_follow_from_seed_step_and_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = masks(monkeypatch)
    assert first != second
    assert masks(monkeypatch) == [first, second]
    assert masks(monkeypatch, step=1)[0] not in (first, second)
    assert masks(monkeypatch, seed=1)[0] not in (first, second)
    assert sorted(set(first)) == pytest.approx([0.0, 4 / 3])
    assert 0.6 < sum(map(bool, first + second)) / 128 < 0.9

"""Sums of gradients in bfloat16: the same bits as DeepSpeed's own, in fewer bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from agentrl.learner.deepspeed import engine as engines
from agentrl.learner.deepspeed.ranks import join
from agentrl.learner.learner import LearnerRank
from tests.benchmarks.gradient_bytes import EACH, TENSORS, Counted, counted
from tests.learner_support import CollectingSender, largest_difference, make_groups, make_settings

KINDS = {"DeepSpeed's own": (None, {}), "of several ranks": (False, {}), "alone": (True, engines.ALONE)}


def choose(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sum as DeepSpeed does, as on one of several ranks, or as a rank that is alone."""
    alone, options = KINDS[kind]
    lighten = engines.lighten
    monkeypatch.setattr(engines, "lighten", lambda optimizer, alone=alone, **_: None if alone is None else lighten(optimizer, alone=alone))
    monkeypatch.setattr(engines, "ALONE", options)


def learner_of(model: str, **settings: Any) -> LearnerRank:
    learner = LearnerRank(make_settings(model, learner={"learner_dtype": "bfloat16", "zero_stage": 2, **settings}), CollectingSender())
    learner.start(0, 1, 0)
    return learner


def trained(model: str, **settings: Any) -> tuple[dict[str, torch.Tensor], list[float]]:
    learner = learner_of(model, **settings)
    norms = [learner.train(step, *make_groups(seed=step, version=step)).metrics["grad_norm"] for step in range(3)]
    weights = {name: tensor.detach().clone() for name, tensor in learner._started.named_weights()}
    learner.close()
    return weights, norms


@pytest.mark.parametrize("tokens", [24, 10_000])  # several micro-batches, and one
def test_every_way_has_the_same_bits(tokens: int, tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for kind in KINDS:
        with monkeypatch.context() as patch:
            choose(kind, patch)
            found[kind] = trained(tiny_model, micro_batch_tokens=tokens)
    first, norms = found.pop("DeepSpeed's own")
    assert all(norm > 0.0 for norm in norms)
    for weights, others in found.values():
        assert others == norms
        assert largest_difference(first, weights) == 0.0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_gradient_that_is_not_finite_changes_nothing(kind: str, value: float, tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    choose(kind, monkeypatch)
    learner = learner_of(tiny_model)
    engine = learner._started.models.policy
    weights = list(engine.module.parameters())
    before = [weight.detach().clone() for weight in weights]
    one = weights[3]
    hook = one.register_hook(lambda gradient: gradient.index_fill(0, torch.tensor([0]), value))
    loss = torch.stack([weight.sum() for weight in weights]).sum()
    engine.accumulate(loss, last=True)
    assert engine.update(1e-3) is None
    assert all(torch.equal(*pair) for pair in zip(before, weights, strict=True))
    hook.remove()
    engine.accumulate(torch.stack([weight.sum() for weight in weights]).sum(), last=True)
    assert engine.update(0.1) == pytest.approx(sum(weight.numel() for weight in weights) ** 0.5, rel=1e-3)
    assert not any(torch.equal(*pair) for pair in zip(before, weights, strict=True))
    learner.close()


def per_parameter(count: Counted) -> float:
    return sum(count.bytes.values()) / (TENSORS * EACH)


def test_the_bytes_are_those_of_the_docstring() -> None:
    ranks = join(0, 1, master_port=0, master_addr="127.0.0.1", device="cpu", timeout_s=60)
    for lightened, micro, update in ((False, 38, 42), (True, 10, 34)):
        one, two = (counted(ranks, micros=number, lightened=lightened) for number in (1, 2))
        assert per_parameter(two[0]) - per_parameter(one[0]) == pytest.approx(micro, abs=0.1)
        # Memory for the sums is cleared once.
        assert per_parameter(one[0]) == pytest.approx(micro + 4, abs=0.1)
        assert per_parameter(one[1]) - 28 == pytest.approx(update, abs=0.1)
        assert per_parameter(two[1]) == per_parameter(one[1])
    ranks.leave()

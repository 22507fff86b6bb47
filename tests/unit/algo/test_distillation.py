"""Divergence from a teacher over its most likely tokens and the rest."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from agentrl.algo.distillation import top_k_divergence
from agentrl.core.errors import ConfigError


def distributions(seed: int, tokens: int = 5, vocabulary: int = 12) -> tuple[Tensor, Tensor]:
    """Log-probabilities of a policy and of a teacher over a vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    student, teacher = (2.0 * torch.randn(tokens, vocabulary, generator=generator, dtype=torch.float64) for _ in range(2))
    return student.log_softmax(-1), teacher.log_softmax(-1)


def whole(student: Tensor, teacher: Tensor, direction: str) -> Tensor:
    a, b = (teacher, student) if direction == "forward" else (student, teacher)
    return (a.exp() * (a - b)).sum(-1)


def test_values_by_hand() -> None:
    """Policy 0.5, 0.2 and 0.3 for the rest; teacher 0.6, 0.3 and 0.1."""
    student, teacher = torch.tensor([[0.5, 0.2]]).log(), torch.tensor([[0.6, 0.3]]).log()
    forward = 0.6 * math.log(0.6 / 0.5) + 0.3 * math.log(0.3 / 0.2) + 0.1 * math.log(0.1 / 0.3)
    reverse = 0.5 * math.log(0.5 / 0.6) + 0.2 * math.log(0.2 / 0.3) + 0.3 * math.log(0.3 / 0.1)
    assert float(top_k_divergence(student, teacher, "forward")) == pytest.approx(forward, rel=1e-5)
    assert float(top_k_divergence(student, teacher, "reverse")) == pytest.approx(reverse, rel=1e-5)


@pytest.mark.parametrize("direction", ["forward", "reverse"])
@given(seed=st.integers(0, 10_000), top_k=st.integers(1, 12))
@settings(max_examples=40, deadline=None)
def test_more_tokens_come_closer_to_the_whole_and_all_of_them_are_the_whole(direction: str, seed: int, top_k: int) -> None:
    student, teacher = distributions(seed)
    best = teacher.topk(top_k).indices
    found = top_k_divergence(student.gather(-1, best), teacher.gather(-1, best), direction)
    full = whole(student, teacher, direction)
    assert (found >= -1e-5).all()
    assert (found <= full + 1e-4).all()
    if top_k == 12:
        assert torch.allclose(found, full, atol=1e-4)


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_entries_that_are_not_there_do_not_count(direction: str) -> None:
    student, teacher = distributions(1)
    best = teacher.topk(4).indices
    few = student.gather(-1, best), teacher.gather(-1, best)
    nothing = torch.full((5, 2), -math.inf, dtype=torch.float64)
    padded = torch.cat([few[0], student[:, :2]], 1), torch.cat([few[1], nothing], 1)
    assert torch.equal(top_k_divergence(*padded, direction), top_k_divergence(*few, direction))


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_descent_makes_the_policy_the_teacher(direction: str) -> None:
    _, teacher = distributions(2)
    logits = torch.zeros_like(teacher, requires_grad=True)
    best = teacher.topk(6).indices
    optimizer = torch.optim.Adam([logits], lr=0.1)
    for _ in range(400):
        optimizer.zero_grad()
        top_k_divergence(logits.log_softmax(-1).gather(-1, best), teacher.gather(-1, best), direction).sum().backward()
        optimizer.step()
    learned = logits.detach().log_softmax(-1).gather(-1, best)
    assert torch.allclose(learned, teacher.gather(-1, best), atol=1e-3)


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_a_token_that_the_policy_excludes_leaves_a_finite_gradient(direction: str) -> None:
    logits = torch.tensor([[0.0, 1.0, -math.inf]], requires_grad=True)
    teacher = torch.tensor([[0.6, 0.3, 0.1]]).log()
    divergence = top_k_divergence(logits.log_softmax(-1), teacher, direction)
    (gradient,) = torch.autograd.grad(divergence.sum(), logits)
    assert torch.isfinite(divergence).all()
    assert torch.isfinite(gradient[:, :2]).all()


def test_an_unknown_direction_is_named() -> None:
    with pytest.raises(ConfigError, match=r"--teacher-loss.*sideways.*forward, reverse"):
        top_k_divergence(torch.zeros(1, 1), torch.zeros(1, 1), "sideways")

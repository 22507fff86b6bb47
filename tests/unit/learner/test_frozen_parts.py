"""Weights that are not trained: the product with them and its gradient, and gradients that are dropped while engines generate."""

from __future__ import annotations

import torch
from torch import nn

from agentrl.learner.parameters import move
from agentrl.learner.quantised import _Product, whole_weight


def test_the_gradient_goes_through_a_frozen_weight_and_not_into_it() -> None:
    weight, bias = torch.randn(3, 4), torch.randn(3)
    x = torch.randn(2, 5, 4, requires_grad=True)
    output = _Product.apply(x, weight, bias)
    torch.testing.assert_close(output, nn.functional.linear(x, weight, bias))
    slope = torch.randn(2, 5, 3)
    (found,) = torch.autograd.grad(output, x, slope)
    torch.testing.assert_close(found, slope @ weight)


def test_a_weight_that_is_not_quantised_is_its_tensor() -> None:
    parameter = nn.Parameter(torch.randn(2, 2))
    assert whole_weight(parameter).data_ptr() == parameter.data_ptr()


def test_gradients_are_dropped_whether_parameters_are_moved_or_not() -> None:
    module = nn.Linear(2, 2)
    for weights in (False, True):
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
        move(module, torch.device("cpu"), weights=weights)
        assert [parameter.grad for parameter in module.parameters()] == [None, None]

"""Frozen weights in 4 bits beside a trained adapter (QLoRA, Dettmers et al., arXiv:2305.14314), by bitsandbytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


def quantisation(dtype: torch.dtype, whole: Sequence[str] = ()) -> Any:
    """Return transformers' settings for loading linear layers in 4 bits (NF4, scales quantised too) that compute in `dtype`.

    The output layer of a language model stays whole, and so do the layers that are named in `whole`.
    """
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        llm_int8_skip_modules=list(whole) or None,
    )


def whole_weight(parameter: Any) -> Tensor:
    """Return the numbers that a parameter in 4 bits stands for, and of any other parameter its tensor."""
    state = getattr(parameter, "quant_state", None)
    if state is None:
        tensor: Tensor = parameter.data
        return tensor
    from bitsandbytes.functional import dequantize_4bit

    weight: Tensor = dequantize_4bit(parameter.data, state)
    return weight


def use_one_product(model: nn.Module) -> None:
    """Make layers in 4 bits compute with the numbers that `whole_weight` gives, in every pass.

    bitsandbytes has other kernels for passes without a gradient, and on a CPU it repacks the weights for them: their results differ by
    1e-2 from those of training passes, so a policy would not agree with itself, nor with engines that have the whole weights.
    """
    product: Any = _Product
    for module in model.modules():
        if getattr(getattr(module, "weight", None), "quant_state", None) is not None:
            layer: Any = module
            layer.forward = lambda x, layer=layer: product.apply(x, layer.weight, layer.bias)


class _Product(torch.autograd.Function):
    """``x W^T + bias`` with W made from its 4 bits in each direction, so that it is never kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parameter: Any, bias: Tensor | None) -> Tensor:
        ctx.parameter = parameter
        return nn.functional.linear(x, whole_weight(parameter).to(x.dtype), None if bias is None else bias.to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient @ whole_weight(ctx.parameter).to(gradient.dtype), None, None

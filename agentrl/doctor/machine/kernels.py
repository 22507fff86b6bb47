"""The learner's kernels of attention and its output layer in chunks, in bfloat16, against the plain computation in float32."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from agentrl.doctor.machine.findings import Finding, Level, judged
from agentrl.learner.attention import KERNELS, MODULES, Kernel, attend, register, tree_mask
from agentrl.learner.head import OutputLayer, token_scores

PART = "kernels"
ERROR = 0.03
"""Distance of values and gradients from float32, as a share of the largest number, that passes for rounding in bfloat16."""
ROWS = {"cuda": (700, 333, 129, 40), "cpu": (150, 70, 33, 17)}
HEADS = (8, 2, 64)
"""Heads, heads of keys, and their size."""
HEAD = {"cuda": (2048, 151936, 1024), "cpu": (540, 131072, 32)}
"""Tokens, vocabulary and width of the output layer that is tried; the tokens make more than one chunk."""


def kernels(device: torch.device) -> Iterator[Finding]:
    """Try every kernel of attention that is there."""
    for kernel in KERNELS.values():
        module = MODULES.get(kernel.name)
        if module is not None and (device.type == "cpu" or importlib.util.find_spec(module) is None):
            why = "needs a GPU" if device.type == "cpu" else f"{module} is not installed"
            yield Finding(part=PART, name=kernel.name, level=Level.UNTRIED, found=why)
        elif kernel.name != "eager":
            yield attention(kernel, device)
    yield prefix_trees(device)


def attention(kernel: Kernel, device: torch.device) -> Finding:
    """Compare a kernel over several rows, with and without a window if it packs rows, with eager attention of one row at a time."""
    lengths = ROWS[device.type]
    parts = _parts(sum(lengths), device)
    worst = {}
    for window in (None, 50) if kernel.packed else (None,):
        run = _packed(kernel, lengths, window) if kernel.packed else _row_by_row(kernel, lengths)
        worst[window] = _compared(run, _eager(lengths, window), parts)
    return _verdict(kernel.name, worst[None], worst.get(50))


def prefix_trees(device: torch.device) -> Finding:
    """Compare attention of rows that share tokens with eager attention under a mask of all pairs."""
    segment = torch.cat([torch.full((length,), number, device=device) for number, length in enumerate(ROWS[device.type])])
    # The first goes on in the second and in the third, which goes on in the last.
    ancestors = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], dtype=torch.bool, device=device)
    seen = ancestors[segment[:, None], segment].tril()
    mask = tree_mask(seen.sum(0) + torch.arange(len(segment), device=device))

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attend(_layer(), query, key, value, mask, packed=_refused, scaling=HEADS[2] ** -0.5)[0]

    def eager(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return _plain(query, key, value, seen)

    return _verdict("prefix trees", _compared(run, eager, _parts(len(segment), device)))


Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From query, keys and values # [1, heads, L, size] to the output # [1, L, heads, size]."""


def _packed(kernel: Kernel, lengths: Sequence[int], window: int | None) -> Attention:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    register(kernel.name)
    function = ALL_ATTENTION_FUNCTIONS[kernel.implementation]

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        bounds = torch.tensor([0, *lengths], device=query.device).cumsum(0).int()
        options = {"cu_seq_lens_q": bounds, "max_length_q": max(lengths), "scaling": HEADS[2] ** -0.5, "sliding_window": window}
        output: Tensor = function(_layer(), query, key, value, None, **options)[0]
        return output

    return run


def _row_by_row(kernel: Kernel, lengths: Sequence[int]) -> Attention:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    function = ALL_ATTENTION_FUNCTIONS[kernel.implementation]

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows = _rows(lengths, query, key, value)
        return torch.cat([function(_layer(), *row, None, scaling=HEADS[2] ** -0.5)[0] for row in rows], dim=1)

    return run


def _rows(lengths: Sequence[int], *parts: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(torch.split(part, list(lengths), dim=2) for part in parts), strict=True)


def _eager(lengths: Sequence[int], window: int | None) -> Attention:
    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        outputs = []
        for q, k, v in _rows(lengths, query, key, value):
            places = torch.arange(q.shape[2], device=q.device)
            distance = places[:, None] - places
            outputs.append(_plain(q, k, v, (distance >= 0) & (distance < (window or len(places)))))
        return torch.cat(outputs, dim=1)

    return run


def _plain(query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
    """Attention as the models of transformers write it out."""
    from transformers.models.qwen2.modeling_qwen2 import eager_attention_forward

    mask = torch.zeros(seen.shape, device=seen.device).masked_fill(~seen, float("-inf"))[None, None]
    output: Tensor = eager_attention_forward(_layer(), query, key, value, mask, scaling=HEADS[2] ** -0.5)[0]
    return output


def _layer() -> Any:
    """Return the attributes of a layer that functions of attention look at."""
    return SimpleNamespace(num_key_value_groups=HEADS[0] // HEADS[1], training=False, is_causal=True)


def _refused(*_: Any) -> Tensor:
    raise AssertionError("rows that share a prompt are not packed")


def _parts(length: int, device: torch.device) -> list[Tensor]:
    heads, key_heads, size = HEADS
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, count, length, size, generator=generator).bfloat16().to(device) for count in (heads, key_heads, key_heads)]


def _compared(run: Attention, reference: Attention, parts: Sequence[Tensor]) -> list[float]:
    """Return the distances of the values, and of the gradients of queries, keys and values."""
    fast, exact = [part.clone().requires_grad_() for part in parts], [part.float().requires_grad_() for part in parts]
    output, expected = run(*fast), reference(*exact)
    # Random weights, because errors may cancel in a plain sum.
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).to(expected.device)
    mine = torch.autograd.grad((output.float() * weight).sum(), fast)
    theirs = torch.autograd.grad((expected * weight).sum(), exact)
    return [_distance(output, expected), *(_distance(*pair) for pair in zip(mine, theirs, strict=True))]


def _distance(found: Tensor, wanted: Tensor) -> float:
    """Largest difference of two tensors, as a share of the largest number; NaN if there is one."""
    exact = wanted.detach().float()
    return float((found.detach().float() - exact).abs().max() / exact.abs().max())


def _verdict(name: str, errors: Sequence[float], windowed: Sequence[float] | None = None) -> Finding:
    everything = [*errors, *(windowed or ())]
    value, *gradients = errors
    found = f"values off by {value:.4f}, gradients by {max(gradients):.4f}"
    if windowed is not None:
        found += f"; with a window {max(windowed):.4f}"
    # Written so that NaN, for which every comparison is false, counts as wrong.
    wrong = not all(error <= ERROR for error in everything)
    remedy = f"Do not train with it: --attn-implementation sdpa, or another version of torch; {ERROR} passes for rounding."
    if name == "prefix trees":
        remedy = f"Train with --no-share-prompts, or another version of torch; {ERROR} passes for rounding."
    return judged(PART, name, found, wrong=wrong, remedy=remedy)


def head(device: torch.device) -> Iterator[Finding]:
    """Compare log-probabilities and gradients of the output layer, some tokens at a time, with those of all logits in float32."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokens, vocabulary, width = HEAD[device.type]
    sizes = {"intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    torch.manual_seed(0)
    # Only the output layer is computed, so the other weights take no memory.
    with torch.device("meta"):
        model = Qwen2ForCausalLM(Qwen2Config(hidden_size=width, vocab_size=vocabulary, tie_word_embeddings=False, **sizes))
    weight = torch.nn.Parameter(torch.randn(vocabulary, width, device=device).mul_(width**-0.5).bfloat16())
    model.lm_head.weight = weight
    hidden = torch.randn(tokens, width, device=device).bfloat16().requires_grad_()
    targets, ones = torch.randint(vocabulary, (tokens,), device=device), torch.ones(tokens, device=device)
    share = torch.randn(tokens, device=device)
    found = OutputLayer(model).score(hidden, targets, ones, entropy_gradient=False, wide=False)[0]
    mine = torch.autograd.grad((found * share).sum(), (hidden, weight))
    wide = [part.detach().float().requires_grad_() for part in (hidden, weight)]
    expected = token_scores(wide[0] @ wide[1].T, targets, ones, False)[0]
    theirs = torch.autograd.grad((expected * share).sum(), wide)
    errors = [_distance(found, expected), *(_distance(*pair) for pair in zip(mine, theirs, strict=True))]
    text = f"log-probabilities off by {errors[0]:.4f}, gradients by {max(errors[1:]):.4f}"
    remedy = "Use another version of torch; until then --fp32-lm-head computes the logits in float32."
    yield judged(PART, "output layer in chunks", text, wrong=not all(error <= ERROR for error in errors), remedy=remedy)

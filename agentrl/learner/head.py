"""The output layer of a policy and what is read off it, a few rows at a time, so that logits of all tokens never exist together."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from agentrl.learner.settings import chunk_rows

Score: TypeAlias = Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]
"""From logits # [n, vocabulary], targets # [n] and temperatures # [n] to log-probabilities # [n] and, if wanted, entropies # [n]."""


def token_scores(
    logits: Tensor, targets: Tensor, temperature: Tensor, entropy_gradient: bool, top_k: int = 0, *, wants_entropy: bool = True
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities of `targets` # [a] and entropies in nats # [a] of logits # [a, vocabulary] at a temperature each # [a].

    Where `targets` are several tokens for each place # [a, n], the log-probabilities are # [a, n] too. With `top_k` those of the most
    likely tokens and the ids of these follow behind them; -inf and 0 where the vocabulary is smaller. # [a, n + 2 top_k] Entropies that
    are not wanted are left out. # [0]
    """
    log_p = torch.log_softmax(logits / temperature.float()[:, None], dim=-1)  # float32, which the division makes of narrower logits
    entropy = log_p.new_empty(0)
    if wants_entropy:
        with torch.set_grad_enabled(torch.is_grad_enabled() and entropy_gradient):
            # A token that the model excludes has the logit -inf, and 0 times that is no number.
            p, finite = log_p.exp(), log_p.clamp(min=torch.finfo(log_p.dtype).min)
            entropy = -(p * finite if torch.is_grad_enabled() else p.mul_(finite)).sum(-1)
    single = targets.ndim == 1  # said, because a rank may have no place at all, and then -1 stands for any size
    found = log_p.gather(-1, targets[:, None] if single else targets)
    if top_k:
        return torch.cat([found, *_most_likely(log_p, top_k)], -1), entropy
    return (found[:, 0] if single else found), entropy


def _most_likely(log_p: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the most likely tokens, and their ids as numbers of the same type. # [a, vocabulary] -> [a, top_k] each."""
    best = log_p.topk(min(top_k, log_p.shape[-1]), dim=-1)
    missing = (0, top_k - best.values.shape[-1])
    return nn.functional.pad(best.values, missing, value=float("-inf")), nn.functional.pad(best.indices.to(log_p.dtype), missing)


def without_tokens(logits: Tensor, excluded: Sequence[int]) -> Tensor:
    """Return logits # [n, vocabulary] in which the excluded tokens have no probability; as they are if there are none."""
    if not excluded:
        return logits
    return logits.index_fill(-1, torch.tensor(excluded, device=logits.device), float("-inf"))


def given_scores(logits: Tensor, targets: Tensor, *, figures: bool) -> tuple[Tensor, Tensor]:
    """Return log-probabilities of given tokens # [n] from logits # [n, vocabulary], and figures without a gradient # [n, 2].

    The figures are 1 where the token is the likeliest, and the entropy of the distribution in nats; # [n] zeros if they are not wanted.
    """
    apply: Callable[..., tuple[Tensor, Tensor]] = _GivenScores.apply
    return apply(logits, targets, figures)


FIGURE_ROWS = 64
"""Rows whose figures are computed at once, few enough for the caches of a CPU."""


class _GivenScores(torch.autograd.Function):
    """`given_scores` with one tensor of the size of the logits from forward to backward, where autograd would make four more."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, figures: bool) -> tuple[Tensor, Tensor]:
        log_p = torch.log_softmax(logits, -1, dtype=torch.float32)
        ctx.save_for_backward(log_p, targets)
        ctx.dtype = logits.dtype
        found = log_p.gather(-1, targets[:, None])[:, 0]
        shown = torch.zeros_like(found)
        if figures and len(log_p):
            blocks = zip(torch.split(log_p, FIGURE_ROWS), torch.split(targets, FIGURE_ROWS), strict=True)
            # A token that the model excludes has the logit -inf, and 0 times that is no number.
            least = torch.finfo(log_p.dtype).min
            entropies = [(part.argmax(-1) == target, -part.exp().mul_(part.clamp(min=least)).sum(-1)) for part, target in blocks]
            shown = torch.cat([torch.stack([right.float(), entropy], -1) for right, entropy in entropies])
        elif figures:
            shown = log_p.new_zeros(0, 2)
        ctx.mark_non_differentiable(shown)
        return found, shown

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        log_p, targets = ctx.saved_tensors
        to_logits = log_p.exp_().mul_(-gradient[:, None])  # in place: nothing needs the log-probabilities again
        to_logits.scatter_add_(-1, targets[:, None], gradient[:, None])
        return to_logits.to(ctx.dtype), None, None


def scores_in_chunks(
    logits: Tensor, targets: Tensor, temperature: Tensor, *, entropy_gradient: bool, top_k: int = 0, samples: bool = True
) -> tuple[Tensor, Tensor]:
    """Return what `token_scores` returns, a chunk of rows at a time, computed again in the backward pass; of given rows `given_scores`."""
    whole = logits, targets, temperature
    if not samples:
        return given_scores(logits, targets, figures=top_k > 0)
    rows = chunk_rows(logits.shape[-1])
    if len(logits) <= rows:
        return token_scores(*whole, entropy_gradient, top_k)
    chunks = zip(*(torch.split(part, rows) for part in whole), strict=True)
    parts = [checkpoint(token_scores, *chunk, entropy_gradient, top_k, use_reentrant=False) for chunk in chunks]
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


@contextmanager
def only_positions(head: nn.Module, select: Tensor) -> Iterator[None]:
    """Within the block, the output layer sees the selected positions only, as one row of a batch of one."""

    def narrow(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (inputs[0].flatten(0, 1)[select][None], *inputs[1:])

    handle = head.register_forward_pre_hook(narrow)
    try:
        yield
    finally:
        handle.remove()


class OutputLayer:
    """The end of a causal language model of transformers: its output layer, and what the model does to the logits afterwards.

    The latter (a scale, a soft cap) is not listed here per architecture: the model's own ``forward`` is run on a copy whose
    body and output layer hand through what they get. `agentrl.learner.models.check_output` compares the result with the model itself.
    """

    def __init__(self, model: Any, excluded: Sequence[int] = (), *, samples: bool = True) -> None:
        self._excluded = excluded  # tokens that have no probability
        self._samples = samples  # tokens were sampled at a temperature, others are given
        self.layer, self.body = model.get_output_embeddings(), model.base_model
        # A shallow copy shares configuration and parameters, but has a table of submodules of its own.
        self._end = copy.copy(model)
        self._end._modules = {name: self._stand_in(module) for name, module in model._modules.items()}

    def _stand_in(self, module: nn.Module | None) -> nn.Module | None:
        if module is self.body:
            return _Body()
        return nn.Identity() if module is self.layer else module

    @staticmethod
    def fits(model: Any) -> bool:
        """Return True if a model is a body followed by a plain linear output layer."""
        layer, body = model.get_output_embeddings(), model.base_model
        children = list(model.children())
        return type(layer) is nn.Linear and body is not model and any(c is layer for c in children) and any(c is body for c in children)

    def score(
        self,
        hidden: Tensor,
        targets: Tensor,
        temperature: Tensor,
        *,
        entropy_gradient: bool,
        wide: bool,
        top_k: int = 0,
        compare: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies in nats of action tokens # [a], from the body's output that predicts them # [a, hidden].

        The output layer is called once, so that ZeRO-3 gathers it once in each direction. With `wide` its products are float32; `top_k` as
        in `token_scores`. Of given tokens the result is that of `given_scores`, with figures where `top_k` is not 0. With `compare` it is
        that of this function of the logits and the targets, which are a teacher's results then.
        """

        def scores(logits: Tensor, targets: Tensor, temperature: Tensor, wants_entropy: bool = True) -> tuple[Tensor, Tensor]:
            if compare is not None:
                return compare(self._finish(logits), targets)
            if not self._samples:
                return given_scores(self._finish(logits), targets, figures=top_k > 0 and wants_entropy)
            return token_scores(self._finish(logits), targets, temperature, entropy_gradient, top_k, wants_entropy=wants_entropy)

        def inside(hidden: Tensor) -> tuple[Tensor, Tensor]:
            weight, bias = self.layer.weight, self.layer.bias
            if len(hidden) <= chunk_rows(len(weight)):
                return scores(_linear(hidden, weight, bias, wide), targets, temperature)
            chunked: Any = _ChunkedScores
            found: tuple[Tensor, Tensor] = chunked.apply(hidden, weight, bias, targets, temperature, scores, entropy_gradient, wide)
            return found

        with _forward(self.layer, inside):
            result: tuple[Tensor, Tensor] = self.layer(hidden)
        return result

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of the body's output. # [n, hidden] -> [n, vocabulary]."""
        return self._finish(self.layer(hidden))

    def _finish(self, logits: Tensor) -> Tensor:
        """Return logits # [n, vocabulary] as the model hands them out, after its scale or soft cap."""
        finished: Tensor = type(self._end).forward(self._end, inputs_embeds=logits[None], use_cache=False, return_dict=True).logits[0]
        return without_tokens(finished, self._excluded)


class _Body(nn.Module):
    """Stand-in for the body of a model: its output is its input."""

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> _BodyOutput:
        return _BodyOutput(inputs_embeds)


class _BodyOutput:
    """Hidden states in the two ways in which models read them; there is no cache, attention or routing beside them."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, place: int) -> Tensor | None:
        return None if place else self.last_hidden_state

    def __getattr__(self, name: str) -> None:
        return None


@contextmanager
def _forward(layer: nn.Module, function: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Make a call of the layer run `function`; its hooks, which gather parameters under ZeRO-3, run as ever."""
    layer.forward = function
    try:
        yield
    finally:
        del layer.forward


def _linear(hidden: Tensor, weight: Tensor, bias: Tensor | None, wide: bool) -> Tensor:
    if not wide:
        return nn.functional.linear(hidden, weight, bias)
    return nn.functional.linear(hidden.float(), weight.float(), None if bias is None else bias.float())


class _ChunkedScores(torch.autograd.Function):
    """Scores of all rows, a chunk at a time; logits are computed again in the backward pass, a chunk at a time.

    ``torch.utils.checkpoint`` around every chunk would do the same with a second and third tensor as large as the output
    layer, since every chunk's gradient of it would be a tensor of its own, and would round their sum to bfloat16 after every chunk.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: Tensor,
        score: Score,
        entropy_gradient: bool,
        wide: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(hidden, weight, bias, targets, temperature)
        ctx.score, ctx.entropy_gradient, ctx.wide = score, entropy_gradient, wide
        rows = chunk_rows(len(weight))
        parts = [
            score(_linear(h, weight, bias, wide), target, temp, True)
            for h, target, temp in zip(*(torch.split(part, rows) for part in (hidden, targets, temperature)), strict=True)
        ]
        logprobs, entropies = (torch.cat(part) for part in zip(*parts, strict=True))
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, temperature = ctx.saved_tensors
        to_hidden = torch.empty_like(hidden)
        to_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        to_bias = torch.zeros_like(bias, dtype=torch.float32) if ctx.needs_input_grad[2] else None
        rows = chunk_rows(len(weight))
        parts = (torch.split(part, rows) for part in (hidden, to_hidden, targets, temperature, *gradients))
        for h, to_h, target, temp, *grads in zip(*parts, strict=True):
            to_logits = _logit_gradient(ctx, _linear(h, weight, bias, ctx.wide), target, temp, grads).to(weight.dtype)
            torch.mm(to_logits, weight, out=to_h)
            if to_weight is not None and to_weight.dtype == h.dtype:
                to_weight.addmm_(to_logits.t(), h)
            elif to_weight is not None:
                to_weight += to_logits.t() @ h
            if to_bias is not None:
                to_bias += to_logits.sum(0)
        narrow = (None if total is None else total.to(weight.dtype) for total in (to_weight, to_bias))
        return to_hidden, *narrow, None, None, None, None, None


def _logit_gradient(ctx: Any, logits: Tensor, targets: Tensor, temperature: Tensor, gradients: list[Tensor]) -> Tensor:
    """Gradient of a chunk's scores with respect to the output of the linear layer. # [n, vocabulary]."""
    with torch.enable_grad():
        logits.requires_grad_()
        logprobs, entropies = ctx.score(logits, targets, temperature, ctx.entropy_gradient)
        outputs = (logprobs, entropies) if ctx.entropy_gradient else (logprobs,)
        (gradient,) = torch.autograd.grad(outputs, logits, gradients[: len(outputs)])
    found: Tensor = gradient
    return found

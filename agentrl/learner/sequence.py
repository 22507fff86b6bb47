"""Sequence parallelism: several ranks run one micro-batch together, each its part of the tokens (Ulysses, arXiv:2309.14509)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from agentrl.core.errors import ConfigError
from agentrl.core.model_shape import layer_kinds, placeholder_ids
from agentrl.learner.attention import Kernel
from agentrl.learner.layout import MicroBatch
from agentrl.learner.probes import probe
from agentrl.learner.ranks import Ranks


@dataclass(frozen=True, slots=True, eq=False)
class SequenceGroup:
    """The ranks that run every micro-batch together; around attention they exchange tokens for heads."""

    size: int  # ranks of the group
    rank: int  # this rank's place among them
    group: dist.ProcessGroup

    def cut(self, micro: MicroBatch) -> tuple[MicroBatch, dict[str, Any], Tensor]:
        """Return this rank's part of a packed micro-batch, the arguments for the model, and which predictions are in it. # [p] bool.

        Attention sees all tokens, so bounds and mask are those of the whole sequence, which is padded by a row of its own.
        """
        whole = self._padded(micro)
        inputs = whole.inputs()
        inputs.pop("seq_idx", None)
        share = whole.input_ids.shape[1] // self.size
        begin, end = self.rank * share, (self.rank + 1) * share
        inputs |= {name: inputs[name][:, begin:end] for name in ("input_ids", "position_ids")}
        mine = (whole.select >= begin) & (whole.select < end)
        part = replace(
            whole,
            real=whole.real[begin:end],
            select=whole.select[mine] - begin,
            targets=whole.targets[mine],
            temperature=whole.temperature[mine],
            experts=None if whole.experts is None else whole.experts[begin:end],
        )
        return part, inputs, mine

    def _padded(self, micro: MicroBatch) -> MicroBatch:
        if micro.input_ids.shape[0] != 1:
            raise ValueError("only micro-batches of one packed sequence can be cut")
        length = micro.input_ids.shape[1]
        more = -length % self.size
        position = torch.arange(length, device=micro.input_ids.device)[None] if micro.position_ids is None else micro.position_ids
        changed: dict[str, Any] = {"input_ids": pad(micro.input_ids, (0, more)), "position_ids": pad(position, (0, more))}
        changed["real"] = pad(micro.real, (0, more))
        if micro.experts is not None:
            changed["experts"] = pad(micro.experts, (0, 0, 0, 0, 0, more), value=-1)
        if micro.bounds is not None and more:
            changed["bounds"] = pad(micro.bounds, (0, 1), value=length + more)
        if micro.ends is not None:
            changed["ends"] = pad(micro.ends, (0, more), value=length + more)
        return replace(micro, **changed)

    def gather(self, scores: Tensor, mine: Tensor) -> Tensor:
        """Return the scores of all predictions of a micro-batch # [p, ...], made of those of each rank's part."""
        everything = scores.new_zeros(len(mine), *scores.shape[1:])
        everything[mine] = scores
        return self.sum(everything)

    def sum(self, part: Tensor) -> Tensor:
        """Return the sum of the parts that the ranks have of something; its gradient is that of each part."""
        exchange: Any = _Sum
        total: Tensor = exchange.apply(part, self.group)
        return total


class _Sum(torch.autograd.Function):
    """Every rank of a group computes the same loss of the sum; the gradient of a part is needed where it was computed."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        del ctx
        total = part.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        del ctx
        return gradients[0], None


def join_group(ranks: Ranks) -> SequenceGroup:
    """Make the groups of consecutive ranks, a collective operation of all ranks, and return this rank's own."""
    size = ranks.sequence_parallel
    groups = [dist.new_group(list(range(first, first + size))) for first in range(0, ranks.world_size, size)]
    group: Any = groups[ranks.data_rank]
    return SequenceGroup(size, ranks.rank % size, group)


@torch.no_grad()
def run_together(
    kernel: Kernel,
    exchange: Callable[[Kernel, SequenceGroup, Any], str],
    score: Callable[[MicroBatch], Tensor],
    models: Sequence[Any],
    ranks: Ranks,
    rounding: float,
) -> None:
    """Make models run every micro-batch together with the other ranks of their group; tried on the first of them.

    Args:
        kernel: A kernel for packed rows.
        exchange: Registers the kernel for a model's configuration inside an exchange between ranks, and returns its name.
        score: Log-probabilities of a micro-batch's action tokens by the first model.
        models: What has a transformers model as its `model`, and a place for the group as its `sequence`.
        ranks: This rank among all.
        rounding: Difference that passes for rounding, as a share of the log-probabilities.

    Raises:
        ConfigError: If the model cannot be run in parts.
    """
    config = models[0].model.config
    if placeholder_ids(config):
        why = f"{type(models[0].model).__name__} reads images, which cannot be divided"
        raise ConfigError("--sequence-parallel", ranks.sequence_parallel, why, "Leave it at 1.")
    micro = probe(config, packed=True).to(ranks.device)
    alone = score(micro)
    group = join_group(ranks)
    name = exchange(kernel, group, config)
    for each in models:
        each.model.set_attn_implementation(name)
        each.sequence = group
    why = f"the layers of {type(models[0].model).__name__} need all tokens at once"
    kinds = set(layer_kinds(config))
    if not kernel.packed:
        why = f"the kernel {kernel.name} pads rows"
    elif kinds <= {"full_attention", "sliding_attention"} and (score(micro) - alone).abs().mean() <= rounding * alone.abs().mean():
        return
    raise ConfigError("--sequence-parallel", group.size, why, "Leave it at 1, or use another model or --attn-implementation.")

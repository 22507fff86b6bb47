"""Attention of the learner's models over rows back to back, and over prefix trees of rows, by one function that transformers calls."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.utils.rnn import pad_sequence

from agentrl.core.errors import ConfigError
from agentrl.learner.plan import LearnerConfig

BLOCK = 128
"""Tokens of a side of the blocks that flex attention computes or leaves out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Cost of attention per pair of tokens that a kernel computes, in that of as many multiplications (2) of a projection.

    A row that attends to itself alone has half of its pairs computed, a sequence with a mask all, or only those that see each other.
    """

    causal: float  # without a mask
    masked: float  # with a mask
    skips: bool  # whether pairs that a mask hides cost nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A way to compute attention: how rows are laid out for it, and what it costs."""

    name: str  # as `--attn-implementation` has it
    packed: bool  # whether rows follow each other in one sequence instead of being padded
    shares: bool  # whether it takes rows that share tokens, as prefix trees
    applies: frozenset[str] = frozenset()  # of `EXTRAS`, what it does if a layer asks for it
    costs: Costs

    @property
    def implementation(self) -> str:
        """Name under which transformers calls it."""
        return f"agentrl_{self.name}" if self.packed else self.name


PADDED = Costs(causal=1.7, masked=1.4, skips=False)
"""Measured for ``sdpa``: float32 on one x86 core with torch 2.13, rows of 1,024 tokens, heads of 32 and 64; not measured on a GPU."""

FLEX = Costs(causal=1.0, masked=1.25, skips=True)
"""Flex attention beside flash attention, as PyTorch's authors report it: 85 to 90 % of FlashAttention-2's speed forward and backward
(arXiv:2412.05496), and some blocks at the edges. On an H100 a whole model of 1.5e9 parameters took 0.227 s with flex, 0.279 s with a
dense mask and an eighth of 1.437 s with varlen in a pack of eight for a row of 5,119 tokens, so `masked` may be too low; the kernels alone
were not measured."""

EXTRAS = {"softcap": "the soft cap of attention scores", "s_aux": "attention sinks"}
"""Parts of attention that not every kernel has, as transformers' models name them in a call."""

CAPPED = frozenset({"softcap"})

KERNELS = {
    kernel.name: kernel
    for kernel in (
        Kernel(name="eager", packed=False, shares=False, applies=frozenset(EXTRAS), costs=PADDED),
        Kernel(name="sdpa", packed=False, shares=True, costs=PADDED),
        Kernel(name="varlen", packed=True, shares=True, costs=FLEX),
        Kernel(name="flash_attention_2", packed=True, shares=True, applies=CAPPED, costs=FLEX),
        Kernel(name="flash_attention_3", packed=True, shares=True, applies=CAPPED, costs=FLEX),
    )
}
MODULES = {"flash_attention_3": "flash_attn_interface", "flash_attention_2": "flash_attn"}


def choose_kernel(config: LearnerConfig, device: Literal["cpu", "cuda"]) -> Kernel:
    """Return the kernel that the settings ask for.

    ``auto`` takes ``sdpa`` on a CPU for ranks that work alone, and on a GPU the newest flash attention installed.

    Raises:
        ConfigError: If the kernel asked for is not installed, or does not run on this device.
    """
    asked = config.attn_implementation
    installed = [name for name, module in MODULES.items() if device == "cuda" and importlib.util.find_spec(module)]
    if asked == "auto":
        return KERNELS["sdpa" if device == "cpu" and config.sequence_parallel == 1 else [*installed, "varlen"][0]]
    if asked in MODULES and asked not in installed:
        why = f"it needs a GPU and the module {MODULES[asked]}"
        raise ConfigError("--attn-implementation", asked, why, "Install it, or leave the flag out.")
    return KERNELS[asked]


def register(name: str) -> None:
    """Make a packed kernel known to transformers under `Kernel.implementation`."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    kernel = KERNELS[name]
    ALL_ATTENTION_FUNCTIONS.register(kernel.implementation, functools.partial(attend, packed=_PACKED[name]))


def register_reference(kernel: Kernel) -> str:
    """Make what a packed kernel computes known to transformers, in any data type and on any device; return its name there.

    A kernel that pads has transformers' own name.
    """
    if not kernel.packed:
        return kernel.name
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    capped = "softcap" in kernel.applies
    name = f"agentrl_reference{'_capped' * capped}"  # without "flash", for which models of transformers look and ask for the package
    packed = functools.partial(_reference, capped=capped)
    ALL_ATTENTION_FUNCTIONS.register(name, functools.partial(attend, packed=packed))
    return name


Packed = Callable[..., Tensor]
"""From query, key, value # [tokens, heads, head size] of rows back to back, their bounds, longest row, scale, window and soft cap."""


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | BlockMask | None,
    *,
    packed: Packed,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: by a block mask, over rows back to back, or over whole sequences that need no mask.

    Args:
        module: The layer.
        query: # [B, heads, L, head size]
        key: Fewer heads are repeated. # [B, key heads, L, head size]
        value: As `key`.
        attention_mask: `BlockMask` for prefix trees of rows, otherwise none.
        packed: The kernel for rows back to back.
        cu_seq_lens_q: Where rows begin and the last ends; without it every sequence is a row. # [rows + 1] int32
        max_length_q: Tokens of the longest row.
        options: ``scaling``, ``sliding_window``, ``softcap``, ``s_aux`` and others that a model passes on.

    Returns:
        # [B, L, heads, head size], and no weights.

    Raises:
        ValueError: If the kernel cannot do what the model asks for.
    """
    if isinstance(attention_mask, BlockMask):
        return _flex(module, query, key, value, attention_mask, **options), None
    if attention_mask is not None or options.get("s_aux") is not None:
        raise ValueError("packed rows take neither a mask of all pairs nor attention sinks")
    batch, _, length, size = query.shape
    if cu_seq_lens_q is None or max_length_q is None:
        cu_seq_lens_q = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=query.device)
        max_length_q = length
    rows = (part.transpose(1, 2).flatten(0, 1) for part in (query, key, value))
    scale = options.get("scaling") or size**-0.5
    output = packed(*rows, cu_seq_lens_q, max_length_q, scale, options.get("sliding_window"), options.get("softcap"))
    return output.view(batch, length, *output.shape[1:]), None


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    if query.device.type == "cpu":
        return _reference(query, key, value, bounds, longest, scale, window, softcap, capped=False)
    if softcap is not None:
        raise ValueError("torch's varlen attention has no soft cap")
    from torch.nn.attention.varlen import varlen_attn

    return _varlen_on_gpu(varlen_attn, query, key, value, bounds, longest, scale, window)


def _varlen_on_gpu(
    kernel: Callable[..., Any], query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int, scale: float, window: int | None
) -> Tensor:
    """Call torch's kernel by the signature that it has: heads are shared by `enable_gqa`, or repeated before torch 2.12, which lacks it."""
    options: dict[str, Any] = {"scale": scale, "window_size": (-1 if window is None else window - 1, 0)}
    if query.shape[1] != key.shape[1]:
        if "enable_gqa" in inspect.signature(kernel).parameters:
            options["enable_gqa"] = True
        else:
            key, value = _repeated(query, key), _repeated(query, value)
    output: Tensor = kernel(query, key, value, bounds, bounds, longest, longest, **options)
    return output


def _repeated(query: Tensor, part: Tensor) -> Tensor:
    """Return keys or values with as many heads, their second dimension, as the query has."""
    return part.repeat_interleave(query.shape[1] // part.shape[1], 1)


def _reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    longest: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    *,
    capped: bool,
) -> Tensor:
    """Every row by itself: what the GPU kernel computes, where there is no such kernel."""
    del longest
    if softcap is not None and not capped:
        raise ValueError("the kernel has no soft cap")
    outputs = []
    lengths = bounds.diff().tolist()
    for q, k, v in zip(*(torch.split(part, lengths) for part in (query, key, value)), strict=True):
        q, k, v = (part.transpose(0, 1)[None] for part in (q, k, v))
        mask, places = None, torch.arange(q.shape[2], device=q.device)
        distance = places[:, None] - places
        if window is not None and len(places) > window:
            mask = (distance >= 0) & (distance < window)
        if softcap is not None:
            output = _capped(q, k, v, distance >= 0 if mask is None else mask, scale, softcap)
        else:
            grouped = q.shape[1] != k.shape[1]
            output = nn.functional.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=scale, enable_gqa=grouped)
        outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs)


def _capped(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, softcap: float) -> Tensor:
    key, value = _repeated(query, key), _repeated(query, value)
    scores = torch.tanh(query @ key.transpose(-1, -2) * scale / softcap) * softcap
    return scores.masked_fill(~mask, float("-inf")).softmax(-1) @ value


def _flash(
    module: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    longest: int,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    seen = (-1, -1) if window is None else (window - 1, 0)
    options = {"softmax_scale": scale, "causal": True, "window_size": seen, "softcap": softcap or 0.0}
    kernel = importlib.import_module(module).flash_attn_varlen_func
    output: Tensor = kernel(query, key, value, bounds, bounds, longest, longest, **options)
    return output


_PACKED: dict[str, Packed] = {"varlen": _varlen} | {name: functools.partial(_flash, module) for name, module in MODULES.items()}


def _flex(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, **options: Any) -> Tensor:
    if query.device.type != "cpu":  # transformers compiles flex attention
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        compiled: Tensor = ALL_ATTENTION_FUNCTIONS["flex_attention"](module, query, key, value, mask, **options)[0]
        return compiled
    if options.get("s_aux") is not None or options.get("softcap") is not None:
        raise ValueError("sinks and soft caps are not supported for prefix trees on a CPU")
    scale, grouped = options.get("scaling"), query.shape[1] != key.shape[1]
    output = nn.functional.scaled_dot_product_attention(query, key, value, expanded(mask), scale=scale, enable_gqa=grouped)
    return output.transpose(1, 2)


def expanded(mask: BlockMask) -> Tensor:
    """Return the pairs that a block mask lets see each other # [L, L] bool; for a CPU, where flex attention has no backward pass."""
    length, count = mask.seq_lengths[0], mask.kv_num_blocks.shape[-1]
    places = torch.arange(length)
    inside = mask.mask_mod(places[:1], places[:1], places[:, None], places)

    def blocks(numbers: Any, indices: Any) -> Tensor:
        there = torch.arange(count) < numbers[0, 0, :, None]
        found = torch.zeros(count, count, dtype=torch.bool).scatter(1, indices[0, 0].long(), there)
        return found.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:length, :length]

    return (blocks(mask.kv_num_blocks, mask.kv_indices) & inside) | blocks(mask.full_kv_num_blocks, mask.full_kv_indices)


def separate_rows(model: nn.Module) -> bool:
    """Make the linear attention layers of a hybrid model take packed rows one beside the other, padded; return False if it has none.

    These layers carry a state along the sequence. Kernels of flash-linear-attention begin anew at every row; the layers of
    transformers without them do not.
    """
    layers = [module for name, module in model.named_modules() if name.endswith(".linear_attn")]
    for layer in layers:
        layer.register_forward_pre_hook(_pad_rows, with_kwargs=True)
        layer.register_forward_hook(_join_rows, with_kwargs=True)
    return bool(layers)


def rows_are_separated(model: nn.Module) -> bool:
    """Return True for a model that `separate_rows` has changed."""
    return any(hook is _pad_rows for module in model.modules() for hook in module._forward_pre_hooks.values())


def _pad_rows(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if kwargs.get("cu_seq_lens_q") is None:
        return None
    name = "hidden_states"
    hidden = args[0] if args else kwargs[name]
    padded = pad_sequence(list(torch.split(hidden[0], kwargs["cu_seq_lens_q"].diff().tolist())), batch_first=True)
    return ((padded, *args[1:]), kwargs) if args else (args, kwargs | {name: padded})


def _join_rows(_: nn.Module, __: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor | None:
    if kwargs.get("cu_seq_lens_q") is None:
        return None
    lengths = kwargs["cu_seq_lens_q"].diff().tolist()
    return torch.cat([row[:length] for row, length in zip(output, lengths, strict=True)])[None]


def tree_mask(ends: Tensor) -> BlockMask:
    """Return the block mask of sequences in which rows share tokens as prefix trees, without a tensor of [L, L].

    A token sees itself and its ancestors. In the order of a walk over the trees, the descendants of a token follow it without a gap.

    Args:
        ends: Place behind the last descendant of every token. # [L]
    """

    def visible(_: Tensor, __: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (q < ends[k])

    some, every = _blocks(ends)
    partial = some & ~every
    length = len(ends)
    return BlockMask.from_kv_blocks(
        *_listed(partial), *_listed(every), BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=visible, seq_lengths=(length, length)
    )


def _blocks(ends: Tensor) -> tuple[Tensor, Tensor]:
    """Return which blocks have a pair that sees each other, and which have no other pairs. # [blocks, blocks] bool both."""
    length, count = len(ends), -(-len(ends) // BLOCK)
    first = torch.arange(count, device=ends.device) * BLOCK
    last = (first + BLOCK).clamp(max=length) - 1
    # What stands behind the sequence ends with it, so that it changes neither number.
    whole = nn.functional.pad(ends, (0, count * BLOCK - length), value=length).view(count, BLOCK)
    begins_inside = first[:, None] < whole.amax(1)
    all_inside = last[:, None] < whole.amin(1)
    below = first[:, None] - first
    return (below >= 0) & begins_inside, (below > 0) & all_inside


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Per row of blocks their number and their places, those that are there first. # [1, 1, blocks], [1, 1, blocks, blocks] int32."""
    places = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1).to(torch.int32)[None, None], places.to(torch.int32)[None, None]

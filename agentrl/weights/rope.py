"""Rotary positions whose frequencies depend on the length of the text: fixed once, for the context length of the engines.

transformers chooses frequencies of LongRoPE and dynamic RoPE by the longest position in a call, so the log-probabilities of a row would
depend on the rows beside it, and keys in a cache on how far the text had come. vLLM chooses once, by its ``max_model_len``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from agentrl.core.errors import ConfigError
from agentrl.core.model_shape import changes_with_length


def fix_rope(model: nn.Module, context: int, flag: str = "--max-model-len") -> None:
    """Give each module of rotary positions the frequencies for texts of up to `context` tokens; 0 stands for those of its training.

    Args:
        model: The model, whose frequencies are changed.
        context: Longest text of a run.
        flag: Setting that says so, for errors.

    Raises:
        ConfigError: If the frequencies of a module go on to depend on the length, or engines would have others.
    """
    for module in list(model.modules()):
        kinds = getattr(module, "rope_type", None)
        layers = (
            [name for name, kind in kinds.items() if changes_with_length(kind)]
            if isinstance(kinds, dict)
            else [None] * changes_with_length(kinds)
        )
        for layer in layers:
            _fix(module, layer, context, flag)
        if layers:
            _check(module, layers, context, flag)


@torch.no_grad()
def _fix(module: Any, layer: str | None, context: int, flag: str) -> None:
    """Run the module once as if for the longest text, and leave it with what it chose."""
    kind = module.rope_type if layer is None else module.rope_type[layer]
    own = int(module.config.max_position_embeddings)
    if kind != "longrope" and context > own:
        why = f"the dynamic RoPE of this model changes with the length of a text beyond {own} tokens"
        raise ConfigError(flag, context, why, f"Use at most {own}.")
    _run(module, layer, [max(context, 1) - 1])
    # transformers recomputes the frequencies of the other types in each call, and leaves those of this type alone.
    if layer is None:
        module.rope_type = "default"
    else:
        module.rope_type = {**module.rope_type, layer: "default"}


@torch.no_grad()
def _check(module: Any, layers: list[str | None], context: int, flag: str) -> None:
    for layer in layers:
        alone, beside = (_run(module, layer, [0, 1, 2, last]) for last in (3, max(context, 4) - 1))
        if any(not torch.equal(a[:, :3], b[:, :3]) for a, b in zip(alone, beside, strict=True)):
            why = f"frequencies of {type(module).__name__} depend on the longest text of a call"
            raise ConfigError(flag, context, why, "Use no more than the model was trained with before it was extended.")


def _run(module: Any, layer: str | None, positions: list[int]) -> tuple[Tensor, ...]:
    """Return cosines and sines."""
    device = next(iter(module.buffers())).device
    states, at = torch.zeros(1, len(positions), 1, device=device), torch.tensor([positions], device=device)
    found = module(states, at) if layer is None else module(states, at, layer)
    return found if isinstance(found, tuple) else (found,)

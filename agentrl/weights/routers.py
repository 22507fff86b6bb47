"""Routers of a mixture of experts: what they choose is recorded in an engine, and chosen again in the learner (router replay).

A router of transformers scores all experts and takes the best with one call of ``topk``. While its forward pass runs, that call is
answered with the experts that are wanted instead; whatever the router makes of their scores (softmax, division by the sum, a factor) it
makes of its own, so gradients reach it as ever (Rollout Routing Replay, Ma et al. 2025, arXiv:2510.11370).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from agentrl.core.model_shape import shape_of
from agentrl.core.types import ExpertArray

T = TypeVar("T")

LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
"""Number of the layer in the name of a module."""


class Routers:
    """The routers of a model of transformers, to be asked what they chose or told what to choose.

    Attributes:
        forced: Experts to take in the next forward passes, and where the backward pass computes them again; -1 leaves the choice to
            the router # [tokens, layers, top_k] integers; `None` leaves every choice to it.
        agreement: Of the forced experts: how many the router would have chosen too, and how many there were # [2] float64; `None` before.

    Raises:
        ValueError: If the model is no mixture of experts, or transformers does not say which modules are its routers.
    """

    def __init__(self, model: nn.Module) -> None:
        name = type(model).__name__
        try:
            shape = shape_of(model.config)
        except KeyError:
            raise ValueError(f"the configuration of {name} does not say how many experts it has") from None
        self.layers, self.experts, self.top_k = shape.layers, shape.experts, shape.experts_per_token
        if not self.top_k:
            raise ValueError(f"{name} is not a mixture of experts")
        self.forced: Tensor | None = None
        self.agreement: Tensor | None = None
        self._chosen: dict[int, Tensor] | None = None
        self._places: set[int] = set()
        for path, module in _routers(model):
            found = LAYER.search(path)
            if found is None or int(found[1]) in self._places:
                raise ValueError(f"the routers of {name} are not one for each layer")
            self._places.add(int(found[1]))
            own: Any = module
            # Replaced and not hooked: the mode has to end with the pass, also when that raises.
            own.forward = functools.partial(self._forward, module.forward, int(found[1]))
        if not self._places:
            raise ValueError(f"transformers does not say which modules of {name} are its routers")

    def record(self, run: Callable[[], T]) -> tuple[T, Tensor]:
        """Return what a forward pass returns, and the experts that it took # [tokens, layers, top_k] int64; 0 in layers without.

        Raises:
            ValueError: If a router did not choose as described above.
        """
        self._chosen = {}
        try:
            result = run()
            if missing := self._places - self._chosen.keys():
                raise ValueError(
                    f"the router of layer {min(missing)} does not choose {self.top_k} of {self.experts} experts by their scores"
                )
            some = next(iter(self._chosen.values()))
            chosen = some.new_zeros(len(some), self.layers, self.top_k)
            for layer, indices in self._chosen.items():
                chosen[:, layer] = indices
        finally:
            self._chosen = None
        return result, chosen

    def compact(self, chosen: Tensor) -> ExpertArray:
        """Recorded experts on the CPU in the data type that vLLM has for them: uint8 for at most 256 experts."""
        wide = chosen.cpu().numpy()
        return wide.astype(np.uint8) if self.experts <= 256 else wide.astype(np.uint16)

    def take_agreement(self) -> tuple[float, float]:
        """Return `agreement` since the last call."""
        found, self.agreement = self.agreement, None
        same, total = (0.0, 0.0) if found is None else found.tolist()
        return same, total

    def _forward(self, forward: Callable[..., T], layer: int, *args: Any, **kwargs: Any) -> T:
        forced = None if self.forced is None else self.forced[:, layer]
        with _Choice(self, layer, forced):
            return forward(*args, **kwargs)

    def _choose(self, layer: int, own: Tensor, forced: Tensor | None) -> Tensor:
        """Return the experts that a layer takes instead of its `own` # [tokens, top_k]."""
        if forced is not None and len(forced) != len(own):
            raise ValueError(f"layer {layer} routes {len(own)} tokens, and the experts of {len(forced)} were recorded")
        taken = own if forced is None else torch.where(forced < 0, own, forced)
        if forced is not None:
            known = forced >= 0
            same = (forced[:, :, None] == own[:, None, :]).any(-1) & known
            counts = torch.stack([same.sum(), known.sum()]).double()
            self.agreement = counts if self.agreement is None else self.agreement + counts
        if self._chosen is not None:
            self._chosen[layer] = taken.detach()
        return taken


class _Choice(TorchFunctionMode):
    """Answers the ``topk`` over all experts that is called while a router runs."""

    def __init__(self, routers: Routers, layer: int, forced: Tensor | None) -> None:
        super().__init__()
        self._routers, self._layer, self._forced = routers, layer, forced

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return result
        scores: Tensor = args[0] if args else kwargs["input"]
        if scores.ndim != 2 or scores.shape[-1] != self._routers.experts or result.indices.shape[-1] != self._routers.top_k:
            return result  # groups of experts, of which some routers take the best first
        taken = self._routers._choose(self._layer, result.indices, self._forced)
        if taken is result.indices:
            return result
        return torch.return_types.topk((scores.gather(-1, taken), taken))


def _routers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules that transformers names as the source of ``router_logits``, with their paths."""
    kinds: list[tuple[type[nn.Module], str]] = []
    for module in model.modules():
        recorder = (getattr(module, "_can_record_outputs", None) or {}).get("router_logits")
        kind = getattr(recorder, "target_class", recorder)
        if isinstance(kind, type) and (kind, getattr(recorder, "layer_name", None) or "") not in kinds:
            kinds.append((kind, getattr(recorder, "layer_name", None) or ""))
    for path, module in model.named_modules():
        if any(isinstance(module, kind) and layer_name in path for kind, layer_name in kinds):
            yield path, module

"""Chance in a model's own layers: switched off without knowing their names, and a proof that two passes agree."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from agentrl.core.errors import ConfigError
from agentrl.learner.layout import MicroBatch

ROUNDING_ON_GPU = 0.05
"""Difference of log-probabilities of two passes on a GPU, whose sums over experts may be made in another order each time."""


def disable_dropout(model: Any) -> None:
    """Have the modules that a model has now compute what they compute in evaluation, whatever `train` asks for.

    Dropout, jitter of routers and experts sampled while training have many names and some have a use in evaluation too, but all of them
    ask one question: whether the module is in training. Modules that are added later, such as adapters, obey `train`.
    """
    model.train = _Evaluation(model)
    model.train(model.training)


class _Evaluation:
    """In the place of a model's `train`; an object instead of a function, so that a copy of the model has one of its own."""

    def __init__(self, model: Any) -> None:
        self._model, self._own = model, list(model.modules())

    def __call__(self, mode: bool = True) -> Any:
        model = self._model
        type(model).train(model, mode)
        for module in self._own:
            module.training = False
            if mode and getattr(module, "gradient_checkpointing", False):
                _keep_checkpoints(module)
        return model


def _keep_checkpoints(layer: Any) -> None:
    """Leave a layer in training, which is what makes it save memory, except while it computes."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    if not isinstance(layer, GradientCheckpointingLayer):
        return
    layer.training = True
    checkpoint = layer._gradient_checkpointing_func
    if not isinstance(checkpoint, _Checkpoint):
        layer._gradient_checkpointing_func = _Checkpoint(layer, checkpoint)


class _Checkpoint:
    """Recomputes a layer in the backward pass, each time as in evaluation."""

    def __init__(self, layer: Any, checkpoint: Callable[..., Any]) -> None:
        self._layer, self._checkpoint = layer, checkpoint

    def __call__(self, call: Callable[..., Any], *args: Any) -> Any:
        return self._checkpoint(functools.partial(self._evaluated, call), *args)

    def _evaluated(self, call: Callable[..., Any], *args: Any) -> Any:
        self._layer.training = False
        try:
            return call(*args)
        finally:
            self._layer.training = True


@torch.no_grad()
def check_repeatable(model: nn.Module, score: Callable[[MicroBatch], Tensor], micro: MicroBatch, device: torch.device) -> None:
    """Check that a model gives the same scores twice; on a CPU bit for bit.

    Args:
        model: Where to look for the module that does not.
        score: Runs the model on a micro-batch, under DeepSpeed if that holds its parameters.
        micro: Rows to try it on.
        device: Where its parameters are.

    Raises:
        ConfigError: If it does not, with the name of the module.
    """
    first, second = (score(micro.to(device)) for _ in range(2))
    if torch.equal(first, second) or (first.device.type == "cuda" and torch.allclose(first, second, rtol=0.0, atol=ROUNDING_ON_GPU)):
        return
    name = _culprit(model, lambda: score(micro.to(device)))
    why = f"two passes of {type(model).__name__} over the same rows differ: {name} leaves something to chance"
    raise ConfigError("--model", type(model).__name__, why, "Set the field of config.json that decides about it to 0.")


def _culprit(model: nn.Module, run: Callable[[], object]) -> str:
    """Return the name of the first module to finish whose output differs between two passes; its parts finish before it."""
    names = {module: name or type(module).__name__ for name, module in model.named_modules()}
    passes = [_outputs(names, run) for _ in range(2)]
    pairs = zip(*passes, strict=False)
    return next((name for (name, one), (_, other) in pairs if not torch.equal(one, other)), type(model).__name__)


def _outputs(names: Mapping[nn.Module, str], run: Callable[[], object]) -> list[tuple[str, Tensor]]:
    """Return what each module gives in one pass, in the order in which they finish."""
    found: list[tuple[str, Tensor]] = []

    def note(module: nn.Module, _: Any, output: Any) -> None:
        part = output[0] if isinstance(output, tuple) and output else output
        if isinstance(part, Tensor):
            found.append((names[module], part.clone()))

    handles = [module.register_forward_hook(note) for module in names]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return found

"""The optimizers of `agentrl.learner.optimizer_table` for the parameters of a module, as DeepSpeed and transformers take them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from agentrl.learner.optimizer_table import OptimizerSettings
from agentrl.learner.parameters import WHOLE, Parameters

MOMENTUM = 0.95
"""Momentum of Muon."""

HIDDEN = "hidden"
"""Key of a group whose matrices Muon updates."""


class MuonWithAdamW(torch.optim.Optimizer):
    """torch's Muon for groups that are marked as `HIDDEN`, and its AdamW for the others, as one optimizer.

    Muon (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon/) replaces the momentum of a matrix by the nearest matrix whose
    singular values are alike. Its step is scaled by ``0.2 * sqrt(max(rows, columns))`` (Liu et al., arXiv:2502.16982, section 2.2), which
    makes it about as large as one of AdamW, so that both share a learning rate.

    Args:
        groups: Groups of parameters; those of a group that is marked as `HIDDEN` are matrices.
        lr: Learning rate of both.
        betas: Decay rates of AdamW.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], *, lr: float, betas: tuple[float, float]) -> None:
        super().__init__(groups, {"lr": lr, HIDDEN: False})
        makers: dict[bool, Callable[[Any], torch.optim.Optimizer]] = {
            True: lambda own: torch.optim.Muon(own, lr=lr, momentum=MOMENTUM, adjust_lr_fn="match_rms_adamw"),
            False: lambda own: torch.optim.AdamW(own, lr=lr, betas=betas, fused=True),
        }
        # Each shares its groups' dictionaries with this optimizer, and fills in its own settings.
        self._parts = {hidden: make(self._groups(hidden)) for hidden, make in makers.items() if self._groups(hidden)}

    def _groups(self, hidden: bool) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if group[HIDDEN] == hidden]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters that have a gradient; `closure` computes the loss anew and returns it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for hidden, part in self._parts.items():
            part.param_groups, part.state = self._groups(hidden), self.state  # loading a state has replaced them
            part.step()
        return loss


def build_optimizer(module: nn.Module, settings: OptimizerSettings, parameters: Parameters = WHOLE) -> torch.optim.Optimizer:
    """Return the optimizer of the trained parameters of a module.

    AdamW: Loshchilov and Hutter, arXiv:1711.05101, by torch's fused kernel, which takes a fourth of the time on a CPU. Adafactor: Shazeer
    and Stern, arXiv:1804.04235. State in 8 bits: Dettmers et al., arXiv:2110.02861.

    Args:
        module: A model.
        settings: Name of the optimizer, learning rate, weight decay and betas.
        parameters: Access to the parameters of the model, which may be in parts.
    """
    groups = parameter_groups(module, settings, parameters)
    rate, betas = settings.learning_rate, settings.adam_betas
    if settings.optimizer == "muon":
        return MuonWithAdamW(groups, lr=rate, betas=betas)
    if settings.optimizer == "adafactor":
        return torch.optim.Adafactor(groups, lr=rate)
    if settings.optimizer == "adamw_8bit":
        return _adamw_8bit(module, groups, lr=rate, betas=betas)
    return torch.optim.AdamW(groups, lr=rate, betas=betas, fused=True)


def _adamw_8bit(module: nn.Module, groups: list[dict[str, Any]], **named: Any) -> torch.optim.Optimizer:
    """Return the AdamW of bitsandbytes, whose state of embeddings has 32 bits as in transformers; ZeRO mixes them with other parameters."""
    from bitsandbytes.optim import AdamW8bit, GlobalOptimManager

    for each in module.modules():
        if isinstance(each, nn.Embedding):
            GlobalOptimManager.get_instance().register_module_override(each, "weight", {"optim_bits": 32})
    optimizer: torch.optim.Optimizer = AdamW8bit(groups, **named)
    return optimizer


def parameter_groups(module: nn.Module, settings: OptimizerSettings, parameters: Parameters = WHOLE) -> list[dict[str, Any]]:
    """Return the trained parameters in the groups of their optimizer; biases and normalisation scales do not decay."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if settings.optimizer != "muon":
        return _decaying(trained, settings.weight_decay, parameters)
    hidden = hidden_matrices(module, parameters)
    others = [parameter for parameter in trained if parameter not in hidden]
    matrices = [parameter for parameter in trained if parameter in hidden]
    return [
        {**group, HIDDEN: mark}
        for part, mark in ((matrices, True), (others, False))
        for group in _decaying(part, settings.weight_decay, parameters)
    ]


def _decaying(trained: Sequence[nn.Parameter], weight_decay: float, parameters: Parameters) -> list[dict[str, Any]]:
    """Return parameters as one group, or where there is a decay as matrices and vectors; none that is empty."""
    if not weight_decay:
        parts = {0.0: list(trained)}
    else:
        parts = {
            decay: [parameter for parameter in trained if (len(parameters.shape(parameter)) > 1) == bool(decay)]
            for decay in (weight_decay, 0.0)
        }
    return [{"params": part, "weight_decay": decay} for decay, part in parts.items() if part]


def hidden_matrices(module: nn.Module, parameters: Parameters = WHOLE) -> set[nn.Parameter]:
    """Return the trained matrices within the numbered layers of a model, embeddings in them left out.

    Token embeddings, output layer, and the score of a critic or a reward model stand outside of the layers. An adapter's matrices are
    inside. Experts that are one tensor of three dimensions, and convolutions, are no matrices.
    """
    return {
        parameter
        for path, owner in module.named_modules()
        if any(part.isdigit() for part in path.split(".")) and not isinstance(owner, nn.Embedding)
        for parameter in owner.parameters(recurse=False)
        if parameter.requires_grad and len(parameters.shape(parameter)) == 2
    }

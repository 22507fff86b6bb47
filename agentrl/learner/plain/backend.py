"""PyTorch alone as a back-end of the learner: the optimizer updates the weights of the model themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from agentrl.core.errors import CheckpointError
from agentrl.learner.engine import Backend, TrainEngine
from agentrl.learner.optimizers import build_optimizer
from agentrl.learner.parameters import move
from agentrl.learner.plan import LearnerConfig
from agentrl.learner.ranks import Ranks
from agentrl.learner.saved import BACKEND_KEY, MOMENTS, NUM_LEARNERS, Layout, SavedState, read_tensors

FILE = "state.pt"
"""File of a model in its folder of a checkpoint."""


class PlainEngine(TrainEngine):
    """Trains one module on one rank in float32, with the numbers of DeepSpeed without ZeRO."""

    def __init__(self, module: nn.Module, config: LearnerConfig, ranks: Ranks) -> None:
        super().__init__(config, ranks)
        self._module = module.to(ranks.device).train()
        self._optimizer = build_optimizer(module, config)

    @property
    def module(self) -> nn.Module:
        """The module being trained."""
        return self._module

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer, which updates the module's parameters themselves."""
        return self._optimizer

    def __call__(self, *inputs: Any) -> Any:
        """Run the module forward."""
        return self._module(*inputs)

    def accumulate(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradient of one micro-batch's share of the loss, a scalar."""
        del last
        loss.backward()  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _apply(self) -> float | None:
        trained = [parameter for _, parameter in _trained(self._module)]
        for parameter in trained:
            if parameter.grad is None:  # as DeepSpeed does, so that AdamW counts the same updates of all parameters
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
        norm = torch.stack(torch._foreach_norm(gradients)).pow(2).sum().sqrt()
        if not norm.isfinite():
            self._optimizer.zero_grad()
            return None
        # DeepSpeed's order of operations; `torch.nn.utils.clip_grad_norm_` multiplies by a reciprocal, whose last bit may differ.
        share = torch.full_like(norm, self.config.max_grad_norm) / (norm + 1e-6)
        torch._foreach_mul_(gradients, share.clamp(max=1.0))
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(norm)

    def save(self, folder: Path) -> list[Path]:
        """Write trained weights, buffers and the optimizer's state into a file; return it."""
        folder.mkdir(parents=True, exist_ok=True)
        names = {parameter: name for name, parameter in _trained(self._module)}
        persistent = self._module.state_dict().keys()
        content = {
            "weights": {name: parameter.data for parameter, name in names.items()},
            "buffers": {name: buffer for name, buffer in self._module.named_buffers() if name in persistent},
            "order": [names[parameter] for group in self._optimizer.param_groups for parameter in group["params"]],
            "optimizer": self._optimizer.state_dict(),
        }
        torch.save(content, folder / FILE)
        return [folder / FILE]

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Restore what `save` wrote."""
        content = read_tensors(folder / FILE, mapped=False)
        self._take(content["weights"], content["buffers"])
        self._optimizer.load_state_dict(content["optimizer"])

    @torch.no_grad()
    def restore(self, saved: SavedState) -> None:
        """Set weights and AdamW's state to those of a checkpoint of another back-end."""
        self._take(saved, saved.buffers)
        for name, parameter in _trained(self._module):
            moments = {key: saved.moment(name, key) for key in MOMENTS}
            if (step := saved.step(name)) is not None:
                own = {key: moment.to(parameter, copy=True) for key, moment in moments.items() if moment is not None}
                self._optimizer.state[parameter] = {"step": torch.tensor(step, device=parameter.device), **own}

    def _take(self, weights: Any, buffers: Any) -> None:
        """Copy weights and buffers by name into the module; anything with names as keys will do."""
        for name, parameter in _trained(self._module):
            parameter.copy_(weights[name])
        for name, buffer in self._module.named_buffers():
            if name in buffers:
                buffer.copy_(buffers[name])

    def offload(self, *, keep_weights: bool) -> None:
        """Move the optimizer to CPU memory, and the weights too unless they are kept."""
        self._move_optimizer(torch.device("cpu"))
        move(self._module, torch.device("cpu"), weights=not keep_weights)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def reload(self) -> None:
        """Undo `offload`."""
        move(self._module, self.ranks.device, weights=True)
        self._move_optimizer(self.ranks.device)

    def _move_optimizer(self, device: torch.device) -> None:
        for state in self._optimizer.state.values():
            state.update({key: part.to(device) for key, part in state.items() if isinstance(part, Tensor)})

    def close(self) -> None:
        """Release the memory of weights and optimizer, also where something holds the module; safe to call twice."""
        self._optimizer.state.clear()
        for parameter in self._module.parameters():
            parameter.grad = None
            parameter.data = parameter.data.new_empty(0)


class PlainState:
    """State of a trained model, read from the file that `PlainEngine.save` wrote."""

    def __init__(self, folder: Path) -> None:
        content = read_tensors(folder / FILE)
        states = content["optimizer"]["state"]
        self.counters: dict[str, int] = {}
        self.buffers: dict[str, Tensor] = content["buffers"]
        self._weights: dict[str, Tensor] = content["weights"]
        self._states: dict[str, dict[str, Tensor]] = {name: states.get(place, {}) for place, name in enumerate(content["order"])}

    def __getitem__(self, name: str) -> Tensor:
        """A parameter."""
        if name not in self._weights:
            raise CheckpointError(f"the checkpoint has no parameter {name}: it is of another model")
        return self._weights[name]

    def moment(self, name: str, key: str) -> Tensor | None:
        """One of AdamW's moments of a parameter; `None` before its first update."""
        return self._states[name].get(key)

    def step(self, name: str) -> float | None:
        """Updates that the moments of a parameter have seen; `None` before the first."""
        step = self._states[name].get("step")
        return None if step is None else float(step)

    def last_step(self) -> float | None:
        """The most updates that any parameter has seen."""
        return max((step for name in self._states if (step := self.step(name)) is not None), default=None)


class TorchBackend(Backend):
    """PyTorch alone, on one rank."""

    def train(self, module: nn.Module, config: LearnerConfig, ranks: Ranks, *, bf16: bool) -> TrainEngine:
        """Return the module with its optimizer, in float32."""
        del bf16
        return PlainEngine(module, config, ranks)

    def layout(self, config: LearnerConfig, ranks: Ranks) -> dict[str, Any]:
        """Return the facts that the files of a checkpoint depend on."""
        return {NUM_LEARNERS: ranks.world_size, BACKEND_KEY: config.learner_backend}

    def saved(self, folder: Path, layout: Layout, module: nn.Module, config: LearnerConfig) -> SavedState:
        """Return the state of a trained model."""
        del layout, module, config
        return PlainState(folder)


def _trained(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]


BACKEND = TorchBackend()

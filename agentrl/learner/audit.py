"""Audits: one row of a step again, alone, in float32 with eager attention, beside what the step made of it.

The row goes through a copy of the model that is read from its files and given the present weights, so that neither the random state nor a
buffer, a hook or a gradient of the trained model changes, and a fault of the loaded model is not copied.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from agentrl.core.metrics import MetricSums
from agentrl.core.model_shape import text_part
from agentrl.core.operating_system import free_bytes
from agentrl.core.types import derive_seed
from agentrl.learner.attention import rows_are_separated, separate_rows
from agentrl.learner.batch import Batch
from agentrl.learner.engine import backend_of
from agentrl.learner.layout import Layout, MicroBatch
from agentrl.learner.models import PolicyModel, load_model
from agentrl.learner.parameters import Parameters
from agentrl.learner.ranks import Ranks
from agentrl.learner.settings import LearnerSettings
from agentrl.learner.trees import one_row_bundles
from agentrl.weights.routers import Routers

CANNOT, NO_MEMORY = 1.0, 2.0
"""Values of ``audit/off``: rows or weights are in parts, or there is no memory for a copy."""

GRADIENT_ELEMENTS = 2**25
"""Elements of the parameters whose gradients are compared: the last of the model that fit, all of a small one."""

SHARE_OF_MEMORY = 0.5
"""Share of the free memory that an audit may take."""


@dataclass(slots=True, eq=False)
class Audit:
    """One row of a step: its log-probabilities as they should be, to be compared with those that the step uses."""

    row: int  # its number in the batch; -1 for a rank that only helps to gather the weights
    row_of: Tensor  # [A]: row of each action token
    expected: Tensor  # [a]: log-probabilities of the row's action tokens
    stats: MetricSums = field(default_factory=MetricSums)

    def take(self, micro: MicroBatch, new: Tensor) -> None:
        """Compare with the log-probabilities of a micro-batch of the first update # [a], if the row is in it."""
        used = new.detach()[self.row_of[micro.actions] == self.row]
        if len(used):
            gap = (used - self.expected).abs().double()
            self.stats.mean("audit/logprob_error", float(gap.sum()), float(len(gap)))
            self.stats.high("audit/logprob_error_max", float(gap.max()))


def begin_audit(
    host: Batch,
    micros: Sequence[MicroBatch],
    advantages: Tensor,
    policy: PolicyModel,
    step: int,
    settings: LearnerSettings,
    ranks: Ranks,
) -> Audit:
    """Choose a row and compute what its log-probabilities and its gradient should be; every rank calls it, rank 0 has the row.

    Args:
        host: The batch, on the CPU.
        micros: Micro-batches of this rank in the first update, on the CPU.
        advantages: Of every action token. # [A]
        policy: The policy being trained, as it is before the first update.
        step: Number of the step.
        settings: Settings of the learner.
        ranks: This rank.
    """
    audit = Audit(row=-1, row_of=host.row.to(ranks.device), expected=advantages.new_zeros(0))
    if settings.learner.learner_tensor_parallel > 1 or policy.sequence is not None or settings.learner.load_in_4bit:
        return _off(audit, CANNOT, ranks)
    parameters = backend_of(settings.learner.learner_backend).parameters
    places = [(micro, row) for micro in micros for row in torch.unique(host.row[micro.actions]).tolist()] if ranks.first else []
    if not places:
        _give_weights(policy.model, None, parameters)
        return audit
    micro, row = places[np.random.default_rng(derive_seed(settings.seed, "audit", step)).integers(len(places))]
    copy = _load(policy, settings, ranks.device) if _fits(policy, host, row, ranks.device, parameters) else None
    _give_weights(policy.model, copy, parameters)
    if copy is None:
        return _off(audit, NO_MEMORY, ranks)
    audit.row = row
    alone = Layout(host).micro_batch([one_row_bundles(host)[row]], packed=False).to(ranks.device)
    _compute(audit, copy, micro.to(ranks.device), alone, advantages)
    return audit


def _off(audit: Audit, reason: float, ranks: Ranks) -> Audit:
    if ranks.first:
        audit.stats.high("audit/off", reason)
    return audit


def _compute(audit: Audit, copy: PolicyModel, micro: MicroBatch, alone: MicroBatch, advantages: Tensor) -> None:
    """Run the row as the step does, among the others of its micro-batch, and then alone; `copy` is in float32 afterwards."""
    trained = _last(copy.model.parameters())
    weights = advantages[alone.actions]
    if not weights.any():
        weights = torch.ones_like(weights)  # a row that teaches nothing has log-probabilities with a gradient all the same
    together = copy(micro)[0][audit.row_of[micro.actions] == audit.row]
    found = _gradient(together, weights, trained)
    copy.model.float().set_attn_implementation("eager")
    copy.fp32_head = False
    expected = copy(alone)[0]
    audit.expected = expected.detach()
    if (angle := _angle(found, _gradient(expected, weights, trained))) is not None:
        audit.stats.mean("audit/gradient_angle", angle, 1.0)


def _last(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Return the trained parameters, from the last on, that have no more than `GRADIENT_ELEMENTS` together."""
    chosen, room = [], GRADIENT_ELEMENTS
    for parameter in reversed([parameter for parameter in parameters if parameter.requires_grad]):
        if parameter.numel() <= room:
            chosen.append(parameter)
            room -= parameter.numel()
    return chosen


def _gradient(logprobs: Tensor, weights: Tensor, parameters: Sequence[nn.Parameter]) -> Tensor:
    """Gradient of the policy gradient loss of a row, whose ratios are 1 here, for all parameters in one. # [elements]."""
    parts = torch.autograd.grad((logprobs * weights).sum(), parameters, allow_unused=True)
    whole = [torch.zeros_like(own) if part is None else part for part, own in zip(parts, parameters, strict=True)]
    return torch.cat([part.float().flatten() for part in whole])


def _angle(first: Tensor, second: Tensor) -> float | None:
    """Angle between two vectors in degrees, exact for small ones too (Kahan); `None` if one of them is 0."""
    first, second = first.double(), second.double()
    if not (first.any() and second.any()):
        return None
    first, second = first / first.norm(), second / second.norm()
    return math.degrees(2.0 * math.atan2(float((first - second).norm()), float((first + second).norm())))


def _fits(policy: PolicyModel, host: Batch, row: int, device: torch.device, parameters: Parameters) -> bool:
    """Return True if the copy in float32, two gradients and the attention of the row alone fit into the free memory."""
    elements = sum(math.prod(parameters.shape(parameter)) for parameter in policy.model.parameters())
    heads = int(text_part(policy.model.config).get("num_attention_heads") or 1)
    pairs = heads * int(host.input_lengths()[row]) ** 2
    needed = 4.0 * (1.5 * elements + 4.0 * min(elements, GRADIENT_ELEMENTS) + 4.0 * pairs)
    return needed < SHARE_OF_MEMORY * _free_bytes(device)


def _free_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return float(torch.cuda.mem_get_info(device)[0] + unused)
    return free_bytes()


def _load(policy: PolicyModel, settings: LearnerSettings, device: torch.device) -> PolicyModel:
    """Load the policy's model anew, to be laid out and computed as in the step; its weights are those of its files."""
    plain = replace(settings.learner, tiled_mlp=False, compile_layers=False, offload=())
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        model = load_model(replace(settings, learner=plain), trained=True)
    model.set_attn_implementation(policy.model.config._attn_implementation)
    if rows_are_separated(policy.model):
        separate_rows(model)
    copy = PolicyModel(model.to(device).train(settings.learner.gradient_checkpointing), fp32_head=policy.fp32_head)
    copy.whole = policy.whole
    copy.routers = None if policy.routers is None else Routers(model)
    return copy


@torch.no_grad()
def _give_weights(source: nn.Module, copy: PolicyModel | None, parameters: Parameters) -> None:
    """Give the copy the weights of `source`; where ranks hold parts, every one has to take part, with a copy or without."""
    own: dict[str, Any] = {} if copy is None else dict(copy.model.named_parameters())
    for name, tensor in parameters.named(source):
        if own:
            own[name].copy_(tensor)

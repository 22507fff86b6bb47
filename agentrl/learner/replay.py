"""Router replay: the policy of a mixture of experts takes, for every token, the experts that the engine took."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from agentrl.core.errors import ConfigError
from agentrl.core.metrics import MetricSums
from agentrl.learner.batch import Batch
from agentrl.learner.layout import MicroBatch
from agentrl.learner.models import SAME_OUTPUT, PolicyModel
from agentrl.learner.probes import probe
from agentrl.weights.routers import Routers


@torch.no_grad()
def replay_routers(policy: PolicyModel, score: Callable[[MicroBatch], tuple[Tensor, ...]], device: torch.device) -> None:
    """Make the policy take the experts of its micro-batches; tried on the model itself.

    Args:
        policy: The model.
        score: Runs the model on a micro-batch, under DeepSpeed if that holds its parameters.
        device: Where its parameters are.

    Raises:
        ConfigError: If the model has no experts, or its routers do not do what they are told.
    """
    try:
        policy.routers = routers = Routers(policy.model)
        micro = probe(policy.model.config).to(device)
        own, chosen = routers.record(lambda: score(micro)[0])
        same, _, _ = score(replace(micro, experts=chosen.to(torch.int16)))
        other, _, _ = score(replace(micro, experts=((chosen + 1) % routers.experts).to(torch.int16)))
    except ValueError as error:
        raise ConfigError("--router-replay", True, str(error), "Leave it out.") from error
    routers.take_agreement()
    if not torch.allclose(own, same, rtol=0.0, atol=SAME_OUTPUT) or torch.allclose(own, other, rtol=0.0, atol=SAME_OUTPUT):
        why = f"the routers of {type(policy.model).__name__} do not take the experts that they are given"
        raise ConfigError("--router-replay", True, why, "Leave it out.")


def describe_replay(batch: Batch, policy: Any, *, first: bool) -> MetricSums:
    """``router_replay/share``, the share of the tokens whose experts were recorded, and ``router_replay/agreement``.

    The latter is the share of the recorded experts that the routers of `policy` would have chosen too. With `first` the batch is described.
    """
    stats = MetricSums()
    same, total = policy.routers.take_agreement()
    stats.mean("router_replay/agreement", same, total)
    if first:
        known = sum(len(turn.experts) for row in batch.rows for turn in row.turns if turn.experts is not None)
        stats.mean("router_replay/share", float(known), float(batch.input_lengths().sum()))
    return stats

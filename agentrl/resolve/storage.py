"""The check of the room for checkpoints at the start of a run, before anything is loaded."""

from __future__ import annotations

from pathlib import Path

from agentrl.algo.estimators import estimator_facts
from agentrl.config.schema import TrainConfig
from agentrl.core.disk import free_bytes, mount_point, size_text
from agentrl.core.errors import ConfigError
from agentrl.core.model_shape import ModelShape, read_shape
from agentrl.resolve.sizing.memory import adapter_parameters, number_bytes
from agentrl.track.tracker import RunWarning

ADAM = 12
"""Bytes that a parameter takes in a checkpoint: itself in float32 and two moments; in bfloat16 there is a copy of 2 bytes more."""
CERTAIN = 0.9
"""Share of the estimate that a checkpoint takes at least."""


def checkpoint_bytes(config: TrainConfig, shape: ModelShape) -> int:
    """Return the estimated size of one checkpoint: what is trained, with the state of its optimizer."""
    trained = adapter_parameters(shape, config.lora.lora_rank) or shape.parameters
    critic = trained if estimator_facts(config.algo.advantage_estimator).needs_critic else 0
    return (trained + critic) * (ADAM + (2 if number_bytes(config) == 2 else 0))


def storage_sign(config: TrainConfig, run_dir: Path) -> RunWarning | None:
    """Return a warning if the checkpoints that a run keeps will not fit; nothing is said of a model whose sizes are not known here.

    Raises:
        ConfigError: If certainly not even the first one fits.
    """
    run, shape = config.training, read_shape(config.model.model)
    if not run.save_every or shape is None:
        return None
    one, free = checkpoint_bytes(config, shape), free_bytes(run_dir)
    count = min(run.keep_checkpoints + 1, -(-run.num_steps // run.save_every))  # a new one is complete before an old one goes
    model = shape.parameters * number_bytes(config) if config.record.save_model else 0
    place = f"the file system at {mount_point(run_dir)} has {size_text(free)} free"
    if one * CERTAIN > free:
        problem = f"has no room for a checkpoint of about {size_text(one)}: {place}"
        raise ConfigError("--run-dir", str(run_dir), problem, "Free some, name a directory elsewhere, or leave out --save-every.")
    if (needed := one * count + model) > free:
        kept = f"{count} checkpoints of about {size_text(one)}{' and the model' if model else ''} need {size_text(needed)}"
        return RunWarning("storage", f"the disk will be full: {kept}, and {place}", "Free some, or keep fewer: --keep-checkpoints 1.")
    return None

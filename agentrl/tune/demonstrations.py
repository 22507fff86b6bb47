"""Demonstrations of a run of reinforcement learning: encoded as the rows of ``agentrl sft``, and written for its learner."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from agentrl.assets import model_path
from agentrl.config.tune import SftConfig
from agentrl.core.errors import ConfigError
from agentrl.learner.demonstration_files import write_demonstrations
from agentrl.rollout.tasks import context_length
from agentrl.tune.data import drawing_order, read_examples
from agentrl.tune.prepare import Prepared, prepare
from agentrl.tune.row_text import IGNORED

FLAG = "--sft-data"


def encode_demonstrations(settings: SftConfig, max_model_len: int = 0) -> Prepared:
    """Read and encode demonstrations.

    Args:
        settings: Of ``agentrl sft``, the model of the run among them.
        max_model_len: Tokens of a row that the model reads at most; 0: as many as it states.

    Raises:
        DataError: If a row is malformed, or none is left.
        ConfigError: If a row is longer than the context of the model, or has images.
    """
    data = settings.data
    prepared = prepare(
        read_examples(data, "dialogue", settings.run.seed, settings.eval), data, settings.model, settings.images, settings.method
    )
    longest, most = prepared.counts["train"]["longest"], max_model_len or context_length(model_path(settings.model.model))
    if most and longest > most:
        problem = f"has a row of {longest} tokens, and the context of the model {most}"
        raise ConfigError(FLAG, data.data, problem, f"Add max_length={most} behind its #, to leave out longer ones.")
    if any("images" in row for part in prepared.parts if isinstance(part, tuple) for row in part):
        raise ConfigError(FLAG, data.data, "has rows with images, which are not imitated beside episodes", "Leave them out.")
    return prepared


def write_encoded(prepared: Prepared, settings: SftConfig, num_steps: int, folder: Path) -> None:
    """Write the rows into a folder, and which of them each step imitates; that follows from the seed, epoch after epoch."""
    size = settings.optim.batch_size
    order = drawing_order(prepared.sizes, num_steps * size, settings.data, settings.run.seed)
    rows = [(row["input_ids"], np.flatnonzero(np.asarray(row["labels"][1:]) != IGNORED)) for part in prepared.parts for row in part]
    write_demonstrations(folder, rows, np.reshape(order, (num_steps, size)).tolist())

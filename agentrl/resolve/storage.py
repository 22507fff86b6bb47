"""The check of the room for checkpoints at the start of a run, before anything is loaded."""

from __future__ import annotations

from pathlib import Path

from agentrl.core.disk import free_bytes, mount_point, size_text
from agentrl.core.errors import ConfigError
from agentrl.flow.plan import TrainingConfig
from agentrl.track.tracker import RunWarning

CERTAIN = 0.9
"""Share of the estimate that a checkpoint takes at least."""


def storage_sign(run: TrainingConfig, run_dir: Path, checkpoint: int, model: float) -> RunWarning | None:
    """Return a warning if the checkpoints that a run keeps will not fit; nothing is said of sizes that are not known.

    Args:
        run: Says how many checkpoints there are.
        run_dir: Where they go.
        checkpoint: Bytes of one; 0 if they are not known.
        model: Bytes of the model that is saved in the end.

    Raises:
        ConfigError: If certainly not even the first one fits.
    """
    if not run.save_every or not checkpoint:
        return None
    one, free = checkpoint, free_bytes(run_dir)
    count = min(run.keep_checkpoints + 1, -(-run.num_steps // run.save_every))  # a new one is complete before an old one goes
    place = f"the file system at {mount_point(run_dir)} has {size_text(free)} free"
    if one * CERTAIN > free:
        problem = f"has no room for a checkpoint of about {size_text(one)}: {place}"
        raise ConfigError("--run-dir", str(run_dir), problem, "Free some, name a directory elsewhere, or leave out --save-every.")
    if (needed := one * count + model) > free:
        kept = f"{count} checkpoints of about {size_text(one)}{' and the model' if model else ''} need {size_text(needed)}"
        return RunWarning("storage", f"the disk will be full: {kept}, and {place}", "Free some, or keep fewer: --keep-checkpoints 1.")
    return None

"""States of the random generators of a rank, which decide what dropout does in its next steps."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def generator_states() -> dict[str, Any]:
    """States of every generator that a model or a library may draw from, in types that ``weights_only`` accepts."""
    words: Any = np.random.get_state(legacy=True)
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return {"torch": torch.get_rng_state(), "cuda": cuda, "python": random.getstate(), "numpy": (words[0], words[1].tolist(), *words[2:])}


def restore_generators(states: Mapping[str, Any]) -> None:
    """Go on from what `generator_states` returned."""
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state(states["numpy"])

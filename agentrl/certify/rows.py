"""Rows to try a twin on: two groups that are prefix trees, with short and long rows on both sides of the twin's windows and thresholds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from agentrl.core.images import ImageInput
from agentrl.learner.batch import Batch
from agentrl.learner.probes import batch_of, branching
from agentrl.weights.twin_sizes import VOCABULARY

LENGTHS = ((9, (4, 30, 12)), (37, (9, 41, 20)))
"""Tokens of the prompt of each group, and of the answers of its members."""


def trial_batch(seed: int = 0, images: Sequence[ImageInput] = ()) -> Batch:
    """Return a batch of random tokens, the same for the same seed; answers of a group begin alike. `images` are as in `batch_of`."""
    rng = np.random.default_rng(seed)

    def draw(count: int) -> np.ndarray:
        return rng.integers(3, VOCABULARY - 8, count)

    return batch_of([(draw(prompt), branching([draw(answer) for answer in answers])) for prompt, answers in LENGTHS], images)

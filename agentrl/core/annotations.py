"""Figures of the learner for every trained token of a recorded trajectory, as a line of ``annotations.jsonl``.

Each list of figures is one number if all tokens have it, and otherwise the base64 form of its little-endian 32-bit floats. It is exact, and
takes 5.3 bytes a number; nine digits, which are as exact, take 13 and 30 times as long to write.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from agentrl.core.types import FloatArray, floats

FILE = "annotations.jsonl"

FIGURES: Mapping[str, str] = {
    "logprob": "log-probability under the learner's weights when the batch was taken",
    "ratio": "ratio of the updated policy to the one before the step, in the last update with the token",
    "weight": "weight by the off-policy correction",
    "advantage": "advantage, as the loss used it",
    "entropy": "entropy of the policy at the token, in nats",
    "loss": "share of the token in the policy loss of its update; the sum over the update's tokens is the loss",
    "reference": "log-probability under the reference policy",
    "value": "value of the critic",
    "return": "return that the critic is trained towards",
}
"""Figure -> what it says."""


class Mask(StrEnum):
    """Fate of a token in the policy loss; the first that holds."""

    TRAINED = "trained"
    """The token was trained."""
    OFF_POLICY = "off_policy"
    """The off-policy correction gave it the weight 0."""
    LOW_ENTROPY = "low_entropy"
    """The token's entropy is not among the highest (--top-entropy-share)."""
    CLIPPED = "clipped"
    """The loss removed or bounded its gradient, because the policy has moved too far at this token."""
    SKIPPED = "skipped"
    """The gradient of its update was not finite, and the update was skipped."""
    WARMUP = "warmup"
    """The policy is not trained yet while the critic warms up (--critic-warmup-steps)."""


MASKS = tuple(Mask)
"""Masks by number."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Annotation:
    """The figures of one trajectory in one step.

    Attributes:
        trajectory_id: The trajectory.
        step: Steps done when it was trained, this one included.
        figures: Name -> one number per trained token, in the order of the trajectory's turns without those of masked branches. # [A]
        masks: Number of the mask of each of these tokens, a place in `MASKS`. # [A] uint8
    """

    trajectory_id: str
    step: int
    figures: Mapping[str, FloatArray]
    masks: npt.NDArray[np.uint8]

    def line(self) -> str:
        """Return the line without its newline; it begins with the trajectory and the step."""
        head = {"trajectory_id": self.trajectory_id, "step": self.step, "tokens": len(self.masks)}
        masks: Any = str(MASKS[self.masks[0]]) if len(self.masks) and (self.masks == self.masks[0]).all() else _text(self.masks)
        return json.dumps({**head, **{name: pack(values) for name, values in self.figures.items()}, "mask": masks}, allow_nan=False)


def pack(values: FloatArray) -> float | str | None:
    """Return numbers as one, if they are all the same, or as text; `None` if all of them are no finite number."""
    if len(values) and (values == values[0]).all() and math.isfinite(values[0]):
        return float(values[0])
    return None if not np.isfinite(values).any() else _text(values.astype("<f4"))


def unpack(value: Any, count: int) -> FloatArray | None:
    """Return the numbers that `pack` made a value of; `None` if there are none, or not as many as `count`."""
    if isinstance(value, int | float):
        return floats(np.full(count, value, np.float32))
    data = _bytes(value)
    return floats(np.frombuffer(data, "<f4").astype(np.float32)) if data is not None and len(data) == 4 * count else None


def read_annotation(row: Mapping[str, Any]) -> Annotation | None:
    """Return the annotation of a line; `None` if it is none. Names of masks that this version does not know are refused likewise."""
    try:
        count, mask = int(row["tokens"]), row["mask"]
        figures = {name: found for name in FIGURES if (found := unpack(row.get(name), count)) is not None}
        masks = np.full(count, MASKS.index(Mask(mask)), np.uint8) if mask in list(Mask) else np.frombuffer(_bytes(mask) or b"", np.uint8)
        if len(masks) != count or (masks >= len(MASKS)).any():
            return None
        return Annotation(trajectory_id=str(row["trajectory_id"]), step=int(row["step"]), figures=figures, masks=masks)
    except (KeyError, TypeError, ValueError):
        return None


def _text(values: npt.NDArray[Any]) -> str:
    return base64.b64encode(values.tobytes()).decode("ascii")


def _bytes(value: Any) -> bytes | None:
    try:
        return base64.b64decode(value, validate=True) if isinstance(value, str) else None
    except binascii.Error:
        return None


def as_plain(values: npt.ArrayLike, digits: int = 6) -> float | list[float | None] | None:
    """Return numbers for JSON, rounded: one if they are all the same; `None` stands for what is not finite."""
    array = np.asarray(values, np.float64)
    if len(array) and (array == array[0]).all():
        return _rounded(float(array[0]), digits)
    return [_rounded(value, digits) for value in array.tolist()]


def _rounded(value: float, digits: int) -> float | None:
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None

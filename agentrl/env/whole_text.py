"""Values as text for the model, of which nothing is left out."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np


def whole_text(value: Any) -> str:
    """Return a value as text with every number of its arrays, where `str` puts ``...`` for most of a long array, tensor or table."""
    if isinstance(value, list | tuple | Mapping):
        value = _with_numpy(value)
    elif not isinstance(value, np.ndarray):
        value = _as_numpy(value)
    with np.printoptions(threshold=sys.maxsize):
        return str(value)


def _as_numpy(value: Any) -> Any:
    """Return tensors as arrays and tables as text; anything else as it is."""
    if isinstance(value, str | bytes | int | float | np.ndarray | np.generic) or value is None:
        return value
    if callable(as_text := getattr(value, "to_string", None)):  # of pandas
        return as_text()
    return value.tolist() if callable(getattr(value, "tolist", None)) else value


def _with_numpy(value: Any) -> Any:
    """Return a collection whose tensors and tables are arrays and text, in collections of the same types."""
    if isinstance(value, dict):
        return {key: _with_numpy(item) for key, item in value.items()}
    return type(value)(map(_with_numpy, value)) if type(value) in (list, tuple) else _as_numpy(value)

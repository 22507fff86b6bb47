"""Numbers as people read them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII_BLOCKS = "_.-=*#"


def sparkline(values: Sequence[float], width: int, *, blocks: str = BLOCKS) -> str:
    """A curve one line high.

    Args:
        values: In order of time; non-finite ones are left out.
        width: Characters at most; longer series are averaged into as many buckets.
        blocks: Characters from low to high.
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    columns = min(width, len(finite))
    edges = [round(i * len(finite) / columns) for i in range(columns + 1)]
    means = [mean(finite[start:end]) for start, end in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return "".join(blocks[min(len(blocks) - 1, int((value - low) / span * len(blocks)))] for value in means)


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean, NaN of nothing."""
    return sum(values) / len(values) if values else math.nan


def duration(seconds: float) -> str:
    """Seconds as ``8.4 s``, ``3m 05s`` or ``2h 07m``; ``?`` if not finite."""
    if not math.isfinite(seconds):
        return "?"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    return f"{whole // 60}m {whole % 60:02d}s" if whole < 3600 else f"{whole // 3600}h {whole % 3600 // 60:02d}m"


def count(number: float) -> str:
    """A count in at most five characters or so: ``950``, ``12.3k``, ``4.56M``."""
    if not math.isfinite(number):
        return "?"
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size * 0.9995:
            return f"{number / size:.3g}{unit}"
    return f"{number:.0f}"


def percent(share: float) -> str:
    """A share as whole percent; ``?`` if not finite."""
    return f"{100 * share:.0f}%" if math.isfinite(share) else "?"


def number(value: float, digits: int = 3) -> str:
    """A value with `digits` decimals; ``?`` if not finite."""
    return f"{value:.{digits}f}" if math.isfinite(value) else "?"

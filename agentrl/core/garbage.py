"""Making Python's garbage collector look less often at what stays."""

from __future__ import annotations

import gc
from functools import cache


@cache
def collect_rarely() -> None:
    """Spare the garbage collector what was imported, and let it run less often; once per process.

    With thousands of live episodes it otherwise looks through half a million objects of imported libraries again and again,
    which stops everything for a third of a second at a time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)

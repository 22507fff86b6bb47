"""Places for sandboxes that start at a time; those that run are not counted."""

from __future__ import annotations

import asyncio
import os
from weakref import WeakKeyDictionary

MAX_STARTING = 2 * (os.cpu_count() or 1)
"""Programs of one event loop that start at a time."""
_STARTING: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


def starting() -> asyncio.Semaphore:
    """Return the places of programs that start in the running loop; many at once would take each other's time."""
    return _STARTING.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(MAX_STARTING))

"""What accelerators this machine has, without importing torch."""

from __future__ import annotations

import os
from pathlib import Path


def cuda_device_count() -> int:
    """Number of NVIDIA devices this process may use; 0 without a driver.

    Honours ``CUDA_VISIBLE_DEVICES``. Reads the driver's own listing, so nothing heavy is imported.
    """
    present = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    return min(present, len([entry for entry in visible.split(",") if entry.strip() not in ("", "-1")]))

"""Rates that ``agentrl doctor`` has measured on devices, kept in ``rates.json`` in the user's cache folder.

The file is one JSON object. Its keys are names of devices, as ``torch.cuda.get_device_name`` has them, or the name of the processor. Each
value has the fields of `Rates`, in floating-point operations and bytes per second.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from agentrl.core.files import write_text
from agentrl.core.paths import cache_folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Speed of a device; 0 for a rate that it does not have, or that was not measured."""

    matmul_bfloat16: float = 0.0  # floating-point operations per second of large matrix products
    matmul_float32: float = 0.0  # the same in float32, without TF32
    memory: float = 0.0  # bytes per second, read and written, of the device's own memory
    host_to_device: float = 0.0  # bytes per second from page-locked memory
    device_to_host: float = 0.0  # bytes per second into page-locked memory
    device_bytes: float = 0.0  # memory of the device
    torch: str = ""  # version that it was measured with
    date: str = ""  # of the measurement, as 2026-11-23


def rates_file() -> Path:
    """Return the file of the measured rates, which may not be there."""
    return cache_folder() / "rates.json"


def read_rates() -> dict[str, Rates]:
    """Return the measured rates by name of the device; none if there is no file, or it cannot be read."""
    try:
        kept = json.loads(rates_file().read_text(encoding="utf-8"))
        return {name: rates_of(value) for name, value in kept.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def rates_of(value: Mapping[str, object]) -> Rates:
    """Return rates from JSON's own types; fields of other versions are left out."""
    known = {field.name for field in fields(Rates)}
    return Rates(**{name: part for name, part in value.items() if name in known})  # type: ignore[arg-type]


def keep_rates(device: str, rates: Rates) -> bool:
    """Write the rates of a device beside those of others; return False where the folder cannot be written."""
    path = rates_file()
    everything = {**read_rates(), device: rates}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps({name: asdict(each) for name, each in everything.items()}, indent=2) + "\n")
    except OSError:
        return False
    return True

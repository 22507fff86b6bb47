"""Files of a directory that holds a low-rank adapter."""

from __future__ import annotations

from pathlib import Path

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
"""Files of a directory that holds an adapter, as peft and vLLM name them."""


def holds_adapter(folder: Path) -> bool:
    """Return True for a directory that holds an adapter without its model."""
    return (folder / CONFIG_FILE).is_file()

"""Files that ship inside the package."""

from __future__ import annotations

from pathlib import Path

__all__ = ["tiny_model_path"]


def tiny_model_path() -> Path:
    """Directory of the bundled chat model, in Hugging Face form; made by `examples.tiny_model.make`."""
    return Path(__file__).with_name("tiny-chat")

"""Files that ship inside the package."""

from __future__ import annotations

from pathlib import Path

__all__ = ["environment_paths", "tiny_model_path"]


def tiny_model_path() -> Path:
    """Directory of the bundled chat model, in Hugging Face form; made by `examples.tiny_model.make`."""
    return Path(__file__).with_name("tiny-chat")


def environment_paths() -> dict[str, Path]:
    """Return the ready-made environments, by name; in the repository their folder is a link to ``envs/``."""
    return {path.stem: path for path in sorted(Path(__file__).with_name("envs").glob("*.py"))}

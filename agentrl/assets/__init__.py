"""Files that ship inside the package."""

from __future__ import annotations

from pathlib import Path

__all__ = ["CHOSEN_VISION", "VISION_MODEL", "environment_paths", "located_model", "tiny_model_path"]

VISION_MODEL = "tiny-vision"
"""Name of the bundled model that reads images."""
CHOSEN_VISION = f"the bundled {VISION_MODEL}, because the environment shows pictures and no --model is named"


def tiny_model_path() -> Path:
    """Directory of the bundled chat model, in Hugging Face form; made by `examples.tiny_model.make`."""
    return Path(__file__).with_name("tiny-chat")


def located_model(name: str) -> str:
    """Return a model's directory or hub name; for the name of the bundled model that reads images its directory.

    That is made by `examples.vision_model.make`.
    """
    return str(Path(__file__).with_name(VISION_MODEL)) if name == VISION_MODEL and not Path(name).exists() else name


def environment_paths() -> dict[str, Path]:
    """Return the ready-made environments, by name; in the repository their folder is a link to ``envs/``."""
    return {path.stem: path for path in sorted(Path(__file__).with_name("envs").glob("*.py"))}


def model_path(name: str) -> str:
    """Return the directory or hub name of a model; the bundled one where none is named."""
    return name or str(tiny_model_path())

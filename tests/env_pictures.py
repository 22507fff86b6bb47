"""Draws what two environments show, for docs/gallery.md and the README.

python -m tests.env_pictures
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from envs import picture_grid, shapes

OUT = Path(__file__).parents[1] / "docs" / "gallery"
SCALE, GAP = 2, 8
"""Pixels of a side of each pixel, and pixels between two pictures."""
LONG = 4
"""Moves of the walk that is drawn."""


def strip(pictures: Sequence[np.ndarray]) -> Image.Image:
    """Return pictures of one size side by side, enlarged, with white between them."""
    large = [np.kron(picture, np.ones((SCALE, SCALE, 1), dtype=np.uint8)) for picture in pictures]
    gap = np.full((len(large[0]), GAP, 3), 255, dtype=np.uint8)
    parts = [part for picture in large for part in (picture, gap)]
    return Image.fromarray(np.concatenate(parts[:-1], axis=1))


def walk() -> list[np.ndarray]:
    """Return every observation of a walk straight to the goal."""
    walker, goal = next(each for each in picture_grid.beginnings() if np.abs(np.subtract(*each)).sum() == LONG)
    frames = [picture_grid.draw(walker, goal)]
    while walker != goal:
        walker = picture_grid.moved(walker, picture_grid.helpful(walker, goal)[0])
        frames.append(picture_grid.draw(walker, goal))
    return frames


def drawn() -> dict[str, Image.Image]:
    """Return the picture of each environment by its name."""
    examples = [task.images[0] for task in shapes.make_tasks(0, LONG + 1)]
    return {"shapes": strip(examples), "picture_grid": strip(walk())}


def main() -> None:
    """Write the pictures."""
    OUT.mkdir(exist_ok=True)
    for name, picture in drawn().items():
        picture.save(OUT / f"{name}.png", optimize=True)


if __name__ == "__main__":
    main()

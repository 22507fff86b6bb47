"""Pictures of an episode in the terminal: coloured characters where it has them, else files to open."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from agentrl.core.images import ImageInput
from agentrl.env.images import file_suffix
from agentrl.rollout.images import decoded
from agentrl.track.text import Screen

MOST_COLUMNS, MOST_LINES = 64, 24
HALF = "▀"
"""A character whose upper half has the colour of the text, and whose lower half that of its background."""


class PictureScreen:
    """Prints images as a model reads them, numbered within an episode."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._number = 0
        self._folder: Path | None = None  # of pictures that the terminal cannot show

    def begin(self) -> None:
        """Begin to count anew."""
        self._number = 0

    def show(self, images: Iterable[ImageInput]) -> None:
        """Print images; where the terminal has no colours, the paths of files with their bytes."""
        for image in images:
            self._number += 1
            picture = decoded(image.data, max_pixels=2**62)  # it was small enough for the reader
            size = f"{picture.width} x {picture.height} pixels, {len(image.token_ids)} tokens"
            place = "" if self._screen.paints else f", {self._written(image)}"
            self._screen.line((f"picture {self._number}: ", "cyan"), size + place, indent=2)
            if self._screen.paints:
                picture.thumbnail((min(MOST_COLUMNS, self._screen.console.width - 2), 2 * MOST_LINES))
                for parts in lines_of(picture):
                    self._screen.line("  ", *parts)

    def _written(self, image: ImageInput) -> Path:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="agentrl-pictures-"))
        path = self._folder / f"{image.key[:16]}{file_suffix(image.data)}"
        if not path.exists():
            path.write_bytes(image.data)
        return path


def lines_of(picture: Any) -> Iterator[list[tuple[str, str]]]:
    """Yield texts with their styles for each two rows of pixels of a PIL image of the mode RGB, from the top."""
    pixels = np.asarray(picture)
    for row in range(0, len(pixels), 2):
        styles = (" on ".join(f"rgb({r},{g},{b})" for r, g, b in column.tolist()) for column in pixels[row : row + 2].swapaxes(0, 1))
        yield [(HALF * len(list(same)), style) for style, same in groupby(styles)]

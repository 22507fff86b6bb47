"""Parts of a picture that the tokens of an image stand for, for people to see."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import TypeAlias

import numpy as np

from agentrl.core.images import ImageInput

Block: TypeAlias = list[float]
"""Place of the first of a block of tokens among those of its image, its rows and columns, and the part of the picture that it covers:
left, top, right and bottom, from 0 to 1."""
SAME_ROW = 2
"""Tokens between two tiles of a picture that are beside each other, in the form of Idefics3; at the end of a row there are more."""


def blocks_of(image: ImageInput) -> list[Block]:
    """Return the blocks of tokens whose patches are known; none if the tokens do not tell how they are arranged.

    One block covers the whole picture: of as many rows and columns as the processor says, or else a square. Several blocks of one size
    are tiles, row by row, and at the end one of the whole picture.
    """
    runs = list(_runs(image))
    sizes = {end - begin for begin, end in runs}
    if len(sizes) != 1:
        return []
    grid = _grid(image, sizes.pop())
    if grid is None:
        return []
    gaps = [after[0] - before[1] for before, after in pairwise(runs)]
    columns = next((number for number, gap in enumerate(gaps, 1) if gap != SAME_ROW), 1)
    rows, rest = divmod(len(runs) - 1, columns)
    if rest or min(gaps, default=SAME_ROW) < SAME_ROW:
        return []
    tiles = [(x / columns, y / rows, (x + 1) / columns, (y + 1) / rows) for y in range(rows) for x in range(columns)]
    return [[begin, *grid, *part] for (begin, _), part in zip(runs, [*tiles, (0, 0, 1, 1)], strict=True)]


def _runs(image: ImageInput) -> Iterator[tuple[int, int]]:
    """Yield beginnings and ends of the runs of the token that the image has most of, which is the one that pixels replace."""
    ids, counts = np.unique(image.token_ids, return_counts=True)
    token = image.placeholder if not counts.size or counts.max() == 1 else ids[counts.argmax()]
    edges = np.flatnonzero(np.diff((image.token_ids == token).astype(np.int8), prepend=0, append=0)).tolist()
    yield from zip(edges[::2], edges[1::2], strict=True)


def _grid(image: ImageInput, size: int) -> tuple[int, int] | None:
    """Return the rows and columns of a block of so many tokens."""
    known = image.tensors.get("image_grid_thw")
    if known is None:
        side = math.isqrt(size)
        return (side, side) if side * side == size else None
    _, height, width = known.array.reshape(-1).tolist()[:3]
    merged = math.isqrt(height * width // size) or 1
    rows, columns = height // merged, width // merged
    return (rows, columns) if rows * columns == size else None

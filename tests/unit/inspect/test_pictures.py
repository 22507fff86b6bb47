"""Pictures in a terminal: two pixels to a character, or files where there are no colours."""

from __future__ import annotations

import io
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from agentrl.core.images import ImageInput
from agentrl.core.types import ints
from agentrl.inspect.play_terminal import HALF, PictureScreen, lines_of
from agentrl.track.text import Screen

RED, BLUE, GREEN = (255, 0, 0), (0, 0, 255), (0, 128, 0)


def png(pixels: np.ndarray, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(file, format=kind)
    return file.getvalue()


def image(width: int, height: int, key: str = "0123456789abcdef0", kind: str = "PNG") -> ImageInput:
    data = png(np.full((height, width, 3), GREEN), kind)
    return ImageInput(key=key, data=data, token_ids=ints([7, 7, 7]), placeholder=7, tensors={})


def shown(images: list[ImageInput], *, width: int = 100, **terminal: object) -> str:
    options = {"force_terminal": True, "color_system": "truecolor", "legacy_windows": False, **terminal}
    file = io.TextIOWrapper(io.BytesIO(), encoding=str(options.pop("encoding", "utf-8")))
    pictures = PictureScreen(Screen(Console(file=file, width=width, **options)))
    pictures.show(images)
    file.seek(0)
    return file.read()


def test_a_character_has_the_colour_of_the_upper_pixel_on_that_of_the_lower() -> None:
    pixels = np.array([[RED, RED, BLUE], [BLUE, BLUE, BLUE], [GREEN, RED, RED]], dtype=np.uint8)
    assert list(lines_of(Image.fromarray(pixels))) == [
        [(HALF * 2, "rgb(255,0,0) on rgb(0,0,255)"), (HALF, "rgb(0,0,255) on rgb(0,0,255)")],
        [(HALF, "rgb(0,128,0)"), (HALF * 2, "rgb(255,0,0)")],  # an odd row has nothing below it
    ]


@pytest.mark.parametrize(
    ("size", "width", "columns", "lines"),
    [((10, 4), 100, 10, 2), ((64, 64), 100, 48, 24), ((500, 100), 100, 64, 7), ((64, 64), 20, 18, 9), ((30, 900), 100, 2, 24)],
)
def test_a_picture_fits_the_terminal_and_keeps_its_shape(size: tuple[int, int], width: int, columns: int, lines: int) -> None:
    rows = [line for line in shown([image(*size)], width=width).splitlines() if HALF in line]
    assert [row.count(HALF) for row in rows] == [columns] * lines
    assert "\x1b[38;2;0;128;0;48;2;0;128;0m" in rows[0]


def test_pictures_are_numbered_in_an_episode_and_sized() -> None:
    text = re.sub(r"\x1b\[[0-9;]*m", "", shown([image(10, 4), image(2, 2)]))
    assert "  picture 1: 10 x 4 pixels, 3 tokens\n" in text
    assert "  picture 2: 2 x 2 pixels, 3 tokens\n" in text


@pytest.mark.parametrize("terminal", [{"force_terminal": False}, {"no_color": True}, {"color_system": "standard"}, {"encoding": "ascii"}])
def test_elsewhere_the_path_of_a_file_is_printed_once_per_picture(
    terminal: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    one, other = image(10, 4), image(9, 9, "fedcba9876543210f", "JPEG")
    text = re.sub(r"\x1b\[[0-9;]*m", "", shown([one, other, one], width=200, **terminal))
    paths = [Path(line.rpartition(", ")[2]) for line in text.splitlines()]
    assert [path.name for path in paths] == ["0123456789abcdef.png", "fedcba9876543210.jpeg", "0123456789abcdef.png"]
    assert [path.read_bytes() for path in paths[:2]] == [one.data, other.data]
    assert {path.parent.parent for path in paths} == {tmp_path}
    assert HALF not in text


def test_the_next_episode_counts_anew() -> None:
    file = io.StringIO()
    pictures = PictureScreen(Screen(Console(file=file, force_terminal=True, color_system="truecolor", width=80)))
    pictures.show([image(2, 2)])
    pictures.begin()
    pictures.show([image(2, 2)])
    assert file.getvalue().count("picture 1") + file.getvalue().count("picture 2") == file.getvalue().count("picture 1") == 2

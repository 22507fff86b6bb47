"""Text on the colours of the viewer's scales, by the contrast that WCAG 2.1 asks for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Page

SAMPLES = 2001
LEAST = 4.5
WHITE, DARK = (255, 255, 255), (27, 31, 35)


def luminance(colour: Sequence[float]) -> float:
    """The relative luminance of WCAG 2.1, of channels from 0 to 255."""
    red, green, blue = (c / 255 / 12.92 if c / 255 <= 0.04045 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(first: Sequence[float], second: Sequence[float]) -> float:
    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize(("kind", "dark"), [("sequential", False), ("sequential", True), ("diverging", False)])
def test_text_is_read_on_every_colour_of_a_scale(page: Page, kind: str, dark: bool) -> None:
    script = "async ([kind, dark, count]) => (await import(new URL('static/colour.js', document.baseURI))).samples(kind, dark, count)"
    panel, coloured = DARK if dark else WHITE, 0
    for style in page.evaluate(script, [kind, dark, SAMPLES]):
        if "color" in style:
            *channels, alpha = map(float, re.findall(r"[\d.]+", style["backgroundColor"]))
            shown = [alpha * channel + (1 - alpha) * behind for channel, behind in zip(channels, panel, strict=True)]
            assert contrast(shown, [int(style["color"][place : place + 2], 16) for place in (1, 3, 5)]) >= LEAST, style
            coloured += 1
    assert coloured > 0.8 * SAMPLES

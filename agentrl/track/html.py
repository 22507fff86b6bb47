"""Curves and tables as HTML for notebooks; every text is shown, never obeyed."""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Iterable, Sequence

from agentrl.track.text import mean, number, visible

WIDTH, HEIGHT, MARGIN = 520, 120, 4
POINTS = 260
"""Points of a curve at most; longer series are averaged."""
CELL = "padding:1px 12px 1px 0;text-align:left;vertical-align:top"


def escaped(text: object) -> str:
    """Return a text, which may come of an environment or a model, as HTML that shows its characters."""
    return html.escape(visible(str(text)))


def table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table of texts; without headings the first cell of each row is one."""
    head = "".join(f'<th style="{CELL}">{escaped(text)}</th>' for text in headings)
    lines = "".join(
        f"<tr>{''.join(_cell(text, heading=not headings and not place) for place, text in enumerate(row))}</tr>" for row in rows
    )
    return f"<table>{f'<thead><tr>{head}</tr></thead>' if headings else ''}<tbody>{lines}</tbody></table>"


def _cell(text: object, *, heading: bool) -> str:
    kind = "th" if heading else "td"
    return f'<{kind} style="{CELL}">{escaped(text)}</{kind}>'


def curve(values: Sequence[float], *, name: str) -> str:
    """Return a line through one value for each step, with its lowest and its highest value; "" for fewer than two values."""
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 2:
        return ""
    columns = min(POINTS, len(finite))
    edges = [round(place * len(finite) / columns) for place in range(columns + 1)]
    means = [mean(finite[start:end]) for start, end in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    across, up = (WIDTH - 2 * MARGIN) / (columns - 1), (HEIGHT - 2 * MARGIN) / ((high - low) or 1.0)
    points = " ".join(f"{MARGIN + x * across:.1f},{HEIGHT - MARGIN - (value - low) * up:.1f}" for x, value in enumerate(means))
    return (
        f'<div style="font-size:85%">{escaped(name)}, {number(low)} to {number(high)}, steps 1 to {len(values)}</div>'
        f'<svg role="img" aria-label="{escaped(name)} by step" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
        ' style="border-left:1px solid #8888;border-bottom:1px solid #8888">'
        f'<polyline points="{points}" fill="none" stroke="#3b7dd8" stroke-width="2"/></svg>'
    )

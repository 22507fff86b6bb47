"""Numbers as people read them."""

from __future__ import annotations

import difflib
import functools
import itertools
import math
import re
import textwrap
import unicodedata
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

KEPT = "\n\t"

# Everything that could act on a terminal or change the order in which text is shown: control characters (C0 with ESC,
# DEL, C1), line separators, surrogates, and the format characters that reverse, hide or break text.
_SUSPECT = re.compile("[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u2028\\u2029\\ud800-\\udfff]|[^\\x00-\\x7f]")


def visible(text: str, *, lines: bool = True) -> str:
    """Return `text` with the characters that a terminal would obey spelled out: escape becomes backslash, x, 1, b.

    Line breaks and tabs are kept, but without `lines` they are spelled out as well.
    """
    shown = _SUSPECT.sub(_escaped, text)
    return shown if lines else shown.replace("\n", "\\n").replace("\t", "\\t")


def _escaped(found: re.Match[str]) -> str:
    character = found.group()
    if character in KEPT or unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Zl", "Zp"):
        return character
    return character.encode("unicode_escape").decode("ascii")


BLOCKS = "▁▂▃▄▅▆▇█"
ASCII_BLOCKS = "_.-=*#"


def sparkline(values: Sequence[float], width: int, *, blocks: str = BLOCKS) -> str:
    """Return a curve one line high and at most `width` characters long, into which longer series are averaged; NaN is left out."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    columns = min(width, len(finite))
    edges = [round(i * len(finite) / columns) for i in range(columns + 1)]
    means = [mean(finite[start:end]) for start, end in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return "".join(blocks[min(len(blocks) - 1, int((value - low) / span * len(blocks)))] for value in means)


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean, NaN of nothing."""
    return sum(values) / len(values) if values else math.nan


def duration(seconds: float) -> str:
    """Seconds as ``8.4 s``, ``3m 05s`` or ``2h 07m``; ``?`` if not finite."""
    if not math.isfinite(seconds):
        return "?"
    # From here on one decimal would be rounded to 60.0 s.
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    return f"{whole // 60}m {whole % 60:02d}s" if whole < 3600 else f"{whole // 3600}h {whole % 3600 // 60:02d}m"


def count(number: float) -> str:
    """A count in at most five characters or so: ``950``, ``12.3k``, ``4.56M``."""
    if not math.isfinite(number):
        return "?"
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        # Three digits of 999.5k would be 1e+03k.
        if abs(number) >= size * 0.9995:
            return f"{number / size:.3g}{unit}"
    return f"{number:.0f}"


def percent(share: float) -> str:
    """A share as whole percent; ``?`` if not finite."""
    return f"{100 * share:.0f}%" if math.isfinite(share) else "?"


def number(value: float, digits: int = 3) -> str:
    """A value with `digits` decimals; ``?`` if not finite."""
    return f"{value:.{digits}f}" if math.isfinite(value) else "?"


def counted(number_of: int, noun: str) -> str:
    """Return a number with its noun, whose plural ends with an s: ``1 task``, ``2 tasks``."""
    return f"{number_of} {noun}{'s' * (number_of != 1)}"


PIPE_WIDTH = 200
LABEL_WIDTH = 13
"""Width of the labels at the beginning of lines, and one space at least."""
MIN_LAST_COLUMN = 14
"""Width of a table's last column at least; a table with wide columns before it is wider than the terminal."""


class Screen:
    """Prints to a console; styled in a terminal, plain text elsewhere.

    Args:
        console: Where to print; standard output by default.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()
        if not self.console.is_terminal:
            # Without a terminal rich takes 80 columns.
            self.console.width = PIPE_WIDTH

    @property
    def unicode(self) -> bool:
        """True if characters beyond ASCII can be shown."""
        return self.console.encoding.lower().startswith("utf")

    @property
    def paints(self) -> bool:
        """True if pictures can be made of coloured characters."""
        console = self.console
        return console.is_terminal and self.unicode and not console.no_color and console.color_system in ("256", "truecolor")

    def labelled(self, label: str, text: str, style: str = "bold cyan", *, whole: bool = False) -> None:
        """Print a text behind its label; in a terminal between words and under its beginning, or with `whole` on one line, to be copied."""
        shown = f"{label:<{LABEL_WIDTH}}"
        room = self.console.width - LABEL_WIDTH
        lines = text.split("\n") if whole or not self.console.is_terminal else wrapped(text, room)
        self.line((shown, style), ("\n" + " " * LABEL_WIDTH).join(lines))

    def line(self, *parts: str | tuple[str, str], indent: int = 0, prose: bool = False) -> None:
        """Print texts, each alone or with a style, as one paragraph with `indent` spaces before every line.

        In a terminal the lines of `prose` are broken between words; others, such as code and commands, are left to the terminal.
        """
        text = Text()
        for part in parts:
            words, style = (part, "") if isinstance(part, str) else part
            text.append(visible(words).replace("\n", "\n" + " " * indent), style=style)
        shown = Text(" " * indent) + text
        if not self.unicode:
            shown = Text(shown.plain.encode("ascii", "backslashreplace").decode())
        self.console.print(shown, soft_wrap=not (prose and self.console.is_terminal))

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[str | tuple[str, str]]]) -> None:
        """Print rows under their headings; a column whose name ends with ``#`` holds numbers and is set flush right.

        The last column is cut to what the terminal has left, but not below 14 characters; the others are not cut.
        """
        names = [name.rstrip("#") for name in columns]
        lines = [[Text(name, style="bold") for name in names], *([_cell(value) for value in row] for row in rows)]
        widths = [max(line[index].cell_len for line in lines) for index in range(len(names))]
        widths[-1] = min(widths[-1], max(MIN_LAST_COLUMN, self.console.width - sum(widths[:-1]) - 2 * len(widths[1:])))
        for line in lines:
            line[-1].truncate(widths[-1], overflow="ellipsis" if self.unicode else "crop")
            cells = [_aligned(cell, width, right=name.endswith("#")) for cell, width, name in zip(line, widths, columns, strict=True)]
            shown = Text("  ").join(cells)
            shown.rstrip()
            self.console.print(shown, soft_wrap=True)


def _aligned(cell: Text, width: int, *, right: bool) -> Text:
    if right:
        cell.pad_left(width - cell.cell_len)
    else:
        cell.pad_right(width - cell.cell_len)
    return cell


def wrapped(text: str, width: int) -> list[str]:
    """Return the lines of a text, broken between words only, at hyphens neither; a word that is longer than `width` stays whole."""
    fold = functools.partial(textwrap.wrap, width=max(20, width), break_long_words=False, break_on_hyphens=False)
    return [line for paragraph in text.split("\n") for line in fold(paragraph) or [""]]


def _cell(value: str | tuple[str, str]) -> Text:
    words, style = (value, "") if isinstance(value, str) else value
    return Text(visible(words, lines=False), style=style)


def text_difference(expected: str, got: str, *, context: int = 2) -> list[tuple[str, str]]:
    """Return the lines of a comparison, each with its style: ``-`` only expected, ``+`` only got; spelled out for a terminal."""
    styles = {"-": "red", "+": "green"}
    lines = difflib.unified_diff(visible(expected).split("\n"), visible(got).split("\n"), lineterm="", n=context)
    body = [line for line in lines if not line.startswith(("---", "+++"))]
    return [(line, "dim" if line.startswith("@@") else styles.get(line[:1], "")) for line in body]


def figures_table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, style: str) -> Table:
    """Return a table for the terminal: names on the left, figures on the right, headings in a style."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style=style)
    for position, heading in enumerate(headings):
        table.add_column(heading, justify="right" if position else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table

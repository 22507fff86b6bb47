"""Printing text that others wrote: nothing in it acts on the terminal, is taken for markup, or is cut."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from agentrl.track.visible import visible

PIPE_WIDTH = 200


class Screen:
    """Prints to a console; styled in a terminal, plain text elsewhere.

    Args:
        console: Where to print; standard output by default.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()
        if not self.console.is_terminal:
            self.console.width = PIPE_WIDTH

    @property
    def unicode(self) -> bool:
        """Whether characters beyond ASCII can be shown."""
        return self.console.encoding.lower().startswith("utf")

    def line(self, *parts: str | tuple[str, str], indent: int = 0) -> None:
        """Print texts, each alone or with a style, as one paragraph.

        Args:
            parts: What to print, one after another.
            indent: Spaces before every line.
        """
        text = Text()
        for part in parts:
            words, style = (part, "") if isinstance(part, str) else part
            text.append(visible(words).replace("\n", "\n" + " " * indent), style=style)
        shown = Text(" " * indent) + text
        if not self.unicode:
            shown = Text(shown.plain.encode("ascii", "backslashreplace").decode())
        self.console.print(shown, soft_wrap=True)

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[str | tuple[str, str]]]) -> None:
        """Print rows under their headings; a column whose name ends with ``#`` holds numbers and is set flush right.

        The last column is cut to the width of the terminal; the others are not.
        """
        table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
        for index, name in enumerate(columns):
            last = index == len(columns) - 1
            table.add_column(
                name.rstrip("#"),
                justify="right" if name.endswith("#") else "left",
                no_wrap=True,
                overflow="ellipsis" if last and self.unicode else "crop",
            )
        for row in rows:
            table.add_row(*(_cell(value) for value in row))
        self.console.print(table)


def _cell(value: str | tuple[str, str]) -> Text:
    words, style = (value, "") if isinstance(value, str) else value
    return Text(visible(words, lines=False), style=style)


def text_difference(expected: str, got: str, *, context: int = 2) -> list[tuple[str, str]]:
    """Lines of a comparison, each with its style: ``-`` only expected, ``+`` only got; spelled out for a terminal.

    Args:
        expected: What it was.
        got: What it is.
        context: Lines shown around a change.
    """
    styles = {"-": "red", "+": "green"}
    lines = difflib.unified_diff(visible(expected).split("\n"), visible(got).split("\n"), lineterm="", n=context)
    body = [line for line in lines if not line.startswith(("---", "+++"))]
    return [(line, "dim" if line.startswith("@@") else styles.get(line[:1], "")) for line in body]

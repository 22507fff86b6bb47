"""Reads the prose of Markdown pages: paragraphs and list items, without code, tables, formulas, headings and generated regions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

ITEM = re.compile(r"^ *(?:[-*]|\d{1,2}[.)]) +")
NO_PROSE = (
    re.compile(r"<!-- (\w+): begin -->.*?<!-- \1: end -->", re.DOTALL),
    re.compile(r"^ *(`{3,}|~{3,}).*?^ *\1 *$", re.DOTALL | re.MULTILINE),
    re.compile(r"^ *\$\$.*?\$\$ *$", re.DOTALL | re.MULTILINE),
)
"""Generated regions, blocks of code, and formulas."""
LINK = re.compile(r"!?\[((?:[^\[\]]|\[[^\]]*\])*)\]\([^)]*\)")
END = re.compile(r"(?<=[^.][.!?])[\"')*_]*\s+")
ABBREVIATION = re.compile(r"\b(e\.g|i\.e|et al|vs|cf)\.$")


@dataclass(frozen=True, slots=True)
class Block:
    """A paragraph or a list item.

    Attributes:
        first: Number of its first line, from 1.
        lines: Its lines as they stand in the page.
    """

    first: int
    lines: tuple[str, ...]

    @property
    def text(self) -> str:
        """Return the block as one line, without the marker of a list."""
        return " ".join([ITEM.sub("", self.lines[0], count=1).strip(), *(line.strip() for line in self.lines[1:])])


def blocks(page: str) -> Iterator[Block]:
    """Yield the paragraphs and list items of a Markdown page, in order."""
    for region in NO_PROSE:
        page = region.sub(lambda found: "\n" * found[0].count("\n"), page)
    lines: list[str] = []
    for number, line in enumerate([*_prose(page.split("\n")), ""], 1):
        if lines and (not line or ITEM.match(line)):
            yield Block(number - len(lines), tuple(lines))
            lines = []
        if line:
            lines.append(line)


def _prose(lines: Iterable[str]) -> Iterator[str]:
    """Yield every line, those of headings, tables, HTML and indented code as empty ones."""
    in_list = False
    for line in lines:
        in_list = bool(ITEM.match(line)) or (in_list and (not line or line.startswith(" ")))
        code = line.startswith("    ") and not in_list
        yield "" if code or line.lstrip().startswith(("#", "|", "<")) else line


def sentences(text: str) -> list[str]:
    """Return the sentences of a block; a link is its words."""
    plain = LINK.sub(r"\1", text)
    parts: list[str] = []
    start = 0
    for gap in END.finditer(plain):
        if not ABBREVIATION.search(plain[: gap.start()]):
            parts.append(plain[start : gap.start()])
            start = gap.end()
    return [*parts, plain[start:]]


def words(sentence: str) -> int:
    """Return the number of words of a sentence: parts between spaces that have a letter or a digit."""
    return sum(any(character.isalnum() for character in part) for part in sentence.split())

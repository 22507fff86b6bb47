"""Text of models and environments, made fit for a terminal."""

from __future__ import annotations

import re
import unicodedata

KEPT = "\n\t"

# Everything that could act on a terminal or change the order in which text is shown: control characters (C0 with ESC,
# DEL, C1), line separators, surrogates, and the format characters that reverse, hide or break text.
_SUSPECT = re.compile("[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u2028\\u2029\\ud800-\\udfff]|[^\\x00-\\x7f]")


def visible(text: str, *, lines: bool = True) -> str:
    """A copy of `text` in which characters that a terminal would obey are spelled out: escape becomes backslash, x, 1, b.

    Args:
        text: Anything.
        lines: Keep line breaks and tabs; else they are spelled out as well.
    """
    shown = _SUSPECT.sub(_escaped, text)
    return shown if lines else shown.replace("\n", "\\n").replace("\t", "\\t")


def _escaped(found: re.Match[str]) -> str:
    character = found.group()
    if character in KEPT or unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Zl", "Zp"):
        return character
    return character.encode("unicode_escape").decode("ascii")

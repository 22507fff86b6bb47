"""No text of a model or an environment can act on a terminal."""

import string
import unicodedata

from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.track.text import visible

HOSTILE = st.sampled_from(
    ["\x1b[2J", "\x1b]0;title\x07", "\x9b31m", "\x90q\x9c", "\r", "\b\b", "\x7f", "\u202e", "\u2066", "\u200b", "\u2028", "\ud800", "\x85"]
)
TEXT = st.lists(st.one_of(HOSTILE, st.text(), st.characters(categories=["Cc", "Cf", "Cs", "Zl", "Zp"]))).map("".join)


@settings(max_examples=500, deadline=None)
@given(TEXT)
def test_nothing_that_a_terminal_obeys_is_left(text: str) -> None:
    shown = visible(text)
    assert not [c for c in shown if c not in "\n\t" and unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")]
    assert not set(visible(text, lines=False)) & set("\n\t")
    shown.encode()
    assert visible(shown) == shown


def test_ordinary_text_is_left_alone() -> None:
    for text in (string.printable[:-5] + "\n\t", "Grüße, 東京 ☃ 🙂", "tabs\tand\nlines"):
        assert visible(text) == text


def test_what_is_escaped_can_be_read() -> None:
    assert visible("\x1b[31mred\x07\r\n\u202e") == "\\x1b[31mred\\x07\\r\n\\u202e"
    assert visible("a\nb", lines=False) == "a\\nb"

"""Numbers as people read them."""

import io
import math

import pytest
from rich.console import Console

from agentrl.track.text import LABEL_WIDTH, Screen, count, duration, mean, number, percent, sparkline


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0.0 s"), (8.44, "8.4 s"), (59.96, "1m 00s"), (185, "3m 05s"), (3599.7, "1h 00m"), (7620, "2h 07m"), (math.nan, "?")],
)
def test_duration(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (950, "950"), (12_345, "12.3k"), (999_900, "1M"), (4.56e6, "4.56M"), (math.nan, "?")]
)
def test_count(value, text):
    assert count(value) == text


def test_percent_and_number_show_unknown_values():
    assert (percent(0.256), percent(math.nan), number(0.12345), number(math.inf)) == ("26%", "?", "0.123", "?")


def test_sparkline_rises_with_its_values():
    assert sparkline([0, 1, 2, 3], 10, blocks="abcd") == "abcd"
    assert sparkline([0, 0, 3, 3], 2, blocks="abcd") == "ad"


def test_sparkline_of_constant_missing_or_no_values():
    assert sparkline([1.0, math.nan, 1.0], 8, blocks="ab") == "aa"
    assert sparkline([], 8) == ""


@pytest.mark.parametrize("length", [1, 7, 40, 41, 1000])
def test_sparkline_is_never_wider_than_asked(length):
    assert len(sparkline(list(range(length)), 40)) == min(40, length)


def test_mean_of_nothing_is_nan():
    assert mean([1.0, 2.0]) == 1.5
    assert math.isnan(mean([]))


def test_labelled_text_breaks_between_words_in_a_terminal_and_nowhere_in_a_pipe():
    text = "the environment of this run waits for a reward server, which is at http://127.0.0.1:8000/very/long/path/that/stays/whole"
    for terminal, longest in ((True, 80), (False, 200)):
        out = io.StringIO()
        Screen(Console(file=out, width=80, force_terminal=terminal, color_system=None)).labelled("note", text)
        lines = out.getvalue().splitlines()
        assert " ".join(" ".join(lines).split()) == f"note {text}"
        assert max(map(len, lines)) <= longest
        assert len(lines) == (2 if terminal else 1)
        assert all(line.startswith(" " * LABEL_WIDTH) for line in lines[1:])


@pytest.mark.parametrize("width", [80, 100, 160])
def test_a_table_has_no_blanks_at_the_end_of_its_lines(width: int) -> None:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    rows = [("a", "12", "short"), ("longer name", "7", "x" * 200), ("", "", "")]
    Screen(console).table(["name", "count#", "text"], rows)
    lines = console.file.getvalue().splitlines()
    assert lines == [line.rstrip() for line in lines]
    assert lines[1] == "a               12  short"
    assert max(map(len, lines)) == width

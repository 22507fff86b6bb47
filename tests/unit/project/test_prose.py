"""Pages are easy to read: sentences of at most 40 words, in lines of at most 120 columns."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.prose import LINK, blocks, sentences, words
from tests.reference import PAGES as GENERATED
from tests.unit.project.test_pages import PAGES

ROOT = Path(__file__).parents[3]
MAX_WORDS, MAX_COLUMNS = 40, 120
WRITTEN = {name: ROOT / name for name in (str(page.relative_to(ROOT)) for page in PAGES) if name.removeprefix("docs/") not in GENERATED}

SAMPLE = """\
# A heading of any length

One sentence
over `a line` break. Another, with
[two words](https://example.org/a%20b).

    agentrl train --agent my_env.py

- An item.
  It goes on.
- Another item; e.g. this one.

| a table | of many words |
|---|---|

```text
Code, which is no prose.
```

$$
x = 1
$$

<!-- made: begin -->
Text that a program wrote.
<!-- made: end -->
The end.
"""


@pytest.mark.parametrize("name", WRITTEN)
def test_sentences_are_short(name: str) -> None:
    texts = [(block.first, text) for block in blocks(WRITTEN[name].read_text(encoding="utf-8")) for text in sentences(block.text)]
    assert texts
    long = [f"{name}:{line}: {words(text)} words: {text}" for line, text in texts if words(text) > MAX_WORDS]
    assert not long, "one thought per sentence:\n" + "\n".join(long)


@pytest.mark.parametrize("name", WRITTEN)
def test_lines_are_short(name: str) -> None:
    lines = [line for block in blocks(WRITTEN[name].read_text(encoding="utf-8")) for line in block.lines]
    assert not [line for line in lines if len(line) > MAX_COLUMNS and not LINK.fullmatch(line.strip())]


def test_what_a_program_writes_and_code_are_no_prose() -> None:
    assert [(block.first, sentences(block.text)) for block in blocks(SAMPLE)] == [
        (3, ["One sentence over `a line` break.", "Another, with two words."]),
        (9, ["An item.", "It goes on."]),
        (11, ["Another item; e.g. this one."]),
        (27, ["The end."]),
    ]


@pytest.mark.parametrize(
    ("text", "count"), [("Four plain words here.", 4), ("`--flag N` counts as written: 6", 6), ("No -- dashes ... nor dots", 4), ("", 0)]
)
def test_words_are_counted(text: str, count: int) -> None:
    assert words(text) == count

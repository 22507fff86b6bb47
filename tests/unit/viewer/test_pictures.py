"""The pictures of docs/viewer.md."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[3] / "docs"
MOST_BYTES = 150_000


def test_every_picture_is_shown_and_small() -> None:
    shown = re.findall(r"!\[[^\]]+\]\(viewer/([\w-]+\.png)\)", (DOCS / "viewer.md").read_text(encoding="utf-8"))
    found = {path.name: path.stat().st_size for path in (DOCS / "viewer").iterdir()}
    assert sorted(shown) == sorted(found)
    assert max(found.values()) < MOST_BYTES

"""Puts versions of the documentation side by side: a folder for each, their list, and a first page that leads to the newest.

python -m tests.site.versions site
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from packaging.version import Version

FIRST = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><title>agentrl</title><meta http-equiv="refresh" content="0; url={newest}/index.html"></head>
<body><h1>agentrl</h1><p>Documentation by version:</p><ul>{links}</ul></body>
</html>
"""


def versions(site: Path) -> list[str]:
    """Return the versions of which a site holds the pages, the newest first."""
    return sorted((path.parent.name for path in site.glob("*/index.html")), key=Version, reverse=True)


def write(site: Path) -> list[str]:
    """Write ``versions.json``, in the form of mike, and ``index.html``; return the versions."""
    held = versions(site)
    if not held:
        raise SystemExit(f"{site}: holds no version")
    rows = [{"version": name, "title": name, "aliases": ["latest"] if name == held[0] else []} for name in held]
    (site / "versions.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    links = "".join(f'<li><a href="{name}/index.html">{name}</a></li>' for name in held)
    (site / "index.html").write_text(FIRST.format(newest=held[0], links=links), encoding="utf-8")
    return held


def main(words: Sequence[str]) -> int:
    """Write the list and the first page of the folder that is given."""
    print("versions:", ", ".join(write(Path(words[0]))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

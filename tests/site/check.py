"""Checks a built documentation site: every link and anchor leads somewhere, and no page loads anything from elsewhere.

python -m tests.site.check site
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADS = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "audio": "src", "link": "href", "object": "data"}
"""What a browser fetches without being asked, by element; `a` is only followed by a click."""
FETCHED = {"stylesheet", "icon", "preconnect", "preload", "modulepreload", "dns-prefetch", "manifest"}
"""Relations of `link` that make a browser fetch, or connect."""


class Page(HTMLParser):
    """What a page names, links to and loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        """Take in one element."""
        given = {name: value or "" for name, value in attrs}
        self.names |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag in LOADS and LOADS[tag] in given and (tag != "link" or FETCHED & set(given.get("rel", "").split())):
            self.loads.append(given[LOADS[tag]])
        self.loads += [part.split()[0] for part in given.get("srcset", "").split(",") if part.strip()]


def problems(site: Path) -> Iterator[str]:
    """Sentences about what is wrong, none for a good site."""
    pages = {path.resolve(): Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    if not pages:
        yield f"{site}: holds no page"
    for path, page in pages.items():
        where = path.relative_to(site.resolve())
        if where.name == "404.html":  # served at any address, so its links begin at the root
            continue
        yield from (f"{where}: loads {address}" for address in page.loads if elsewhere(address))
        for link in page.links + [address for address in page.loads if not elsewhere(address)]:
            if not elsewhere(link) and not leads_somewhere(path, link, pages):
                yield f"{where}: {link} leads nowhere"
    for sheet in sorted(site.rglob("*.css")):
        text = sheet.read_text(encoding="utf-8")
        if any(f"{mark}{quote}{scheme}" in text for mark in ("url(", "@import ") for quote in ("", '"', "'") for scheme in ("http", "//")):
            yield f"{sheet.relative_to(site)}: loads from elsewhere"


def elsewhere(address: str) -> bool:
    """True if the address is on another machine."""
    return urlsplit(address).scheme in ("http", "https", "mailto") or address.startswith("//")


def leads_somewhere(page: Path, link: str, pages: dict[Path, Page]) -> bool:
    """True if the file that a relative link names exists, and has the anchor."""
    parts = urlsplit(link)
    if parts.scheme in ("data", "javascript"):
        return True
    target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
    target = target / "index.html" if target.is_dir() else target
    anchor = unquote(parts.fragment)
    if not anchor or target not in pages:
        return target.is_file()
    return anchor.startswith("__") or anchor in pages[target].names


def main(argv: Sequence[str]) -> int:
    """Print every problem; the code is 1 if there is one."""
    found = list(problems(Path(argv[0])))
    sys.stderr.write("".join(f"{line}\n" for line in found))
    number = len(list(Path(argv[0]).rglob("*.html")))
    sys.stdout.write(f"{number} pages, {len(found)} problems\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
